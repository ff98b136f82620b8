# Gyre: every target does its own set-up (infra/setup), which costs nothing when all is up to date.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
SETUP := @bash infra/setup/setup.sh
# Extra arguments, e.g. `make quickstart ARGS="--set seed=1"`, `make test ARGS="tests/store -x"`.
ARGS ?=
# The harness of `make harness`.
HARNESS ?= mini-swe-agent

.PHONY: help install engine quickstart demo-team harness test lint docs ui doctor clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

install: ## build or update both environments (.venv and .venv-engine)
	$(SETUP) all

engine: ## build or update only the SGLang server's environment (.venv-engine)
	$(SETUP) engine

quickstart: ## set up, then train the tiny agent on this machine; the last line is a JSON summary
	$(SETUP) all
	@.venv/bin/gyre train examples/quickstart/run.toml $(ARGS)

demo-team: ## a team's services; a scheduled training is killed with its worker and resumed; the last line is JSON
	$(SETUP) all
	@.venv/bin/python examples/team/demo.py $(ARGS)

harness: ## run a real harness against the proxy and a scripted engine: make harness HARNESS=codex
	$(SETUP) venv
	@.venv/bin/python examples/harnesses/run.py $(HARNESS) $(ARGS)

test: ## set up, then run the tests
	$(SETUP) all
	@.venv/bin/python -m pytest $(ARGS)

lint: ## ruff, formatting, pyright, import layers
	$(SETUP) venv
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports

docs: ## build the documentation into site/, strictly (an environment of its own, .venv-docs)
	$(SETUP) venv
	@[ .venv-docs/done -nt infra/docs/requirements.txt ] || { .venv/bin/python -m venv --clear .venv-docs && \
		.venv-docs/bin/pip install -qq --disable-pip-version-check -r infra/docs/requirements.txt && touch .venv-docs/done; }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet $(ARGS)

ui: ## serve the Prefect UI on the database of the runs in runs/, until interrupted
	$(SETUP) venv
	@.venv/bin/gyre ui $(ARGS)

doctor: ## what is there, what is missing, and the command that mends it
	$(SETUP) venv
	@.venv/bin/gyre doctor $(ARGS)

clean: ## remove the environments, harnesses, logs and caches (never runs/)
	@rm -rf .venv .venv-engine .venv-docs site .harnesses .setup .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
