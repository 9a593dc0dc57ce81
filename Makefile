# Everything a developer runs. Needs a Python >= 3.11 and a package registry; no other tool.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check format test walks json-suite test-gpu test-multi demo bench clean

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PROMPT ?=
# Give PYTHON=... to choose the interpreter; otherwise the first of these that really runs.
PYTHON ?=
CANDIDATES := python3.11 python3.12 python3.13 python3
RUNS := -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# A folder without its interpreter is left over from a failed or moved installation: make it anew.
$(BIN)/python:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in $(CANDIDATES); do \
	    if $$candidate $(RUNS) >/dev/null 2>&1; then python=$$candidate; break; fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then \
	  echo "no usable Python >= 3.11 found (tried $(CANDIDATES)); give PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$python ($$($$python -V 2>&1))"; \
	"$$python" -m venv --clear $(VENV)

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the package and what it needs"
	@$(PIP) --editable '.[grammar]'
	@touch $@

$(DEV): $(CORE)
	@echo "installing the tools of development"
	@$(PIP) --editable '.[dev]'
	@touch $@

setup: $(DEV) ## make .venv with the package and the development tools; does nothing when up to date

check: $(DEV) ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(DEV) ## the CPU tests
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m "cpu and not slow"

walks: $(DEV) ## 10,000 random walks for each grammar library and family of shapes
	$(BIN)/python -m tests.grammar.walks --out benchmarks/walks.jsonl

SUITE := $(VENV)/jsonschema-4.26.0
$(SUITE): | $(DEV)
	@echo "fetching the JSON-Schema test suite"
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest $(VENV) jsonschema==4.26.0
	@tar xzf $(VENV)/jsonschema-4.26.0.tar.gz -C $(VENV)

json-suite: $(SUITE) ## the JSON-Schema test suite through both grammar libraries
	@for library in llguidance xgrammar; do \
	  $(BIN)/python -m tests.grammar.json_suite $(SUITE)/json/tests --backend $$library \
	    --out benchmarks/json-suite-$$library.jsonl || exit 1; \
	done

test-gpu: $(DEV) ## the tests that need one accelerator
	$(BIN)/python -m pytest -q -m "gpu and not multi"

test-multi: $(DEV) ## the tests of several processes or accelerators
	$(BIN)/python -m pytest -q -m multi

demo: $(CORE) ## text, a chat turn, speed and accepted drafts of the packaged checkpoint, on the CPU
	@$(BIN)/python -m deepinfer.bench.demo "$(PROMPT)"

bench: $(DEV) ## CPU speed with the packaged checkpoint
	$(BIN)/deepinfer bench cpu

-include demo/Makefile.inc

clean: ## remove what the targets above made
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
