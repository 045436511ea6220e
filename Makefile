# On a fresh machine with Python 3.11 or 3.12 and make, `make demo` and `make test` do
# everything, their set-up in .venv included.

SUITS := import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUITS)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready-$(shell cksum < requirements.lock | cut -d' ' -f1)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)

.PHONY: demo test lint style setup clean

demo: setup
	@python -m deploy.demo

test: setup style
	@python -m pytest --numprocesses 2 --dist worksteal $(TESTS)

lint: style
	@mypy

style: setup
	@ruff check . && ruff format --check .

setup: $(READY)

$(READY): requirements.lock
	@test -n "$(PYTHON)" || { echo "lambert: error: needs Python 3.11 or 3.12: install one, or set PYTHON=…" >&2; exit 2; }
	@rm -f .venv/.ready-*
	@echo "lambert: setting up .venv, once: 1/2 PyTorch (a minute or two; longer with CUDA)"
	@$(PYTHON) -m venv .venv
	@# with its own needs: a CUDA build brings its libraries, and DeepSpeed's build looks for PyTorch
	@python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock torch numpy setuptools ninja
	@echo "lambert: setting up .venv, once: 2/2 everything else in requirements.lock (about a minute)"
	@python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements.lock
	@touch $@

clean:
	@rm -rf .venv runs/demo .mypy_cache .pytest_cache .ruff_cache
