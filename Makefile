# Two commands do everything: `make demo` and `make test`.
# PIP_ARGS is handed to pip, for example to install torch's CPU build from its own index (see the README).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
BIN := .venv/bin
UNIT := not slow and not gpu and not netns

.PHONY: demo install test test-readme test-slow lint types check clean

demo: .venv/installed
	$(BIN)/scd demo

install: .venv/installed

# Made again when pyproject.toml changed; the sources are installed editable and need no second install.
.venv/installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no python3 found: Python 3.11 or later is needed (make PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11 (make PYTHON=/path/to/python names another one)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -e '.[dev]'
	@touch $@

test: .venv/installed
	$(BIN)/pytest -q -m "$(UNIT)"

# The README's REST examples against `scd serve`, with the demo's specialists.
test-readme: .venv/installed
	$(BIN)/pytest -q -m slow tests/test_readme.py

# Minutes each. Tests that need a GPU or network namespaces have their own markers: pytest -m gpu, pytest -m netns.
test-slow: .venv/installed
	$(BIN)/pytest -q -m "slow and not gpu and not netns"

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/installed
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
