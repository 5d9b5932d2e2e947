# Everything from a fresh clone, with nothing but Python >= 3.12:  make run   make test
# The environment is made once for each change of the locks; it holds exactly what they name, by hash.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
VENV_NEXT := .venv-jax012
VENV_CLIENTS := .venv-clients
PY := $(VENV)/bin/python
PARALLEL := -n auto --maxprocesses 4 --dist loadfile
LOCKS := requirements.lock requirements-models.lock
LOCKS_CLIENTS := $(LOCKS) requirements-clients.lock

# The first Python that is there, runs and is new enough. A name on the path may be a shim that only prints an error.
PYTHON ?= $(shell for p in python3.12 python3.13 python3 $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python3; do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
UV ?= $(shell for u in uv $(HOME)/.local/bin/uv $(HOME)/.pyenv/versions/*/bin/uv; do \
	"$$u" --version >/dev/null 2>&1 && { echo "$$u"; break; }; done)

.PHONY: run test test-slow test-next test-clients test-browser lint types lock clean

run: $(VENV)/.installed
	$(VENV)/bin/llmjax run quickstart

test: $(VENV)/.installed
	$(PY) -m pytest $(PARALLEL)

test-slow: $(VENV)/.installed
	$(PY) -m pytest $(PARALLEL) -m "slow and not gpu and not models"

# The fast tests of what is traced, on the newest JAX that pyproject.toml allows; everything else is as locked. The host's own code
# imports no JAX, so its tests say nothing here.
TRACED := tests/engine tests/model tests/pallas_kernels tests/quantization tests/test_structured_output.py
test-next: $(VENV_NEXT)/.installed
	@if $(VENV_NEXT)/bin/python -c 'import jax, sys; sys.exit(jax.__version__ < "0.12")'; \
	then $(VENV_NEXT)/bin/python -c 'import jax; print("testing on jax", jax.__version__)' && $(VENV_NEXT)/bin/python -m pytest $(PARALLEL) $(TRACED); \
	else echo "skipped: no jax newer than the locked one can be installed here"; fi

# Programs of others (openai, langchain, lm-eval, schemathesis) against a server of SmolLM2, in one process.
test-clients: $(VENV_CLIENTS)/.installed
	$(VENV_CLIENTS)/bin/python -m pytest -m clients tests/server/clients

# The dashboard in a real browser; needs chromium and chromedriver.
test-browser: $(VENV)/.installed
	$(PY) -m pytest -m browser tests/server

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.installed
	$(PY) -m mypy

# $(call install,FOLDER,LOCKS): a virtual environment with the locks' packages and this project, editable.
define install
	@if [ -z "$(PYTHON)" ]; then \
		echo "llmjax needs Python 3.12 or newer and found none; install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@echo "installing into $(1) with $(PYTHON)$(if $(UV), and uv)"
	@if [ -n "$(UV)" ]; then \
		[ -x $(1)/bin/python ] || "$(UV)" venv --quiet --python "$$("$(PYTHON)" -c 'import sys; print(sys.executable)')" $(1); \
		"$(UV)" pip install --quiet --python $(1)/bin/python --no-deps --require-hashes $(2:%=-r %); \
		"$(UV)" pip install --quiet --python $(1)/bin/python --no-deps --no-build-isolation -e .; \
	else \
		[ -x $(1)/bin/python ] || "$(PYTHON)" -m venv $(1); \
		$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(1)/bin/python -m ensurepip >/dev/null; \
		$(1)/bin/python -m pip install --quiet --no-deps --require-hashes $(2:%=-r %); \
		$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .; \
	fi
endef

$(VENV)/.installed: $(LOCKS) pyproject.toml
	$(call install,$(VENV),$(LOCKS))
	@touch $@

$(VENV_CLIENTS)/.installed: $(LOCKS_CLIENTS) pyproject.toml
	$(call install,$(VENV_CLIENTS),$(LOCKS_CLIENTS))
	@touch $@

# Another environment, upgraded past the lock. A registry without a newer JAX leaves it as locked, which test-next reports.
$(VENV_NEXT)/.installed: $(LOCKS) pyproject.toml
	$(call install,$(VENV_NEXT),$(LOCKS))
	@if [ -n "$(UV)" ]; then \
		"$(UV)" pip install --quiet --python $(VENV_NEXT)/bin/python --upgrade "jax>=0.12,<0.13" || true; \
	else \
		$(VENV_NEXT)/bin/python -m pip install --quiet --upgrade "jax>=0.12,<0.13" || true; \
	fi
	@touch $@

# Rewrites the locks (needs uv). They name packages and hashes, never a registry. What the clients share with us is of our version.
lock:
	"$(UV)" pip compile pyproject.toml --extra dev --universal --python-version 3.12 --constraint <(echo jax==0.11.2) \
		--generate-hashes --no-annotate --no-header --quiet --upgrade -o requirements.lock
	"$(UV)" pip compile --group clients --universal --python-version 3.12 --constraint requirements.lock \
		--generate-hashes --no-annotate --no-header --quiet --upgrade -o requirements-clients.lock
	@! grep -nE '://|^--' requirements.lock requirements-clients.lock

clean:
	rm -rf $(VENV) $(VENV_NEXT) $(VENV_CLIENTS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
