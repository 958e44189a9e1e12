# All targets use the environment in .venv, and create it first if it does not exist. `make help` lists the targets.

PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
TORCH_VERSION ?=
LOWEST ?=
# Named after what is installed: for another Python or torch, or the lowest versions, it is installed anew.
READY  := $(VENV)/ready$(subst /,-,$(PYTHON:%=-%))$(TORCH_VERSION:%=-torch-%)$(LOWEST:%=-lowest)
# Most tests use one thread, and many wait for processes or for a time limit: three workers keep two cores busy.
WORKERS ?= 3
# More options for pytest.
OPTIONS ?=
SECONDS ?= 60
KILLS ?= 1000
DAMAGES ?= 10000
INTERRUPTS ?= 200
REAL ?= ../shared/real
LARGE ?=
RECIPE ?= speedrun

# Without compiled modules every process that a test starts would compile those it imports: five seconds for torch.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart test test-slow test-all coverage unit check format ranks gpu golden fuzz peers interop long soak bench real-faces speedrun config-docs docs lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## install all pinned packages into .venv

$(READY): requirements.lock pyproject.toml
	@rm -f $(VENV)/ready*
	PYTHON=$(PYTHON) VENV=$(VENV) TORCH_VERSION=$(TORCH_VERSION) LOWEST=$(LOWEST) ./scripts/setup
	@touch $@

quickstart: $(READY)  ## draw a dataset and train on it, about 40 seconds on two CPU cores
	test -e data/quickstart || $(BIN)/facetrain data synth --output data/quickstart --image-size 48
	$(BIN)/facetrain train --config configs/quickstart.yaml

test: $(READY)  ## run the tests, about three minutes on two CPU cores
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup -m "not slow and not long" $(OPTIONS)

test-slow: $(READY)  ## run the other tests: whole runs, many ranks, kernels under Triton's interpreter
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup -m "slow and not long" $(OPTIONS)

test-all: $(READY)  ## run both at once, which takes less time
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadgroup -m "not long" $(OPTIONS)

coverage: $(READY)  ## print the coverage of the fast tests, which slows them down
	$(MAKE) test OPTIONS="--cov --cov-report="
	$(BIN)/coverage report --format=total

unit: $(READY)  ## run the fast unit tests only
	$(BIN)/pytest tests/unit -m "not slow and not long"

ranks: $(READY)  ## run the tests with several gloo processes
	$(BIN)/pytest tests/ranks

gpu: $(READY)  ## run the tests that need a CUDA device
	$(BIN)/pytest -m gpu

golden: $(READY)  ## compare with numbers that other programs computed
	$(BIN)/pytest tests/golden

fuzz: $(READY)  ## mutate files for SECONDS (60) per reader; keep those with a new outcome in build/fuzz
	@targets=$$($(BIN)/python -c "from tests.fuzz.targets import TARGETS; print(*TARGETS)") && \
	for target in $$targets; do \
		$(BIN)/python -m tests.fuzz.run $$target --seconds $(SECONDS) || exit 1; done

peers: $(READY)  ## install MXNet 1.9.1 and other programs into build/interop*; without them tests/interop is skipped
	VENV=$(VENV) ./scripts/peers

interop: peers  ## exchange files with these programs
	$(BIN)/pytest tests/interop

long: $(READY)  ## run tests that take minutes (lost hosts, cut networks, memory), and variants of the slow ones
	$(BIN)/pytest -m long

soak: $(READY)  ## KILLS (1,000) of runs in all settings, INTERRUPTS (200) by Ctrl-C, DAMAGES (10,000) of run folders
	$(BIN)/python -m tests.soak.kills --kills $(KILLS)
	$(BIN)/python -m tests.soak.interrupts --interrupts $(INTERRUPTS)
	$(BIN)/python -m tests.soak.damages --damages $(DAMAGES)

bench: $(READY)  ## run every benchmark in a short form, about 15 minutes (docs/benchmarks.md)
	VENV=$(VENV) ./scripts/bench

real-faces: $(READY)  ## train the recipes on the real faces in REAL (../shared/real), three seeds each, about two hours
	$(BIN)/python recipes/real_faces/run.py --data $(REAL)

speedrun: $(READY)  ## train RECIPE (speedrun, best, plain) on the real faces in REAL with five seeds (docs/log/log.md)
	$(BIN)/python recipes/speedrun/run.py --data $(REAL) --recipe $(RECIPE)

config-docs: $(READY)  ## write the reference of the config keys into docs/config.md
	PYTHONPATH=. $(BIN)/python scripts/config_docs.py

docs: $(READY)  ## build the documentation site into build/site
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(READY)  ## check formatting, lint, types and imports between packages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_layers.py

format: $(READY)  ## format the sources and fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: $(READY)  ## update requirements.lock from pyproject.toml; versions that still fit are kept
	./scripts/lock

clean:  ## remove .venv, caches and build outputs; keep runs and datasets
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
