# `make quickstart` and `make test` need Python >= 3.11 and make, nothing else: each sets up .venv by itself, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
OUT ?= runs/quickstart

.PHONY: help setup quickstart test lint engine-test clean

help:
	@echo "make quickstart   train, export and evaluate a small drafter on this machine (into OUT=$(OUT))"
	@echo "make test         lint and tests"
	@echo "make lint         ruff, mypy and the import rules"
	@echo "make engine-test  the tests that need a serving engine (installs vLLM into $(VLLM_VENV))"
	@echo "make clean        remove the environments and caches that make created"
	@echo "PYTHON=$(PYTHON) chooses the interpreter for $(VENV)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftline needs Python >= 3.11; this is " + sys.version.split()[0] + ". Say make PYTHON=/path/to/python3.11")'
	@set -e; if command -v uv >/dev/null; then \
		set -x; \
		[ -x $(BIN)/python ] || uv venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV); \
		uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; \
	else \
		set -x; \
		[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'; \
	fi
	@touch $@

quickstart: $(READY)
	$(BIN)/draftline quickstart --out $(OUT)

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VLLM_READY): scripts/setup_vllm_cpu.sh
	PYTHON=$(PYTHON) bash scripts/setup_vllm_cpu.sh $(VLLM_VENV)
	@touch $@

engine-test: $(READY) $(VLLM_READY)
	DRAFTLINE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m engine

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
