# Everything runs in .venv, which each target makes for itself. PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Rebuilt when the dependencies or the kernel's sources change.
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: setup demo test test-slow lint format bench sanitize clean

setup: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m traformer.ops
	touch $@

demo: setup
	$(BIN)/tra demo --out runs/demo

test: setup
	$(BIN)/python -m pytest -m 'not slow and not ray'

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not ray' -s

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/tra bench attention
	$(BIN)/tra bench tasks

clean:
	rm -rf $(VENV) build runs/demo
