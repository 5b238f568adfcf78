# `make demo` and `make test` need nothing but Python 3.11 or newer: each makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# First what is locked, by its digest; then cgd itself, and torch, for which there is no one digest (requirements/lock.py).
LOCKED := $(PIP) --require-hashes --no-deps --only-binary :all: --requirement
EDITABLE := $(PIP) --constraint constraints.txt --no-build-isolation --editable
NEEDS := pyproject.toml constraints.txt $(wildcard requirements/*.lock)
SECONDS ?= 60

.PHONY: help demo federation-demo tutorial test test-slow check format bench demo-results leverage-results table-results small-results docs docs-serve audit-results lock mutations \
        fuzz model schedules soak report-picture structure coverage clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: .venv/installed  ## five hospitals train together (half a minute); a table and a plot
	$(BIN)/cgd demo

federation-demo: .venv/installed  ## five hospitals as five processes over sockets, one killed on the way (a minute)
	$(BIN)/python examples/federation/demo.py

tutorial: .venv/installed  ## follow docs/tables.md by the letter: from five CSV files to five models (a minute or two)
	$(BIN)/python docs/run_tutorial.py

test: .venv/installed-dev  ## all tests but the slow ones
	$(BIN)/python -m pytest --numprocesses 2 -m "not slow"

test-slow: .venv/installed-dev  ## the tests that take minutes
	$(BIN)/python -m pytest --numprocesses 2 -m slow

check: .venv/installed-dev  ## linter, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev  ## let the linter mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed  ## what sums, simulated steps, sums over sockets and large tables cost, as ratios
	$(BIN)/python benchmarks/secure_sum.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/federation.py
	$(BIN)/python benchmarks/tables.py

demo-results: .venv/installed  ## run the demo and keep its figures in results/demo.json
	mkdir -p build && $(BIN)/cgd demo --json results/demo.json --plot build/demo.png

leverage-results: .venv/installed  ## measure membership inference by leverage over sizes; keep the curve (half an hour)
	$(BIN)/python benchmarks/leverage.py --out results/leverage.json

table-results: .venv/installed  ## models of five organisations on real tables, beside pooled and alone; keep the page
	$(BIN)/python benchmarks/organisations.py --out results/tables

small-results: .venv/installed-dev  ## run all experiments at the quick scale anew and keep their page in results/small
	rm -rf build/small && $(BIN)/cgd reproduce all --scale quick --out build/small
	$(BIN)/cgd reproduce report --scale quick --out build/small
	rm -rf results/small && cp -r build/small/quick results/small

audit-results: .venv/installed  ## run the audit anew with five seeds, keep what it found, and put it into the threat model
	rm -rf build/audit results/audit
	for seed in 0 1 2 3 4; do \
	  $(BIN)/cgd audit --seed $$seed --out build/audit/seed-$$seed > build/audit-$$seed.txt || exit 1; \
	  mkdir -p results/audit/seed-$$seed; \
	  install -m 644 build/audit/seed-$$seed/audit.json results/audit/seed-$$seed/audit.json; \
	done
	$(BIN)/python docs/threat_table.py

lock: | .venv/bin/python  ## find the versions of all packages anew, with their digests (some minutes; network)
	$(BIN)/python requirements/lock.py

schedules: .venv/installed-dev  ## run a million random schedules with a dishonest member (hours; goes on where it was)
	$(BIN)/python tests/schedules.py

soak: .venv/installed-dev  ## five processes, killed, stopped and wiped at random 150 times (ten minutes)
	$(BIN)/python tests/soak.py

mutations: .venv/installed-dev  ## take each protection of the threat model out, and see its tests fail
	$(BIN)/python tests/mutate.py

fuzz: .venv/installed-dev  ## fuzz frames, the membership machine and files (needs atheris; SECONDS=60 each)
	$(BIN)/python fuzz/run.py --seconds $(SECONDS)

model: .venv/installed-dev  ## check the model of views, marks and keys with Spin (needs spin, gcc; some minutes)
	$(BIN)/python models/check.py

structure: .venv/installed  ## modules that a gradient, a record and an attack pass; sizes of packages; beside those of before
	$(BIN)/python docs/structure.py all

coverage: .venv/installed-dev  ## lines and branches that `make test` runs, by package (TESTS=tests/secagg for less)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest --numprocesses 2 -m "not slow" $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet
	$(BIN)/python docs/structure.py coverage build/coverage/coverage.json

docs: .venv/installed-docs  ## build the documentation into site/
	$(BIN)/python docs/state_diagram.py
	rm -rf docs/results && mkdir docs/results && cp -r results/paper/report.md results/paper/plots docs/results
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/installed-docs  ## read the documentation in a browser
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

report-picture: .venv/installed-dev  ## take the picture in docs/tables.md anew, from its own run (needs Chromium)
	$(BIN)/python docs/run_tutorial.py --picture

clean:  ## remove everything that was made here
	rm -rf .venv site build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis cgd-demo.png cgd-bench.png

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "cgd needs Python 3.11 or newer; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/installed: $(NEEDS) | .venv/bin/python
	@echo 'Installing cgd into .venv (once; a minute or two) ...'
	$(LOCKED) requirements/run.lock
	$(EDITABLE) '.[all]'
	@touch $@

.venv/installed-dev: $(NEEDS) | .venv/bin/python
	@echo 'Installing cgd and its test tools into .venv (once; a minute or two) ...'
	$(LOCKED) requirements/dev.lock
	$(EDITABLE) '.[dev]'
	@touch $@ .venv/installed

.venv/installed-docs: $(NEEDS) | .venv/bin/python
	@echo 'Installing cgd and its documentation tools into .venv (once; a minute or two) ...'
	$(LOCKED) requirements/docs.lock
	$(EDITABLE) '.[all,docs]'
	@touch $@ .venv/installed
