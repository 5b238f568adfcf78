# `make demo` and `make test` need only Python 3.11 or newer: each creates .venv and installs the required packages.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# First the locked packages, checked by digest; then cgd itself and torch, whose digest varies (requirements/lock.py).
LOCKED := $(PIP) --require-hashes --no-deps --only-binary :all: --requirement
EDITABLE := $(PIP) --constraint constraints.txt --no-build-isolation --editable
NEEDS := pyproject.toml constraints.txt $(wildcard requirements/*.lock)
SECONDS ?= 60

.PHONY: help demo federation-demo tutorial test test-slow test-accountant flower-example check format bench ray-bench \
        demo-results leverage-results first-layer-results absence-results training-mode-results \
        suggested-model-results network-results ring-results table-results personalisation-results \
        private-table-results privacy-results quick-experiments duration-results rounds delay-results delay-time docs \
        docs-serve audit-results canary-results organisation-results privacy-picture lock mutations fuzz model \
        schedules soak quorum-soak report-picture audit-picture structure coverage clean intersection-results profile

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: .venv/installed  ## five hospitals train together; print a table and draw a plot (half a minute)
	$(BIN)/cgd demo

federation-demo: .venv/installed  ## five hospitals as five processes over sockets, one of which is killed and restarted (a minute)
	$(BIN)/python examples/federation/demo.py

tutorial: .venv/installed  ## run the commands of docs/tables.md and docs/real-tables.md: from CSV files to models (some minutes)
	$(BIN)/python docs/run_tutorial.py
	$(BIN)/python docs/run_tutorial.py clinics

test: .venv/installed-dev  ## run all tests except the slow ones
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

test-slow: .venv/installed-dev  ## run the tests that take minutes
	$(BIN)/python -m pytest --numprocesses 2 -m slow

test-accountant: .venv/installed-dev .venv/dp-accounting/installed  ## compare the accountant with dp-accounting (installs it into .venv/dp-accounting)
	$(BIN)/python -m pytest tests/dp/test_accountant.py -k dp_accounting

flower-example: .venv/installed-dev .venv/flower/installed  ## start trainings through Flower, on loopback and simulated (installs it into .venv/flower)
	$(BIN)/python -m pytest tests/test_flower.py

check: .venv/installed-dev  ## check style, format, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/installed-dev  ## fix style and format automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed  ## measure the cost of sums, noise, clipped gradients, simulated steps, sums over sockets and large tables, as ratios
	$(BIN)/python benchmarks/secure_sum.py
	$(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/simulation.py
	$(BIN)/python benchmarks/record_gradients.py
	$(BIN)/python benchmarks/federation.py
	$(BIN)/python benchmarks/round_trips.py
	$(BIN)/python benchmarks/tables.py

profile: .venv/installed  ## profile one member of a sum over sockets: processor time, copies, wake-ups and locks (two minutes; Linux)
	$(BIN)/python benchmarks/profile_sum.py

ray-bench: .venv/installed-dev  ## measure the cost of a step on Ray workers of this machine, as ratios, and the terms of larger simulations
	$(BIN)/python benchmarks/ray_workers.py

demo-results: .venv/installed  ## run the demo and store its figures in results/demo.json
	mkdir -p build && $(BIN)/cgd demo --json results/demo.json --plot build/demo.png

leverage-results: .venv/installed  ## measure membership inference by leverage against the number of records; store the curve (half an hour)
	$(BIN)/python benchmarks/leverage.py --out results/leverage.json

first-layer-results: .venv/installed  ## count the records that one member of four reads from a first layer by watching; store the counts (ten minutes of one core; continues)
	$(BIN)/python benchmarks/first_layer.py

absence-results: .venv/installed  ## estimate the gradients of members that are absent again and again; store the errors (minutes)
	$(BIN)/python benchmarks/absences.py

training-mode-results: .venv/installed  ## attack gradients, batches and updates of local steps; store the values (a minute)
	$(BIN)/python benchmarks/training_modes.py

suggested-model-results: .venv/installed  ## compare the model that cgd schema suggests for small tables with others, and attack it; store the results (a quarter of an hour of one core; continues)
	$(BIN)/python benchmarks/suggested_models.py

ring-results: .venv/installed  ## train MNIST's network in 32 and in 16 bits; store the accuracies (a quarter of an hour of one core; continues)
	$(BIN)/python benchmarks/ring_bits.py

network-results: .venv/installed  ## train a transformer and a CNN, confined and not; store the accuracies (a quarter of an hour of one core; continues)
	$(BIN)/python benchmarks/networks.py

table-results: .venv/installed  ## compare models of five organisations on real tables with pooled and local training; store the page
	$(BIN)/python benchmarks/accuracy/organisations.py --out results/tables
	$(BIN)/python benchmarks/accuracy/table_rounds.py

personalisation-results: .venv/installed  ## compare models alone, together and personalised on each organisation's own records; store the page (half an hour of one core; continues)
	$(BIN)/python benchmarks/accuracy/personalisation.py

private-table-results: .venv/installed  ## the same with differential privacy (half an hour of one core; continues)
	$(BIN)/python benchmarks/accuracy/private_organisations.py

privacy-results: .venv/installed  ## measure what privacy costs on public tables; store the page and the table in the package (an hour of one core; continues)
	$(BIN)/python benchmarks/accuracy/private_defaults.py
	$(BIN)/python benchmarks/accuracy/privacy_costs.py

quick-experiments: .venv/installed  ## run all experiments at the quick scale (less than a quarter of an hour; once, two to three minutes more for features of CIFAR-10), to check that they work; page in build/quick
	status=0; $(BIN)/cgd reproduce all --scale quick --out build || status=$$?; \
	$(BIN)/cgd reproduce report --scale quick --out build && exit $$status

duration-results: .venv/installed  ## measure the durations that `cgd reproduce list` states; store the table in the package (half an hour of one core; continues)
	$(BIN)/python benchmarks/experiment_durations.py

delay-results: .venv/installed  ## measure accuracy and regret with a delay; store the results, and update the page (minutes)
	$(BIN)/python benchmarks/delay.py

delay-time: .venv/installed  ## measure the time of a step with a delay, in a slow network, as ratios
	$(BIN)/python benchmarks/delay_time.py

intersection-results: .venv/installed  ## measure time and bytes of an intersection of IDs, up to a million (half an hour of one core)
	$(BIN)/python benchmarks/intersection.py
	$(BIN)/python benchmarks/intersection.py --without-curve --sizes 1000000

rounds: .venv/installed  ## measure rounds and bytes to a given accuracy; store the results, and update the page (hours of one core; continues)
	$(BIN)/python benchmarks/rounds.py

audit-results: .venv/installed  ## run the audit with five seeds, store the results, and update the table of the threat model (a quarter of an hour)
	rm -rf build/audit && mkdir -p build/audit/results
	for seed in 0 1 2 3 4; do \
	  $(BIN)/cgd audit --seed $$seed --out build/audit/seed-$$seed > build/audit/seed-$$seed.txt || exit 1; \
	  mkdir build/audit/results/seed-$$seed || exit 1; \
	  install -m 644 build/audit/seed-$$seed/audit.json build/audit/results/seed-$$seed/audit.json || exit 1; \
	done
	rm -rf results/audit && mv build/audit/results results/audit
	$(BIN)/python docs/threat_table.py

canary-results: .venv/installed  ## measure lower bounds of ε with canaries, also without protections; store the figures (ten minutes)
	$(BIN)/python benchmarks/canaries.py --out results/canaries.json

organisation-results: .venv/installed  ## attack four organisations with a table of tumours, with and without noise; store the figures (ten minutes)
	$(BIN)/python benchmarks/four_organisations.py --out results/four-organisations.json

privacy-picture: .venv/installed  ## draw the results of attacks with and without noise, from the stored audits (a minute)
	$(BIN)/python docs/privacy_picture.py

lock: | .venv/bin/python  ## resolve the versions of all packages and write the lock files with digests (some minutes; network)
	$(BIN)/python requirements/lock.py

schedules: .venv/installed-dev  ## run a million random schedules with a dishonest member (hours; continues where it stopped)
	$(BIN)/python tests/schedules.py

soak: .venv/installed-dev  ## train in five processes that are killed, paused or lose their state, 150 times at random (ten minutes)
	$(BIN)/python tests/soak.py

quorum-soak: .venv/installed-dev  ## stop, kill and cut off members of five processes with a quorum, 30 times (ten minutes)
	$(BIN)/python tests/quorum_soak.py

mutations: .venv/installed-dev  ## remove each protection of the threat model, and check that its tests fail
	$(BIN)/python tests/mutate.py

fuzz: .venv/installed-dev  ## fuzz frames, the membership protocol and files (needs atheris; SECONDS=60 each)
	$(BIN)/python fuzz/run.py --seconds $(SECONDS)

model: .venv/installed-dev  ## check the model of the membership protocol with Spin (needs spin, gcc; some minutes)
	$(BIN)/python models/check.py

structure: .venv/installed  ## list the modules that a gradient, a record and an attack pass, and the sizes of packages, now and before
	$(BIN)/python docs/structure.py all

coverage: .venv/installed-dev  ## measure the lines and branches that `make test` covers, by package (TESTS=tests/secagg for some tests)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest --numprocesses 2 --dist worksteal -m "not slow" $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet
	$(BIN)/python docs/structure.py coverage build/coverage/coverage.json

docs: .venv/installed-docs  ## build the documentation into site/
	$(BIN)/python docs/state_diagram.py
	rm -rf docs/results && mkdir docs/results && cp -r results/paper/report.md results/paper/plots docs/results
	sed 's|(../../docs/|(../|g' results/paper/claims.md > docs/results/claims.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: .venv/installed-docs  ## serve the documentation for a browser
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

report-picture: .venv/installed-dev  ## update the pictures of the report in docs/tables.md (needs Chromium)
	$(BIN)/python docs/run_tutorial.py --picture

audit-picture: .venv/installed-dev  ## update the pictures of the audit page in docs/audit.md (needs Chromium)
	$(BIN)/python docs/run_tutorial.py audit --picture

clean:  ## remove all generated files
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

# dp-accounting needs an older attrs than our tools, so it has an environment of its own; only a test uses it.
.venv/dp-accounting/installed: | .venv/bin/python
	$(PYTHON) -m venv .venv/dp-accounting
	.venv/dp-accounting/bin/python -m pip --disable-pip-version-check --quiet install --only-binary :all: dp-accounting==0.6.0
	@touch $@

# Flower needs older versions of typer and rich than our tools, so it has an environment of its own, as its users have.
.venv/flower/installed: pyproject.toml | .venv/bin/python
	@echo 'Installing Flower and cgd into .venv/flower (once; a minute or two) ...'
	$(PYTHON) -m venv .venv/flower
	.venv/flower/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[tables]' 'flwr[simulation]==1.41.0' $$(grep ^torch== constraints.txt)
	@touch $@

# The complete MLflow, whose server a test starts, needs an older pyarrow than our tools, so it has an environment of its own.
.venv/mlflow/installed: | .venv/bin/python
	$(PYTHON) -m venv .venv/mlflow
	.venv/mlflow/bin/python -m pip --disable-pip-version-check --quiet install mlflow==3.17.2 msgspec==0.22.0
	@touch $@

.venv/installed-docs: $(NEEDS) | .venv/bin/python
	@echo 'Installing cgd and its documentation tools into .venv (once; a minute or two) ...'
	$(LOCKED) requirements/docs.lock
	$(EDITABLE) '.[all,docs]'
	@touch $@ .venv/installed
