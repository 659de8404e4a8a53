# make demo       a whole run on a small model on the CPU
# make test       the test suite                        make test-all   with the long comparisons against other libraries
# make bench-gpu  kernels, layers and whole runs on this machine's GPU; records in outputs/gpu
# Each creates .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without DS_BUILD_OPS=0 DeepSpeed, which the tests use, could want a compiler; they need none of its operators.
PIP := DS_BUILD_OPS=0 $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Options of the recipe for `make demo` (`--seed 1`), of pytest for `make test`.
ARGS ?=
# Workers of the test run; each computes on one thread.
JOBS ?= 2

.PHONY: demo test test-all bench-gpu lint format clean

demo: $(VENV)/runtime
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/grpo.py --config recipes/configs/tiny_cpu.yaml --overwrite true $(ARGS)

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not large' $(ARGS)

test-all: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

bench-gpu: $(VENV)/bench
	$(BIN)/python -m benchmarks.gpu --out outputs/gpu $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs

$(VENV)/runtime: $(INPUTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/bench: $(VENV)/runtime
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/dev: $(VENV)/runtime
	$(PIP) --editable '.[dev]'
	@touch $@
