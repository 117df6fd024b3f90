# Set-up, checks and measurements. Everything runs in a virtual environment that the first command makes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help compare smoke ablation steps test lint types suite fuzz soak clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

compare: $(VENV)/bench  ## SPlus against Adam on three objectives: a table and a report (20 to 25 minutes on 2 cores)
	@echo "== comparing SPlus with Adam: it can be stopped and started again at any time"
	$(BIN)/python -m benchmarks.compare preset=quick

smoke: $(VENV)/bench  ## the same with toy runs, to see that all of it works (under a minute)
	$(BIN)/python -m benchmarks.compare preset=smoke

ablation: $(VENV)/bench  ## what each choice of SPlus is worth, on the three objectives (about half an hour on 2 cores)
	$(BIN)/python -m benchmarks.ablation

steps: $(VENV)/bench  ## what a step costs beside other optimizers: time, memory (15 minutes on 2 cores)
	$(BIN)/python -m benchmarks.step_time

test: lint types suite  ## lint, types and the test suite with branch coverage (under 10 minutes on 2 cores)

lint: $(VENV)/test
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test
	@echo "== types"
	$(BIN)/mypy

suite: $(VENV)/test
	@echo "== tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto --dist=worksteal --cov --cov-report=term --durations=5

fuzz: $(VENV)/test  ## thousands of random histories of the optimizer, other ones each time (an hour)
	$(BIN)/python -m pytest tests/test_histories.py --hypothesis-profile=fuzz

soak: $(VENV)/bench  ## memory and the state's health over 20,000 steps (a few minutes)
	$(BIN)/python -m benchmarks.soak

clean:  ## remove the environment and caches; results stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*

$(VENV)/%: setup.cfg constraints.txt
	@echo "== installing into $(VENV) what '$*' needs (the first time takes a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed; set PYTHON=...")'
	$(BIN)/python -m pip install --quiet --progress-bar off --constraint constraints.txt --editable '.[$*]'
	@touch $@
