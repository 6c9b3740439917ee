# Nothing here needs an activated environment: `make test` on a fresh machine is enough.
#
#   make test PYTHON=python3.12       another interpreter for a new environment
#   make test VENV=/tmp/nm-env        another place for the environment
#   make test ARGS="-k masks"         more arguments for pytest, or for the quickstart
#   make test VENV=/tmp/old CONSTRAINTS=build/floors.txt    versions for a new environment
#   make integrations ENVS="keras tunix" PYTHON312=/opt/python3.12/bin/python

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
CONSTRAINTS ?=

# Trainers contradict one another, and need Python 3.12 or newer: each has an environment of its own.
# tests/integrations/NAME.txt names its tests and its packages.
ENVS      ?= $(basename $(notdir $(wildcard tests/integrations/*.txt)))
PYTHON312 ?= $(shell for p in python3.12 python3.13 python3.14; do $$p -c "" 2>/dev/null && echo $$p && break; done)

# Tasks and the local runner are tested everywhere. T5X is not on PyPI: where its source lies (with
# airio's and jestimator's beside it), what it needs is installed too, and the tests marked t5x run;
# elsewhere they skip and say why.
T5X_PATH ?= $(HOME)/.cache/nm-sparsity/t5x
export T5X_PATH
EXTRAS   := dev local $(if $(wildcard $(T5X_PATH)/t5x/t5x/__init__.py),t5x)
# The quickstart needs no more than the local runner; an environment for the tests will do as well.
ifeq ($(MAKECMDGOALS),quickstart)
EXTRAS   := $(if $(wildcard $(VENV)/.installed-dev-local*),$(EXTRAS),local)
endif

empty   :=
comma   := ,
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.installed-$(subst $(empty) ,-,$(strip $(EXTRAS)))
PYTEST  := $(PY) -m pytest -n $(WORKERS)
# One worker runs all of a file: what its tests share is made once. The longest begin (conftest.py).
BY_FILE := --dist loadfile --no-loadscope-reorder
SOURCES := $(wildcard nm_sparsity_jax t5x_tasks tests benchmarks docs examples setup.py)

.DEFAULT_GOAL := help
.PHONY: help quickstart venv integrations test test-slow test-floors coverage mutants sanitize wheel style check docs notebook clean

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

quickstart: $(STAMP)  ## train, prove and score sparse checkpoints, in minutes; into quickstart/
	$(VENV)/bin/nm-sparsity quickstart $(ARGS)

venv: $(STAMP)  ## create the environment, or bring it up to date with pyproject.toml

test: $(STAMP)  ## every test that is not slow; names the slowest 20, and what did not run
	$(PYTEST) $(BY_FILE) -m "not slow" --ignore=tests/integrations --durations=20 -rs $(ARGS)
	@echo "Not run: the tests of other trainers (make integrations): $(ENVS)"

test-slow: $(STAMP)  ## the slow tests, with programs that are compiled as users compile them
	AS_USERS=1 $(PYTEST) -m slow $(ARGS)

integrations:  ## the tests of trainers, each in .venv-integrations/NAME; ENVS="keras tunix" picks; names what did not run
	@said=; for name in $(ENVS); do \
	  if ! $(MAKE) --no-print-directory .venv-integrations/$$name/.installed; then \
	    said="$$said\n$$name: did not run, since its environment could not be made (above)"; \
	  elif ! .venv-integrations/$$name/bin/python -m pytest -m "" -rs --junit-xml=.venv-integrations/$$name/tests.xml $$(grep -oh 'tests/integrations/test_[a-z0-9_]*.py' tests/integrations/$$name.txt) $(ARGS); then \
	    said="$$said\n$$name: tests failed"; \
	  else said="$$said\n$$name: ok$$(sed -nE 's/.*<testsuite [^>]* skipped="([1-9][0-9]*)".*/, \1 skipped (above)/p' .venv-integrations/$$name/tests.xml)"; fi; \
	done; printf "$$said\n"; case "$$said" in *"did not"*|*failed*) exit 1;; esac

# The oldest versions that pyproject.toml allows, in an environment of their own.
test-floors:  ## the tests of `make test` on the floors of pyproject.toml
	@mkdir -p build
	$(PYTHON) tests/floors.py >build/floors.txt
	$(MAKE) test VENV=$(VENV)-floors CONSTRAINTS=build/floors.txt

# Code under jit counts where it is traced, and TPU kernels where they are interpreted.
COVERED := apply configure doctests doctor dtypes every_recipe flops groups layers masks masks_sharded masks_tpu metrics \
  packed packed_dot patterns recipes roles rules schedules sparse trace
coverage: $(STAMP)  ## the tests of core, recipes and training alone; fails where they run under 97 % of these lines
	$(PY) -m coverage run --source nm_sparsity_jax/core,nm_sparsity_jax/recipes,nm_sparsity_jax/training \
	  -m pytest -q -p no:xdist $(wildcard $(COVERED:%=tests/test_%.py)) $(ARGS)
	$(PY) -m coverage report --show-missing --skip-covered --fail-under 97

SAMPLE ?= 100
mutants: $(STAMP)  ## break masks, recipes and schedules in SAMPLE places, and name what no test notices; an hour or two
	@$(PY) -m pip install --quiet --disable-pip-version-check cosmic-ray
	$(PY) tests/mutants.py $(SAMPLE)

sanitize: $(STAMP)  ## the C++ kernels of packed weights under the sanitizers of g++
	$(PY) -m pytest -m slow -k sanitizers tests/test_packed_dot.py $(ARGS)

wheel: $(STAMP)  ## build dist/: an sdist and a wheel of it; try the wheel in a new environment and an empty folder
	rm -rf build/lib dist
	$(PY) -m pip install --quiet --disable-pip-version-check build twine
	$(PY) -m build
	$(PY) -m twine check --strict dist/*
	WHEEL=$$(echo dist/*.whl) $(PY) -m pytest -m slow tests/test_wheel.py $(ARGS)

style: $(STAMP)  ## format the code and fix what ruff can fix
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

check: $(STAMP)  ## style and types, changing nothing
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m pyright --pythonpath $(PY)

docs: $(STAMP)  ## build the site of README.md and docs/ into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build
	@echo "site/index.html; with search: $(PY) -m http.server -d site"

notebook: $(STAMP)  ## run the notebooks in examples/ anew, with their outputs; ARGS=examples/NAME.ipynb picks
	for name in $(or $(ARGS),$(wildcard examples/*.ipynb)); do \
	  $(PY) -c "import nbclient, nbformat, sys; name = sys.argv[1]; book = nbformat.read(name, 4); \
	  nbclient.NotebookClient(book, record_timing=False).execute(); nbformat.write(book, name)" $$name || exit 1; done

clean:  ## remove caches and build output; the environment stays
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# uv finds versions in seconds where pip looks for minutes.
.venv-integrations/%/.installed: tests/integrations/%.txt pyproject.toml
	@[ -n "$(PYTHON312)" ] || { \
	  echo "error: $*: no Python 3.12 or newer is on the path. Install one, or name it: make integrations PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@echo "Installing into .venv-integrations/$*. This can take minutes."
	@$(PYTHON312) -m venv --clear .venv-integrations/$*
	@.venv-integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check uv
	@NM_SPARSITY_KERNELS=0 .venv-integrations/$*/bin/python -m uv pip install --quiet \
	  --python .venv-integrations/$*/bin/python -r $< pytest hypothesis -e .
	@touch $@

# The stamp is written last, so an installation that was cut short is tried again.
$(STAMP): setup.py pyproject.toml $(wildcard nm_sparsity_jax/core/packed/native/*)
	@py=$(PY); [ -x $$py ] || py=$(PYTHON); \
	command -v $$py >/dev/null || { \
	  echo "error: no '$$py' here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	$$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$$py' is $$($$py --version 2>&1); Python 3.11 or newer is needed. Name one and a new place: make VENV=.venv-new PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): once, and again when its needs or the C++ kernels change. This can take minutes."
	@$(PY) -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(subst $(empty) ,$(comma),$(strip $(EXTRAS)))]'
	@touch $@
