# The only door: every command of this repository is a word here, and CI calls the same words.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := $(wildcard shm_broadcast/csrc/* device_comm/csrc/*)
# Half of the tests wait for processes to die, stop or time out: more of them than cores run at once.
TEST_WORKERS ?= 4
PIP := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-nccl clean

help: ## List the words
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Create .venv with everything that the other words need

$(STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (the first time takes some minutes: torch is large)"
	@$(PIP) install -q -c constraints.txt "setuptools>=77" wheel
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,bench,examples]'
	@touch $@

demo: $(STAMP) ## Run a tensor- and pipeline-parallel LLM over our groups on four processes
	@$(PY) -m examples.tiny_llm

check: $(STAMP) ## Lint, types and layer contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

test: $(STAMP) ## Run the whole test suite (no GPU needed)
	$(PY) -m pytest -q -n $(TEST_WORKERS)

test-nccl: $(STAMP) ## Run the tests of NCCL against the real library, without a device (fetches 300 MB)
	@$(PY) -c 'from tests.probes import PROBES; raise SystemExit(PROBES["nccl"]() is not None)' \
		|| $(PIP) install -q -c constraints.txt nvidia-nccl-cu13
	$(PY) -m pytest -q tests/unit/test_nccl_library.py tests/unit/test_nccl_types.py tests/multiproc/test_nccl.py \
		-n $(TEST_WORKERS)

test-kernels: $(STAMP) ## Compile the CUDA kernels for every GPU, world size and dtype (no GPU needed)
	$(PY) -m pytest -q tests/native/cuda/test_kernel_build.py tests/native/cuda/kernel_matrix.py

clean: ## Remove what the other words made
	rm -rf $(VENV) build dist *.egg-info */*.so .*_cache .hypothesis
