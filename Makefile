# `make quickstart` and `make test` install everything they need into .venv on a fresh machine.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install quickstart test lint types check

install: $(VENV)/.installed

# torch first and alone: its version decides which build pip takes.  Setuptools would warn at
# length that an editable install has limits.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	PYTHONWARNINGS=ignore \
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: install
	$(BIN)/python examples/quickstart/run.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

check: lint types

# Two at once: many tests wait for processes.  A file's tests share what is costly to make.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile
