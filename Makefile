# Everything here runs from a bare clone: the first target that needs it sets up .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= auto

.PHONY: help demo test test-full check regenerate clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# Its layers are tested; the rest of what it depends on they do not need.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps fovi==2.4.0
	@touch $(READY)

demo: $(READY)  ## Check, compile and run the kernels on a real table
	$(BIN)/python -m knnpool_gen.cli regenerate --check
	$(BIN)/python tools/demo.py

test: $(READY)  ## The whole test suite
	$(BIN)/python -m pytest -n $(WORKERS)

test-full: $(READY)  ## The suite with every variant under every sanitizer
	$(BIN)/python -m pytest -n $(WORKERS) --all-sanitized

check: $(READY)  ## Generated files are up to date, lint and types
	$(BIN)/python -m knnpool_gen.cli regenerate --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

regenerate: $(READY)  ## Render specs and templates into generated/
	$(BIN)/python -m knnpool_gen.cli regenerate

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
