# `make` alone lists the commands. They install what they need into .venv; nothing outside this folder changes, except
# the folder of converted models in the user's cache.

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 2
VENV := .venv
TPU := .libtpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo learning test test-slow test-tpu lint format clean

help:  ## list the commands
	@echo "usage: make COMMAND [PYTHON=python3.12]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.setup  ## create .venv with everything that the commands need (PYTHON: 3.11 or newer)

demo: setup  ## train a policy on a real language model, compare it with the heuristics, write a report
	@$(BIN)/python launch/demo.py

learning: setup  ## the learning experiment: three seeds, 200 held-out prompts, paired intervals (90 minutes on 2 cores)
	@$(BIN)/python launch/learning.py

test: setup  ## run the tests in two processes (PYTEST_ARGS="tests/test_model.py -x" to choose, WORKERS=0 for one)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: setup  ## run the tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# libtpu lies in a folder of its own, because with it in .venv every command would look for a TPU first. Its version is that
# of the recorded numbers.
test-tpu: setup $(TPU)/.setup  ## compile 7B and 8B models and the kernels for TPU slices, without one
	@PYTHONPATH=$(TPU) JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slow tests/test_compiled.py \
	  tests/kernels/test_kernels_tpu.py $(PYTEST_ARGS)

lint: $(VENV)/.setup-dev  ## check style and types (ruff, mypy)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.setup-dev  ## rewrite the sources in the project's style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and the tools' caches (runs/ stays)
	rm -rf $(VENV) $(TPU) .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info

# The stamps are written last: an interrupted installation is taken up again, a finished one is skipped until the
# requirements change.
$(VENV)/.setup: requirements.txt pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "$(PYTHON) is missing or older than 3.11; try: make setup PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }; }
	@echo "Installing the requirements into $(VENV) (a few minutes the first time) ..."
	@$(PIP) -r requirements.txt
	@$(PIP) --no-deps -e .
	@touch $@
	@echo "$(VENV) is ready: $$($(BIN)/python -c 'import sys, importlib.metadata as m; print("Python", sys.version.split()[0] + ", JAX", m.version("jax"))')"

$(TPU)/.setup: $(VENV)/.setup
	@$(PIP) --no-deps --target $(TPU) libtpu==0.0.42.1
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup requirements-dev.txt
	@$(PIP) -r requirements-dev.txt
	@touch $@
