# `make train` and `make test` set up everything they need; other targets are for contributors.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The tests of a file share processes, so that one worker runs them all.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

.PHONY: train test slow lint types docs package versions gpu clean

train: $(VENV)/demo.installed
	$(BIN)/lightning-ddp-ext strategy=balanced_dp strategy.gpu0_batch_size=8

test: $(VENV)/all.installed
	$(PYTEST) -m "not slow and not exhaustive"
	$(PYTEST) --accelerator=virtual -m "virtual and not slow and not exhaustive"

slow: $(VENV)/all.installed
	$(PYTEST) -m "slow and not exhaustive"
	$(BIN)/python -m tests.versions.second_name --numprocesses 2 --dist loadfile -m "not slow and not exhaustive"

lint: $(VENV)/all.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/all.installed
	$(BIN)/mypy

docs: $(VENV)/all.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

package: $(VENV)/all.installed
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	.ci/check_wheel $(PYTHON) dist/*.whl

# `make versions ROWS=ci` runs the rows that every change runs, `make versions ROWS="2.8 2.12"` some others.
versions: $(VENV)/all.installed
	$(BIN)/python -m tests.versions.run $(ROWS)

# On a machine with a GPU; needs only a Python with torch, Lightning, Hydra and pytest.
gpu:
	$(PYTHON) -m tests.gpu.kit $(PART)

clean:
	rm -rf $(VENV) dist site runs

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable ".[demo,lightning]"
	touch $@

$(VENV)/all.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable ".[demo,docs,slurm,test]"
	touch $@
