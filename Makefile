# Nothing here needs an activated environment: `make test` on a fresh machine is enough.
#
#   make test PYTHON=python3.12       another interpreter for a new environment
#   make test VENV=/tmp/nm-env        another place for the environment
#   make test ARGS="-k masks"         more arguments for pytest, or for the quickstart
#   make test VENV=/tmp/old CONSTRAINTS=constraints-t5x.txt     versions for a new environment

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
CONSTRAINTS ?=

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
# One worker runs all of a file: what its tests share is made once.
BY_FILE := --dist loadfile
SOURCES := $(wildcard nm_sparsity_jax t5x_tasks tests benchmarks docs examples setup.py)

.DEFAULT_GOAL := help
.PHONY: help quickstart venv kauldron test test-slow test-floors coverage mutants sanitize wheel style check docs notebook clean

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

quickstart: $(STAMP)  ## train, prove and score sparse checkpoints, in minutes; into quickstart/
	$(VENV)/bin/nm-sparsity quickstart $(ARGS)

venv: $(STAMP)  ## create the environment, or bring it up to date with setup.py

# Kauldron brings 180 packages, some of them older than those of $(VENV).
kauldron: .venv-kauldron/.installed  ## an environment with Kauldron in .venv-kauldron; `make test` then runs its tests

test: $(STAMP)  ## every test that is not slow; names the slowest 20, and why tests were skipped
	$(PYTEST) $(BY_FILE) -m "not slow" --durations=20 -rs $(ARGS)

test-slow: $(STAMP)  ## the slow tests, with programs that are compiled as users compile them
	AS_USERS=1 $(PYTEST) -m slow $(ARGS)

# The oldest versions that setup.py allows, in an environment of their own.
test-floors:  ## the tests of `make test` on the floors of setup.py
	@mkdir -p build
	$(PYTHON) tests/floors.py >build/floors.txt
	$(MAKE) test VENV=$(VENV)-floors CONSTRAINTS=build/floors.txt

# Code under jit counts where it is traced, and TPU kernels where they are interpreted.
COVERED := apply configure doctests doctor dtypes every_recipe flops groups layers masks masks_sharded masks_tpu metrics \
  packed packed_dot patterns recipes roles rules schedules sparse trace train_sharded
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

wheel: $(STAMP)  ## build dist/*.whl and try it in a new environment and an empty folder
	rm -rf build/lib dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
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

notebook: $(STAMP)  ## run the notebook in examples/ anew, with its outputs
	$(PY) -c "import nbclient, nbformat; name = 'examples/quickstart.ipynb'; book = nbformat.read(name, 4); \
	  nbclient.NotebookClient(book, record_timing=False).execute(); nbformat.write(book, name)"

clean:  ## remove caches and build output; the environment stays
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-kauldron/.installed: setup.py constraints-kauldron.txt
	$(PYTHON) -m venv .venv-kauldron
	@echo "Installing into .venv-kauldron. This takes minutes."
	@.venv-kauldron/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-kauldron.txt -e '.[kauldron]'
	@touch $@

# The stamp is written last, so an installation that was cut short is tried again.
$(STAMP): setup.py $(wildcard nm_sparsity_jax/core/packed/native/*)
	@py=$(PY); [ -x $$py ] || py=$(PYTHON); \
	command -v $$py >/dev/null || { \
	  echo "error: no '$$py' here. Install Python 3.11 or newer, or name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
	$$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$$py' is $$($$py --version 2>&1); Python 3.11 or newer is needed. Name one and a new place: make VENV=.venv-new PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): once, and again when setup.py or the C++ kernels change. This can take minutes."
	@$(PY) -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[$(subst $(empty) ,$(comma),$(strip $(EXTRAS)))]'
	@touch $@
