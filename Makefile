# Everything runs in a local virtual environment that these targets make for themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo demo-cluster verify test whole slow corpus check bench trainers docs figures clean

demo: $(VENV)/installed  ## Plan, train on all devices, prove, report: handwritten digits, in under a minute
	VENV=$(VENV) scripts/demo

demo-cluster: $(VENV)/installed  ## Four hosts with slow links, one of which is killed (Linux, as root)
	$(BIN)/python -m benchmarks.demo_cluster

verify: $(VENV)/installed  ## Prove that many devices compute what one does
	$(BIN)/paceline verify examples/01_digits.py

test: $(VENV)/installed  ## The suite, in six minutes on two cores
	scripts/test

whole: $(VENV)/installed  ## The suite with every run checked and predicted, as outside of tests
	scripts/test --whole

slow: $(VENV)/installed  ## What takes longer: whole sweeps, and tests of some seconds
	scripts/test -m slow

corpus: $(VENV)/installed  ## Every job of the corpus under every plan, and the page that says what works under what
	$(BIN)/python -m tests.corpus --write docs/what-works.md

check: $(VENV)/docs-installed  ## Linter, import order, types, the site
	scripts/check

bench: $(VENV)/bench-installed  ## Throughput and start-up beside other tools
	$(BIN)/python -m benchmarks.throughput
	$(BIN)/python -m benchmarks.startup

trainers: $(VENV)/bench-installed  ## Six jobs through seven trainers against one device: docs/who-is-right.md
	$(BIN)/python -m benchmarks.trainers

docs: $(VENV)/docs-installed  ## The documentation as a site: build/site/index.html
	$(BIN)/mkdocs build --strict

figures: $(VENV)/docs-installed  ## The pictures of the documentation, from committed tables
	$(BIN)/python -m benchmarks.figures

dist: $(VENV)/installed  ## Wheel and source archive, checked: dist/
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf $(VENV) dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/bench-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet setuptools wheel ninja hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[bench]'
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
