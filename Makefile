# Two commands matter: `make up` (from nothing to a first box) and `make test`. Run as root on Debian 12 or 13.
# Nothing is installed outside of Debian's packages (node/provision.sh), .venv here, and the places named in node/config.py.

FLAVOUR ?= full
TESTS   ?= tests
VENV    := .venv
PYTHON  ?= python3
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.made-from-pyproject

# Images for tests are kept apart from the host's own boxes; a clean clone on the same host finds them again.
TEST_STATE ?= /var/tmp/boxfleet-test
IMAGE := BOXFLEET_STATE=$(TEST_STATE) $(BIN)/boxctl image build
RUN_TESTS := BOXFLEET_TEST_IMAGES=$(TEST_STATE)/lib/images $(BIN)/python -m

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# A host that was upgraded has another Python: the environment of the old one is of no use.
$(if $(wildcard $(STAMP)),$(shell $(BIN)/python -c '' 2>/dev/null || rm -rf $(VENV)))

.PHONY: help up down test check bench clean provision venv
.DEFAULT_GOAL := help

help:
	@echo "make up      start everything, down to a first box (FLAVOUR=core for a quick look)"
	@echo "make down    freeze boxes and stop the daemons"
	@echo "make test    all tests; builds the core image when it is not cached (TESTS=tests/unit for some of them)"
	@echo "make check   ruff and mypy --strict"
	@echo "make bench   figures, into tests/bench/results/latest.json"
	@echo "make clean   remove .venv, caches and images of tests"

up: venv
	@$(BIN)/boxctl up --flavour $(FLAVOUR)

down: venv
	@$(BIN)/boxctl down

test: venv
	@$(IMAGE) core >/dev/null
	@$(IMAGE) full >/dev/null || echo "test: without the full image, so tests of Docker and Chromium are skipped" >&2
	@$(RUN_TESTS) pytest $(TESTS)

check: venv
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: venv
	@$(IMAGE) core >/dev/null
	@$(RUN_TESTS) tests.bench

clean:
	@rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis $(TEST_STATE)
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

provision:
	@sh node/provision.sh

venv: provision $(STAMP)

# Brought up to date when pyproject changes.
$(STAMP): pyproject.toml | provision
	@echo "venv: installing Python packages into $(VENV), about a minute" >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "venv: Python 3.11 or newer is needed" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --editable '.[dev]'
	@touch $@
