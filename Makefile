# Every command of this repository is a target here, and CI calls the same targets.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := $(wildcard shm_broadcast/csrc/* shm_broadcast/csrc/*/* device_comm/csrc/*/*)
# Parallel test processes. More than cores, because half of the tests wait for processes to die, stop or time out.
TEST_WORKERS ?= 4
# As many for the slow tests: four keep two cores busy for 99 % of the time, three for 93 %. A process gets few of them at
# a time, since some take minutes (those marked `long`, which begin first): it could have many left when the others end.
SLOW_WORKERS ?= 4
# Fast tests do not wait: one process per core.
FAST_WORKERS ?= $(shell nproc)
# A process in which a test hangs ends; the run names the test and goes on.
END_HANGING := -o faulthandler_exit_on_timeout=true
PIP := $(PY) -m pip --disable-pip-version-check
# Python keeps the bytecode of tests and product even if the environment says otherwise: hundreds of test processes read it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-elastic bench check typecheck test test-fast test-native test-thorough stress test-nccl test-kernels test-gpu test-wheel test-engines test-ray bench-engines api docs dist clean
# Tests that `make test-wheel` runs; all of them take as long as `make test`.
TESTS ?= tests
# Folder for the figures and plots of `make bench`; it is not committed.
BENCH_OUT ?= benchmarks/results/local

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## Create .venv with everything that the other targets need

$(STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (the first time takes some minutes: torch is large)"
	@$(PIP) install -q -c constraints.txt "setuptools>=77" wheel
	@$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test,bench,examples]'
	@touch $@

# Rarely used targets (`make docs`, `make dist`) install their own packages, one after the other if `make -j` makes both.
$(VENV)/.installed-%: $(STAMP)
	@$(PY) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"], sep="\n")' \
		| flock $(VENV) $(PIP) install -q -c constraints.txt -r /dev/stdin
	@touch $@

demo: $(STAMP) ## Run a tensor- and pipeline-parallel LLM over our groups in four processes (HOLD=60: go on for so many seconds)
	@$(PY) -m examples.tiny_llm $(if $(HOLD),--hold $(HOLD))

demo-elastic: $(STAMP) ## Kill a worker of that LLM in the middle of its answers, go on, and take new ones in (DEMO_ARGS=…)
	@$(PY) -m examples.tiny_llm.elastic $(DEMO_ARGS)

bench: $(STAMP) ## Measure everything against torch.distributed and what the status page costs, in under five minutes (BENCH_OUT=DIR, BENCH_ARGS=…)
	@$(PY) -m benchmarks run --out $(BENCH_OUT) $(BENCH_ARGS)
	@$(PY) -m benchmarks status-calls --rounds 21 --json $(BENCH_OUT)/status_calls.json

check: $(STAMP) ## Check formatting, lint, types and import contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

typecheck: dist ## Check with pyright that every public name in the wheel has a complete type
	$(PY) -m tests.archives types

api: $(STAMP) ## Update the snapshot of the public API after an intended change
	$(PY) -m tests.api_snapshot

test: $(STAMP) ## Run the whole test suite (no GPU needed)
	$(PY) -m pytest -q -n $(TEST_WORKERS) $(END_HANGING) -m "not thorough and not engine"

test-fast: $(STAMP) ## Run unit and architecture tests without the slow ones, in under a minute
	$(PY) -m pytest -q -n $(FAST_WORKERS) -m "not slow and not thorough" tests/unit tests/architecture

test-native: $(STAMP) ## Run the slow tests of native code: the cores under sanitizers, their protocols, kernels with injected bugs
	$(PY) -m pytest -q -n 2 $(END_HANGING) -m "thorough and not proof" tests/native

test-thorough: $(STAMP) ## Run all other slow tests, and the whole of stress, fuzzing, the matrix of failures and ten thousand cycles, in under an hour
	$(PY) -m pytest -q -n $(SLOW_WORKERS) --maxschedchunk=8 --durations=25 -o faulthandler_timeout=2400 $(END_HANGING) -m "proof or (thorough and not native)" tests

stress: $(STAMP) ## Let ranks make random calls under signals, stops, kills and Ctrl-C, and check every byte (MINUTES=1 RANKS=4 SEED=…)
	$(PY) -m tests.stress --minutes $(or $(MINUTES),1) --ranks $(or $(RANKS),4) $(if $(SEED),--seed $(SEED))

test-nccl: $(STAMP) ## Run the NCCL tests against the real library, without a device (downloads 300 MB)
	@$(PY) -c 'from tests.probes import PROBES; raise SystemExit(PROBES["nccl"]() is not None)' \
		|| $(PIP) install -q -c constraints.txt nvidia-nccl-cu13
	$(PY) -m pytest -q tests/unit/device_comm/test_nccl_library.py tests/unit/device_comm/test_nccl_types.py tests/multiproc/device_comm/test_nccl.py \
		-n $(TEST_WORKERS)

test-kernels: $(STAMP) ## Compile the CUDA kernels for every GPU, world size and dtype (no GPU needed)
	$(PY) -m pytest -q tests/native/cuda/test_kernel_build.py tests/native/cuda/kernel_matrix.py

docs: $(VENV)/.installed-docs ## Build the site into site/ (strict: a dead link is an error)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

dist: $(VENV)/.installed-dist ## Build the source archive and the wheel into dist/, and check that they are complete
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
	@rm build.log
	$(PY) -m tests.archives contents

test-wheel: dist ## Run the tests against the wheel in a separate environment (TESTS=… selects)
	rm -rf build/wheel-venv
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install -q -c constraints.txt "$$(ls dist/*.whl)[test,bench,examples]"
	build/wheel-venv/bin/python -m tests.installed -n $(TEST_WORKERS) $(TESTS)

test-engines: dist ## Run a real vLLM over our groups and queues, beside vLLM as it is (downloads 1.5 GB the first time)
	VLLM_PYTHON="$$($(PY) -m tests.real_engines.environment dist/*.whl)" SGLANG_WHEEL="$$($(PY) -m tests.real_engines.sglang_environment)" $(PY) -m pytest -q -m engine -o faulthandler_timeout=900 tests/real_engines

test-ray: $(VENV)/.installed-ray ## Run ranks as actors of a real Ray, on clusters of two hosts in network namespaces (needs root; downloads 80 MB the first time)
	$(PY) -m pytest -q -m engine -o faulthandler_timeout=900 tests/real_ray

bench-engines: dist ## Measure the steps of a real vLLM over our groups and queues, beside vLLM as it is (BENCH_ARGS=…)
	$(PY) -m benchmarks engines "$$($(PY) -m tests.real_engines.environment dist/*.whl)" $(BENCH_ARGS)

test-gpu: ## Run the GPU tests on a machine with a GPU (WHEELS=DIR: missing packages, OUT=DIR: report, PART=1|2|3, BUILD=DIR: kept between parts, ONLY=GROUPS)
	tests/gpu/run.sh $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT)) $(if $(PART),--part $(PART)) $(if $(BUILD),--build $(BUILD)) $(if $(ONLY),--only $(ONLY))

clean: ## Remove everything that the other targets created
	rm -rf $(VENV) build build.log dist site gpu-report benchmarks/results/local *.egg-info */*.so .*_cache .hypothesis
	find . -path './.?*' -prune -o -name __pycache__ -prune -exec rm -rf {} +
