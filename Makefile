# make train   sets up what is missing, then trains the byte-level GPT of examples/gpt.py
# make test    sets up what is missing, then runs the tests
# make check   the same, after format, lint and types; what CI runs
# make soak    tests that measure as a bench does, of properties with up to 2,000 new examples each,
#              and on a machine that is slow, busy or late by chance (tests/noisy.py)

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.complete
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

.PHONY: setup train test soak check format lint types clean

setup: $(STAMP)

# torch first and by its exact pin: an open range takes a build with several GB of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python is %d.%d; it must be 3.11 or later\nhint: make PYTHON=python3.11 setup" % sys.version_info[:2])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup
	$(VENV)/bin/penstock train examples/gpt.py --out runs/gpt

# Each of the two processes reads all test files: what pytest makes of them is kept.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

soak: setup
	$(VENV)/bin/python -m pytest -m long
	$(VENV)/bin/python -m pytest --hypothesis-profile soak --timeout 3600 tests/schedule tests/search tests/simulate tests/cluster tests/cli/test_damaged.py tests/members
	NOISY=$$(date +%j) $(VENV)/bin/python -m pytest -p tests.noisy tests/choose tests/pilot tests/training tests/transport

check: lint types test

format: setup
	$(VENV)/bin/ruff check --fix --quiet
	$(VENV)/bin/ruff format --quiet

lint: setup
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check

types: setup
	$(VENV)/bin/pyright

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
