# make demo       a whole run on a small model on the CPU
# make test       the test suite                        make test-all   with the long comparisons against other libraries
# make test-processors  tests that compare products, with the instructions of an older processor
# make test-vllm  tests that run vLLM on the CPU, in an environment of their own, .venv-vllm
# make test-versions  the main tests on the lower bounds of pyproject.toml and on the newest torch (.venv-oldest, .venv-newest)
# make test-latest    the test suite on the newest release of everything (.venv-latest), and what is newer there
# make test-llamacpp  tests that run llama.cpp on exported files; builds it once, into ~/.cache, or takes LLAMACPP=FOLDER
# make test-cases CASES=FOLDER  scripts that showed faults, each of which exits with 0 where it is gone
# make bench-gpu  kernels, layers and whole runs on this machine's GPU; records in outputs/gpu
# make lint       style and spelling                    make types      types, by mypy
# make docs       the site of the docs, links checked   make release    wheel and sdist, checked and used
# Each creates its environment by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
TOOLS_VENV := .venv-tools
TOOLS := $(TOOLS_VENV)/bin
VLLM_TESTS := tests/vllm_integration
# Without DS_BUILD_OPS=0 DeepSpeed, which the tests use, could want a compiler; they need none of its operators.
PIP := DS_BUILD_OPS=0 $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# Options of the recipe for `make demo` (`--seed 1`), of pytest for `make test`.
ARGS ?=
# Scripts of `make test-cases`, where they lie beside the checkout.
CASES ?= ../shared/cases
# Workers of the test run; each computes on one thread.
JOBS ?= 2

# The ends of what pyproject.toml allows: its lower bounds (Triton 3.6 does not interpret loops with numpy 2.4), and the
# newest torch and transformers. The kernels library is in one of them alone, because transformers looks for it.
VERSIONS_oldest := numpy==2.3.5
VERSIONS_newest := torch==2.15.0 triton==3.9.0 transformers==5.24.0 kernels==0.17.2
CONSTRAINTS_oldest = sed -n '/^dependencies/,/^]/s/.*"\([^>"]*\)>=\([^;"]*\).*/\1==\2.*/p' pyproject.toml
CONSTRAINTS_newest = grep -vE '^(torch|triton|transformers|numpy)==' constraints.txt
CONSTRAINTS_latest = true
VERSIONS ?= oldest newest
VERSIONS_TESTS := tests/kernels tests/ops tests/layers tests/checkpoint tests/cli tests/rl/test_trainer.py tests/test_quantizer.py

# Tests that compare products of several libraries, and variables that leave these fewer instructions than the processor
# has. `make test-processors PROCESSOR=ATEN_CPU_CAPABILITY=default PROCESSOR_TESTS=tests` runs the test suite so.
PROCESSOR_TESTS := tests/ops/test_products.py tests/ops/test_cpu_products.py tests/layers/test_linear.py \
	tests/layers/test_fp8_inputs.py tests/layers/test_packed_linear.py tests/layers/test_packed_experts.py \
	tests/layers/test_experts.py tests/layers/test_weight_cache.py tests/test_vllm_experts.py tests/test_vllm_plugin.py \
	tests/checkpoint/test_export_engines.py tests/recipes/test_gpt_oss.py
PROCESSOR := HF_MXFP4_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: demo test test-all test-processors test-vllm test-versions test-latest test-llamacpp test-cases bench-gpu lint types docs release format clean

demo: $(VENV)/runtime
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/grpo.py --config recipes/configs/tiny_cpu.yaml --overwrite true $(ARGS)

test: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not large and not vllm and not llamacpp' $(ARGS)

test-all: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not vllm and not llamacpp' $(ARGS)

test-processors: $(VENV)/dev
	$(PROCESSOR) OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m 'not large and not vllm and not llamacpp' \
		$(PROCESSOR_TESTS) $(ARGS)

test-vllm: $(VLLM_VENV)/ready
	OMP_NUM_THREADS=2 PYTHONPATH=.:kernels $(VLLM_VENV)/bin/python -m pytest -m vllm $(VLLM_TESTS) $(ARGS)

test-versions: $(VERSIONS:%=.venv-%/dev)
	for end in $(VERSIONS); do OMP_NUM_THREADS=1 PYTHONPATH=.:kernels .venv-$$end/bin/python -m pytest -n $(JOBS) \
		--dist loadfile -m 'not large' $(VERSIONS_TESTS) $(ARGS) || exit 1; done

