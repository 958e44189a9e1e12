# Everything goes through the project's own environment in .venv; no target needs anything before it.
# `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
TORCH_VERSION ?=
# Most tests are one thread, or ranks that wait for each other: two workers, whose threads do not compete for the cores.
WORKERS ?= 2
SECONDS ?= 60
MINUTES ?= 60

.PHONY: help setup quickstart test unit check format ranks gpu golden fuzz interop long soak bench lock clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## install everything that is pinned into .venv

$(READY): requirements.lock pyproject.toml
	PYTHON=$(PYTHON) VENV=$(VENV) TORCH_VERSION=$(TORCH_VERSION) ./scripts/setup
	@touch $@

quickstart: $(READY)  ## draw a synthetic dataset, train on it, show what was learned
	$(BIN)/facetrain train --config configs/quickstart.yaml

test: $(READY)  ## every test that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --maxschedchunk 1

unit: $(READY)  ## the fast tests only
	$(BIN)/pytest tests/unit -m "not slow"

ranks: $(READY)  ## tests with real gloo processes
	$(BIN)/pytest tests/ranks

gpu: $(READY)  ## tests that need a CUDA device
	$(BIN)/pytest -m gpu

golden: $(READY)  ## parity with numbers that other programs computed
	$(BIN)/pytest tests/golden

fuzz: $(READY)  ## mutate files for SECONDS (60) on each reader; keep what is worth it in tests/fuzz/corpus
	@for target in $$($(BIN)/python -c "from tests.fuzz.targets import TARGETS; print(*TARGETS)"); do \
		$(BIN)/python -m tests.fuzz.run $$target --seconds $(SECONDS) || exit 1; done

interop: $(READY)  ## exchange files with MXNet 1.9.1, installed beside the project
	VENV=$(VENV) ./scripts/interop

long: $(READY)  ## tests that take minutes: lost ranks and hosts, cut networks, all changes of ranks, the memory of whole runs
	$(BIN)/pytest -m long

soak: $(READY)  ## kill runs at random, change their ranks, fill their disk: MINUTES=60
	$(BIN)/python -m tests.soak.run --minutes $(MINUTES)

bench: $(READY)  ## every measurement in a short form, a quarter of an hour; docs/benchmarks.md has the long ones
	VENV=$(VENV) ./scripts/bench

check: $(READY)  ## formatting, lint, types, who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

format: $(READY)  ## rewrite the sources in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(READY)  ## write requirements.lock anew from pyproject.toml; versions that fit stay as they are
	VENV=$(VENV) ./scripts/lock

clean:  ## remove what can be made again, never a run or a dataset
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
