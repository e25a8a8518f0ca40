# The verbs. Each one sets up .venv by itself; CI calls these and nothing else.
#
#   make demo                      one pool, simulated devices, real requests, a lost node, and the proof
#   make test [COVERAGE=1]         unit, property, contract, simulation and integration tests
#   make check                     format, lint, types, import walls, generated documents
#   make sim [SEED=7] [EVENTS=N]   one simulated run; the same seed is the same run
#   make sim-live [SEED=7]         the services' own asyncio code on virtual time, by a server and a network made for it
#   make chaos [ROUNDS=200]        random faults on a real pool, and whether everything held that must
#   make scenarios                 each of examples/scenarios on a real pool, judged; a bus outage of a minute is one
#   make e2e                       the whole stack, driven through the command
#   make isolation                 the isolation tests in every mode, each with its negative control
#   make kills [ROUNDS=200]        kill -9 of the log's writer under load: no row lost, doubled or out of its place
#   make soak [ARGS="--seconds 600 --rate 5000"]   a bus and its log under a steady load: lag, memory, nothing lost
#   make cluster [ARGS=gaps]       a bus of three servers that loses one, by every means; how long nobody could write
#   make bench                     throughput and latency, with the machine beside the figures
#   make torture [ROUNDS=1000]     kills of a node's agent, of every service at every moment, and millions of events
#   make fuzz [RUNS=1000000]       changed messages of the hostile corpus, by our own mutator and by atheris
#   make lock, make audit          pin every package by hash; list what is installed, and what is known against it
#
# ARGS="…" is handed on to what the verb runs.

# Container images like to forbid it, and every process that a test starts would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
MEMBERS := $(wildcard libs/*/pyproject.toml services/*/pyproject.toml cli/pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Every package by its hash, the build backend among them, which all members share; LOCKED=0 resolves anew instead.
LOCKED ?= 1
# Which Python to make the environment with; the first one that is new enough where it is not said.
PYTHON ?=
# More than cores: tests with real processes wait for most of their time.
JOBS ?= 3
SEED ?= 1
EVENTS ?= 200000
ROUNDS ?= 1000
RUNS ?= 1000000
TORTURE_EVENTS ?= 5000000
COVERAGE ?=

.PHONY: help venv demo test check format docs sim sim-live chaos scenarios e2e isolation torture kills soak cluster fuzz bench lock audit clean

help:
	@sed -n 's/^#   make/  make/p' Makefile

# Set-up: run again only when a requirement changed.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setting up $(VENV) with $$python"; exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo "apportion needs Python 3.11 or later, and found none; name one: make PYTHON=/path/to/python3" >&2; exit 2

ifeq ($(LOCKED),0)
packages = $(PIP) "hatchling>=1.27" editables && $(PIP) --no-build-isolation -r $(1:.lock=.txt)
else
packages = $(PIP) --require-hashes -r $(1) && $(PIP) --no-build-isolation --no-deps -r requirements.txt
endif

$(VENV)/.runtime-ready: requirements.lock requirements.txt $(MEMBERS) | $(BIN)/python
	@echo "installing apportion into $(VENV)"
	@$(call packages,requirements.lock)
	@touch $@

$(VENV)/.dev-ready: requirements-dev.lock requirements-dev.txt requirements.txt $(MEMBERS) | $(BIN)/python
	@echo "installing apportion and its tools into $(VENV)"
	@$(call packages,requirements-dev.lock)
	@touch $@ $(VENV)/.runtime-ready

venv: $(VENV)/.dev-ready

demo: $(VENV)/.runtime-ready
	@$(BIN)/apportion demo $(ARGS)

test: $(VENV)/.dev-ready
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not e2e" $(if $(COVERAGE),--cov --cov-report=term-missing:skip-covered) $(ARGS)

check: $(VENV)/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.dev-ready
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

# Supply chain: an environment of its own, so that what looks at packages is none of them.
$(VENV)-audit/.ready: | $(BIN)/python
	@$(BIN)/python -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-tools pip-audit cyclonedx-bom
	@touch $@

lock: $(VENV)-audit/.ready
	@$(VENV)-audit/bin/python deploy/lock.py

audit: $(VENV)-audit/.ready
	@$(VENV)-audit/bin/python deploy/audit.py $(ARGS)

docs: $(VENV)/.dev-ready
	$(BIN)/python docs/generate.py

sim: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.simulation --seed $(SEED) --events $(EVENTS) $(ARGS)

sim-live: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.simulation.live --seed $(SEED) --events $(if $(filter command line,$(origin EVENTS)),$(EVENTS),30000) $(ARGS)

chaos: $(VENV)/.runtime-ready
	@$(BIN)/python -m bench.chaos --seed $(SEED) --rounds $(if $(filter command line,$(origin ROUNDS)),$(ROUNDS),200) $(ARGS)

scenarios: $(VENV)/.runtime-ready
	@failed=0; for file in examples/scenarios/*.toml; do \
	  $(BIN)/apportion scenario run $$file $(ARGS) || failed=1; \
	done; exit $$failed

e2e: $(VENV)/.dev-ready
	@$(BIN)/python -m pytest -m e2e $(ARGS)

isolation: $(VENV)/.runtime-ready
	@for mode in exclusive mig mps timeslice; do \
	  echo "# $$mode" >&2; $(BIN)/python -m apportion.node_agent.isolation --mode $$mode $(ARGS); \
	done

kills: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.torture.writer --rounds $(if $(filter command line,$(origin ROUNDS)),$(ROUNDS),200) --seed $(SEED) $(ARGS)

soak: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.torture.soak $(ARGS)

cluster: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.cluster $(ARGS)

# What takes too long for every change.
torture: $(VENV)/.dev-ready
	@$(BIN)/python -m tests.torture --rounds $(ROUNDS) --seed $(SEED) $(ARGS)
	@$(BIN)/python -m tests.kill --rounds 3
	@$(BIN)/python -m tests.cluster
	@$(BIN)/python -m tests.simulation.bugs
	@$(BIN)/python -m tests.simulation.live --seed 100000 --events 300000
	@$(BIN)/python -m tests.simulation --seed 100000 --events $(TORTURE_EVENTS)

# Coverage-guided, with an environment of its own: what instruments code is no dependency of it.
$(VENV)-fuzz/.ready: requirements-dev.lock requirements.txt $(MEMBERS) | $(BIN)/python
	@$(BIN)/python -m venv $(VENV)-fuzz
	@$(VENV)-fuzz/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes -r requirements-dev.lock
	@$(VENV)-fuzz/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation --no-deps -r requirements.txt
	@$(VENV)-fuzz/bin/python -m pip --disable-pip-version-check install --quiet atheris
	@touch $@

fuzz: $(VENV)-fuzz/.ready
	@$(VENV)-fuzz/bin/python -m tests.contract.fuzz --mutations $(RUNS) --seed $(SEED)
	@$(VENV)-fuzz/bin/python -m tests.contract.guided -runs=$(RUNS) -print_final_stats=1

bench: $(VENV)/.dev-ready
	@$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
