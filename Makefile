# Needs only Python 3.11 or newer, gcc, make, git and a package index. `make demo` and `make test` make their own
# environment in .venv; nothing outside this directory is written.
.PHONY: venv demo test stubs check-stubs lint imports types unit nightly bench bench-peers clean
.DEFAULT_GOAL := test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STUBS_BIN := .venv-stubs/bin
PIP := -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest

venv: .venv/.installed-dev

# The demo needs no checkers.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) --editable '.[server]'
	touch $@

.venv/.installed-dev: pyproject.toml .venv/.installed
	$(BIN)/python $(PIP) --editable '.[server,dev]'
	touch $@

demo: .venv/.installed
	mkdir -p build
	$(BIN)/kvkeep demo --directory build

# ---- the gate, the same for people and CI -------------------------------------------------------------------

test: check-stubs lint imports types
	$(PYTEST) -m 'not slow'

# The same tests with the counts of the promises in full; hours on two cores.
nightly: check-stubs lint imports types
	$(PYTEST) --nightly --timeout 14400

lint: venv
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet

imports: venv
	$(BIN)/lint-imports

types: venv
	$(BIN)/mypy server client

unit: venv
	$(PYTEST) -m 'not slow' tests/unit

# ---- generated stubs ----------------------------------------------------------------------------------------
# The oldest grpcio-tools that is supported, in an environment of its own: code from a newer one refuses the older
# runtimes that engines ship.

.venv-stubs/.installed: Makefile
	test -x $(STUBS_BIN)/python || $(PYTHON) -m venv .venv-stubs
	$(STUBS_BIN)/python $(PIP) grpcio-tools==1.71.2 mypy-protobuf==3.7.0 'setuptools<81'
	touch $@

# STUBS_OUT is where a fresh set is written: the tree, or a scratch directory of the gate.
STUBS_OUT ?= client
stubs: .venv-stubs/.installed
	mkdir -p $(STUBS_OUT)
	PATH="$(CURDIR)/$(STUBS_BIN):$$PATH" $(STUBS_BIN)/python -m grpc_tools.protoc -I proto \
	    --python_out=$(STUBS_OUT) --grpc_python_out=$(STUBS_OUT) \
	    --mypy_out=quiet:$(STUBS_OUT) --mypy_grpc_out=quiet:$(STUBS_OUT) $(sort $(wildcard proto/kvkeep/v1/*.proto))

check-stubs:
	rm -rf build/stubs
	$(MAKE) --no-print-directory stubs STUBS_OUT=build/stubs
	diff -r --exclude='__init__.py' --exclude='py.typed' --exclude='__pycache__' build/stubs/kvkeep/v1 client/kvkeep/v1 \
	    || { echo 'the committed stubs differ from proto/kvkeep/v1: run `make stubs`' >&2; exit 1; }

# ---- benchmarks ---------------------------------------------------------------------------------------------

bench: .venv/.installed
	$(BIN)/kvkeep bench local

bench-peers: .venv/.installed
	tests/bench/peers/run.sh

clean:
	rm -rf .venv .venv-stubs .venv-peers build dist
