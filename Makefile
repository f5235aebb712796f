# Everything runs in .venv, which each target makes for itself. PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Rebuilt when the dependencies or the kernel's sources change.
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt csrc/cmake/CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp)

.PHONY: setup demo test test-slow test-ray lint format bench sanitize clean docs

setup: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,text]'
	$(BIN)/python -m traformer.ops
	touch $@

demo: setup
	$(BIN)/tra demo --out runs/demo

test: setup
	$(BIN)/python -m pytest -m 'not slow and not ray'

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not ray' -s

test-ray: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m ray

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

# The documentation site, with a strict check of its links, into build/docs/site.
docs: setup
	$(BIN)/python docs/build.py

# The kernel with AddressSanitizer and UBSan, the 16-lane code included, under the property tests.
sanitize: setup
	cmake -S csrc/cmake -B build/sanitize -DTRAFORMER_SANITIZE=ON -DTRAFORMER_WIDE=ON
	cmake --build build/sanitize
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 \
	TRAFORMER_CPU_LIBRARY=build/sanitize/libtraformer_cpu.so $(BIN)/python -m pytest tests/ops/test_properties.py -k 'cpu or index' -q

clean:
	rm -rf $(VENV) build runs/demo
