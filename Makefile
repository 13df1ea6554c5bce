# Two commands for everyone: `make demo`, `make test`. Both make .venv themselves.

.DEFAULT_GOAL := help
PYTHON ?= $(shell for one in python3.13 python3.12 python3.11 python3; do \
	$$one -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$one && break; done)
STAMP := .venv/.made
BIN := .venv/bin

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile | column -t -s- 2>/dev/null || sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile

$(STAMP): pyproject.toml
	@.ci/venv "$(PYTHON)"
	@touch $(STAMP)

demo: $(STAMP) ## run an agent's tool calls in a real sandbox, here and now
	@$(BIN)/sandgate demo

test: $(STAMP) ## run the tests; says which it skipped and why
	@$(BIN)/pytest -n auto --dist loadgroup

test-all: $(STAMP) ## run also what is slow or needs an environment of its own
	@$(BIN)/pytest -n auto --dist loadgroup -m "slow or not slow"

check: $(STAMP) ## lint, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(STAMP) ## print the figures, with those of peers beside them
	@$(BIN)/python -m tests.bench

clean: ## remove what the other targets made
	rm -rf .venv .bench dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.PHONY: help demo test test-all check bench clean
