# make demo       a whole run on a small model on the CPU
# make test       the test suite                        make test-all   with the long comparisons against other libraries
# make test-vllm  tests that run vLLM on the CPU, in an environment of their own, .venv-vllm
# make test-llamacpp  tests that run llama.cpp on exported files; builds it once, into ~/.cache, or takes LLAMACPP=FOLDER
# make bench-gpu  kernels, layers and whole runs on this machine's GPU; records in outputs/gpu
# Each creates .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_LANE := tests/vllm_lane
# Without DS_BUILD_OPS=0 DeepSpeed, which the tests use, could want a compiler; they need none of its operators.
PIP := DS_BUILD_OPS=0 $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Options of the recipe for `make demo` (`--seed 1`), of pytest for `make test`.
ARGS ?=
# Workers of the test run; each computes on one thread.
JOBS ?= 2

.PHONY: demo test test-all test-vllm test-llamacpp bench-gpu lint format clean

demo: $(VENV)/runtime
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/grpo.py --config recipes/configs/tiny_cpu.yaml --overwrite true $(ARGS)

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not large and not vllm and not llamacpp' $(ARGS)

test-all: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not vllm and not llamacpp' $(ARGS)

test-vllm: $(VLLM_VENV)/ready
	OMP_NUM_THREADS=2 PYTHONPATH=.:kernels $(VLLM_VENV)/bin/python -m pytest -m vllm $(VLLM_LANE) $(ARGS)

test-llamacpp: $(VENV)/dev
	LLAMACPP=$$(PYTHON=$(BIN)/python tests/llamacpp_lane/build.sh) && export LLAMACPP && \
		OMP_NUM_THREADS=1 $(BIN)/pytest -m llamacpp tests/llamacpp_lane $(ARGS)

bench-gpu: $(VENV)/bench
	$(BIN)/python -m benchmarks.gpu --out outputs/gpu $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) outputs

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

# torchvision and its kin do not fit the CPU build of torch, and transformers imports them where they are.
$(VLLM_VENV)/ready: pyproject.toml $(VLLM_LANE)/requirements.txt $(VLLM_LANE)/constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --quiet \
		--requirement $(VLLM_LANE)/requirements.txt --constraint $(VLLM_LANE)/constraints.txt
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@
