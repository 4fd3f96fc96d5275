# make quickstart | make test | make test-all | make docs | make bench
SHELL := /bin/sh
BIN := .venv/bin
CPU_BUILD := https://download.pytorch.org/whl/cpu
# The first interpreter the lab runs on; say PYTHON=... for another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
# Where torch comes from; empty is pip's default.  A CPU needs no CUDA packages, which are gigabytes.
TORCH_INDEX ?= $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo $(CPU_BUILD))

.PHONY: install quickstart test test-all lint docs bench clean

quickstart: .venv/installed
	$(BIN)/lab sweep quickstart

install: .venv/installed

test: .venv/installed-test lint
	$(BIN)/pytest -q -n 2 --dist loadgroup

test-all: .venv/installed-extras lint
	$(BIN)/pytest -q -n 2 --dist loadgroup -m ""

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

docs: .venv/installed-docs
	$(BIN)/python -m sphinx -q -W -E --keep-going -c docs . build/docs
	@mkdir -p build/reports build/docs/reports && cp -R results/. build/reports
	$(BIN)/lab report build/reports
	@cd build/reports && for part in *.html */report.html */figures */tables; do \
		mkdir -p "../docs/reports/$$(dirname $$part)" && cp -R "$$part" "../docs/reports/$$(dirname $$part)"; done
	@echo "site: build/docs/index.html"

bench: .venv/installed
	$(BIN)/python benchmarks/bench.py

.venv/installed: pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "instability-lab needs Python 3.11, 3.12 or 3.13; say make PYTHON=/path/to/python"; exit 2; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10)' "$$index" 2>/dev/null; \
	then echo "$$index cannot be reached; torch comes from the default index"; index=; fi; \
	echo "installing torch and the lab into .venv (once, a minute or more)"; \
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $${index:+--extra-index-url $$index} torch
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-test: .venv/installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

.venv/installed-extras: .venv/installed-test
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[slurm,ray,tensorboard,wandb,trackio,data,docs]'
	@touch $@

.venv/installed-docs: .venv/installed
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv build dist
