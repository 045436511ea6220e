# On a fresh machine with Python 3.11 or 3.12, make and a C++ compiler, `make demo` and `make test` do
# everything, their set-up in .venv included.

PYTHON ?= $(shell command -v python3.12 || command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready-$(shell cksum < requirements.lock | cut -d' ' -f1)
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)

.PHONY: demo test lint setup clean

demo: setup
	@python -m deploy.demo

test: setup lint
	@python -m pytest $(TESTS)

lint: setup
	@ruff check . && ruff format --check . && mypy

setup: $(READY)

$(READY): requirements.lock
	@echo "lambert: setting up .venv (a few minutes, once)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit("lambert: needs Python 3.11 or 3.12, this is %d.%d: set PYTHON=python3.11" % v)'
	@rm -f .venv/.ready-*
	@$(PYTHON) -m venv .venv
	@# PyTorch first, with its own needs: a CUDA build brings its libraries, and DeepSpeed's build looks for it
	@python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock torch numpy setuptools ninja
	@python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -r requirements.lock
	@python -c 'from trainer.engine import build_extensions; build_extensions()'
	@touch $@

clean:
	@rm -rf .venv runs .mypy_cache .pytest_cache .ruff_cache