test-latest: .venv-latest/dev
	DS_BUILD_OPS=0 .venv-latest/bin/pip --disable-pip-version-check install --quiet --upgrade --upgrade-strategy eager \
		--editable '.[dev]'
	@OMP_NUM_THREADS=1 PYTHONPATH=.:kernels .venv-latest/bin/python -m pytest -n $(JOBS) --dist loadfile \
		-m 'not large and not vllm and not llamacpp' $(ARGS) && result=passed || result=failed; \
		.venv-latest/bin/hf-mxfp4 env; echo "other versions than in constraints.txt:"; \
		.venv-latest/bin/pip freeze --exclude-editable | grep -Fvxf constraints.txt | paste -sd " "; \
		echo "the tests $$result"; test $$result = passed

test-llamacpp: $(VENV)/dev
	LLAMACPP=$$(PYTHON=$(BIN)/python tests/llamacpp_integration/build.sh) && export LLAMACPP && \
		OMP_NUM_THREADS=1 $(BIN)/pytest -m llamacpp tests/llamacpp_integration $(ARGS)

test-cases: $(VENV)/dev
	@failed=0; for script in $(CASES)/*.py; do \
		if OMP_NUM_THREADS=2 $(BIN)/python "$$script" > "$(VENV)/case.log" 2>&1; then echo "ok      $$script"; \
		else echo "FAILED  $$script"; tail -n 20 "$(VENV)/case.log"; failed=1; fi; done; exit $$failed

bench-gpu: $(VENV)/bench
	$(BIN)/python -m benchmarks.gpu.timed --out outputs/gpu/$$(date +%Y%m%dT%H%M%S) $(ARGS)

lint: $(TOOLS_VENV)/ready
	@if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then $(TOOLS)/pre-commit run --all-files; \
		else echo "no git here, so ruff alone"; $(TOOLS)/ruff check && $(TOOLS)/ruff format --check; fi

format: $(TOOLS_VENV)/ready
	$(TOOLS)/ruff check --fix .
	$(TOOLS)/ruff format .

types: $(TOOLS_VENV)/ready
	$(TOOLS)/mypy

docs: $(TOOLS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(TOOLS)/mkdocs build --strict

release: $(TOOLS_VENV)/ready
	rm -rf build dist
	$(TOOLS)/python -m build --quiet
	$(TOOLS)/twine check --strict dist/*
	PATH="$(CURDIR)/$(TOOLS):$$PATH" .ci/check_wheel dist/*.whl
	OMP_NUM_THREADS=1 PYTHON=$(PYTHON) .ci/use_wheel dist/*.whl

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TOOLS_VENV) .venv-oldest .venv-newest .venv-latest build dist outputs site

# Tools that read the sources and need none of the packages that these import.
$(TOOLS_VENV)/ready: .ci/tools.txt constraints.txt
	$(PYTHON) -m venv $(TOOLS_VENV)
	$(TOOLS)/pip --disable-pip-version-check install --quiet --requirement .ci/tools.txt --constraint constraints.txt
	@touch $@

$(VENV)/runtime: $(INPUTS)
	@echo "installing torch, transformers, trl and the rest into $(VENV) (2.4 GB; a few minutes, and pip is silent)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[report]'
	@touch $@

$(VENV)/bench: $(VENV)/runtime
	$(PIP) --editable '.[bench]'
	@touch $@

$(VENV)/dev: $(VENV)/runtime
	@echo "installing what the tests need into $(VENV)"
	$(PIP) --editable '.[dev]'
	@touch $@

.venv-%/dev: $(INPUTS)
	$(PYTHON) -m venv .venv-$*
	$(CONSTRAINTS_$*) > .venv-$*/constraints.txt
	DS_BUILD_OPS=0 .venv-$*/bin/pip --disable-pip-version-check install --quiet \
		--constraint .venv-$*/constraints.txt $(VERSIONS_$*) --editable '.[dev]'
	@touch $@

# torchvision and its kin do not fit the CPU build of torch, and transformers imports them where they are.
$(VLLM_VENV)/ready: pyproject.toml $(VLLM_TESTS)/requirements.txt $(VLLM_TESTS)/constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --quiet \
		--requirement $(VLLM_TESTS)/requirements.txt --constraint $(VLLM_TESTS)/constraints.txt
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@
