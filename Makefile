# make run   set up, run the pipeline, print the summary        make test  set up, run the tests
# make ui    the MLflow UI on 127.0.0.1                         make lint  formatting, lint and types
# make test-all  the tests marked `long` too: more models, meshes and draws of what `make test` tries
# make verify  hold the written program against the unsplit module, in float64
# make site  docs/ as a site, build/site/index.html; a link that leads nowhere is an error
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The exact versions that CI uses; `make run CONSTRAINTS=` takes the newest that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
export PATH := $(abspath $(BIN)):$(PATH)
export PYTHONUNBUFFERED = 1
# Stages and ranks are processes that start often: each would compile this project's modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := run
.PHONY: run test test-all test-oldest test-newest verify ui lint format docs site setup clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	    echo "       name another one: make run PYTHON=python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev,docs,hf]'
	@touch $@

run: setup
	@python -m stages run

# The tests of the report page need Chromium (`apt-get install chromium`), and are skipped without it.
# In the order of collection: tests/flow, where few tests take long, comes first and leaves no long tail. `auto` is
# one worker more than there are cores (tests/conftest.py).
PYTEST = python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: setup
	@$(PYTEST)

test-all: setup
	@$(PYTEST) -m ""

# Both ends of what pyproject.toml allows, each in an environment of its own; gigabytes, and an hour each.
test-oldest:
	@mkdir -p .venv-oldest && $(PYTHON) tests/oldest.py > .venv-oldest/constraints.txt
	@$(MAKE) test-all VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

test-newest:
	@$(MAKE) test-all VENV=.venv-newest CONSTRAINTS=

verify: setup
	@python -m stages verify

ui: setup
	@python -m stages ui

lint: setup
	@ruff check .
	@ruff format --check .
	@mypy

format: setup
	@ruff check --fix .
	@ruff format .

site: setup
	@NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet --strict

docs: setup
	@python -m shardwright.pipeline.config > docs/configuration.md

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info
