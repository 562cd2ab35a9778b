# Everything runs in .venv, which the first target that needs it makes.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check bench bench-quick bench-loopback peers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/text.stamp ## Train a language model on two workers, with Parallax and with DDP
	@$(BIN)/python examples/demo.py

test: .venv/dev.stamp ## Run every test
	@benchmarks/testbed/install.sh
	@$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --durations=20 --durations-min=5

check: .venv/dev.stamp ## Lint, check the format and the types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: .venv/bench.stamp ## Compare with the peers on hosts with shaped links (needs root)
	@benchmarks/testbed/install.sh
	@failed=0; for each in suite converge predict partitions report; do \
		$(BIN)/python -m benchmarks $$each || failed=1; done; exit $$failed

bench-quick: .venv/bench.stamp ## The same in five minutes, on fewer hosts (needs root)
	@benchmarks/testbed/install.sh
	@$(BIN)/python -m benchmarks suite --quick --fresh --out runs/bench-quick
	@$(BIN)/python -m benchmarks report runs/bench-quick --out runs/report-quick

peers: ## Make a virtualenv for each peer
	@$(MAKE) --no-print-directory --keep-going $(addprefix peer-,torchrec deepspeed tensorflow horovod)

peer-%:
	@PYTHON=$(PYTHON) benchmarks/engines/install/$*.sh

bench-loopback: .venv/bench.stamp ## Compare four workers on this machine (needs no root)
	@$(BIN)/python -m benchmarks run lm --loopback
	@$(BIN)/python -m benchmarks run lm --loopback --emulated
	@$(BIN)/python -m benchmarks run resnet --loopback --hosts 2 --repetitions 30 --turn-seconds 0.6

clean: ## Remove virtualenvs, runs and caches
	rm -rf .venv .venv-peers runs build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The exact pin comes first and alone: other versions bring gigabytes of GPU libraries.
.venv/torch.stamp: constraints.txt
	@echo "Making .venv"
	@$(PYTHON) -m venv .venv
	@echo "Installing PyTorch (about 200 MB)"
	@$(PIP) -c constraints.txt torch==2.13.0
	@touch $@

.venv/dev.stamp: .venv/text.stamp pyproject.toml
	@echo "Installing Parallax and its development tools"
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

.venv/bench.stamp: .venv/text.stamp .venv/torch.stamp pyproject.toml
	@echo "Installing Parallax and what draws the plots"
	@$(PIP) -c constraints.txt -e '.[bench]'
	@touch $@

# gensim only carries the text, so none of its dependencies are needed.
.venv/text.stamp: .venv/torch.stamp pyproject.toml
	@echo "Installing Parallax and the text to train on (a sample of Wikipedia, inside gensim)"
	@$(PIP) -c constraints.txt -e '.[examples]'
	@$(PIP) -c constraints.txt --no-deps gensim
	@touch $@
