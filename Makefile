# The verbs of this repository, the same for people and for the checks that run on every change. `make help` lists them.
#
#   make demo    a tiny language model learns to add, by asynchronous RL, on this machine
#   make test    lint, types, rules, unit, simulation, Ray and end-to-end tests, without the slow ones
#
# Both make their own environment in .venv first; nothing needs to be installed by hand but Python (3.11 or newer).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Extra words for `relax train` in the demo, for example DEMO_ARGS="train.num_steps=20".
DEMO_ARGS ?=
DEMO_DIR := examples/arithmetic
# Where the run file looks for the model is where `relax sft` puts it.
DEMO_MODEL := $(shell awk -F '"' '/^\[/{table=$$0} table=="[model]" && /^path/{print $$2}' $(DEMO_DIR)/run.toml 2>/dev/null)

# Which tests `make test` picks, by marker, and extra words for pytest.
MARKS ?= not slow and not gpu
PYTEST_ARGS ?=
# Quick ones on both of two cores; whole runs one at a time, since they fill the machine.
QUICK_TESTS := $(wildcard tests/rules tests/unit tests/processes tests/simulation)
WHOLE_RUNS := $(wildcard tests/ray tests/e2e)

# One thread a process: several share the cores, and spinning threads would slow one another down. Nothing is downloaded. What is
# compiled is kept, whatever the shell says: the tests start hundreds of processes.
QUIET := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false

.PHONY: help setup demo test test-all check-code lint format types rules unit docs docs-reference bench lock clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## the environment in .venv, with pinned versions; at once when it is up to date
	@:

# -qq: errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install

# relax_first.pth: the CPU's torch and torchvision do not fit, and programs that import transformers before relax would see it.
$(STAMP): requirements/torch.txt requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relax needs Python 3.11 or newer, this is %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setup: $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: torch"; $(PIP) -r requirements/torch.txt
	@echo "setup: $$(grep -c == requirements/lock.txt) pinned packages; a few minutes the first time"; $(PIP) -r requirements/lock.txt
	@echo "setup: relax itself"; $(PIP) --no-deps --no-build-isolation --editable .
	@echo 'import relax' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/relax_first.pth"
	@touch $@

# `relax sft` leaves a complete model folder or none, so its config.json says whether there is anything to do.
demo: $(STAMP)  ## train a tiny model on arithmetic, start to end (DEMO_ARGS="train.num_steps=20")
	@test -f "$(DEMO_MODEL)/config.json" || $(BIN)/relax sft $(DEMO_DIR)/sft.toml
	@$(BIN)/relax train $(DEMO_DIR)/run.toml $(DEMO_ARGS) --overwrite

test: check-code  ## lint, types, rules, unit, process, simulation, Ray and end-to-end tests, without the slow ones
	$(QUIET) $(BIN)/python -m pytest -m "$(MARKS)" -n 2 --dist worksteal $(PYTEST_ARGS) $(QUICK_TESTS)
	$(QUIET) $(BIN)/python -m pytest -m "$(MARKS)" $(PYTEST_ARGS) $(WHOLE_RUNS)

test-all:  ## the same with the slow tests
	@$(MAKE) test MARKS="not gpu"

check-code: lint types

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy --strict over the package
	$(BIN)/mypy

rules: $(STAMP)  ## the rules of the house only
	$(QUIET) $(BIN)/python -m pytest tests/rules $(PYTEST_ARGS)

unit: $(STAMP)  ## unit tests only
	$(QUIET) $(BIN)/python -m pytest -m "$(MARKS)" -n 2 --dist worksteal tests/unit $(PYTEST_ARGS)

docs: $(STAMP)  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-reference: $(STAMP)  ## rewrite docs/configuration.md from the settings' own docstrings
	$(BIN)/python -m relax.config.reference docs/configuration.md

bench: $(STAMP)  ## the benchmarks, one after the other; each prints ratios of one run
	@for file in $(addprefix benchmarks/,engine.py train.py bus.py overlap.py step_vs_trl.py); do echo "== $$file"; $(QUIET) $(BIN)/python $$file; done

lock: $(STAMP)  ## pin what is installed in .venv now
	$(BIN)/python requirements/lock.py

clean:  ## remove what builds, tests and the demo left behind; run folders stay
	rm -rf site build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## the environment as well
	rm -rf $(VENV) *.egg-info
