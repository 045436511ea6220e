# A fresh machine needs only Python 3.11 or 3.12 and make: demo, test, quick and lint set up .venv first.

SUITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUITS)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready-$(shell cksum < requirements.lock | cut -d' ' -f1)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)

.PHONY: demo test quick lint style setup clean

demo: setup
	@python -m deploy.demo

test: setup style
	@python -m pytest --numprocesses 3 --dist worksteal $(TESTS)

quick: setup style
	@python -m pytest --numprocesses 3 --dist worksteal -m "not slow" $(TESTS)

lint: style
	@mypy

style: setup
	@ruff check . && ruff format --check .

setup: $(READY)

$(READY): requirements.lock
	@test -n "$(PYTHON)" || { echo "lambert: error: no Python 3.11 or 3.12 found: install one, or set PYTHON=…" >&2; exit 2; }
	@rm -f .venv/.ready-*
	@echo "lambert: setting up .venv (only once), step 1 of 2: PyTorch (a minute or two; longer with CUDA)"
	@$(PYTHON) -m venv .venv
	@# PyTorch first, with its own dependencies: CUDA builds bring libraries, and DeepSpeed's build needs PyTorch
	@python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock torch numpy setuptools ninja
	@echo "lambert: setting up .venv (only once), step 2 of 2: the rest of requirements.lock (about a minute)"
	@python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements.lock
	@touch $@

clean:
	@rm -rf .venv runs/demo .mypy_cache .pytest_cache .ruff_cache
