# make train: set up .venv, then train the small Llama of configs/llama.toml on NPROC ranks.
# make test:  set up .venv, then the checks and the default tests.   make test-all: the slow tests too.
# make check: format, lint and types only.                            make clean: remove what the others made, not runs/.

PYTHON ?= python3
NPROC ?= 2
BIN := .venv/bin
READY := .venv/.ready

# Where there is no GPU, the torch version that is tested on CPU; with one, the newest that pip finds for it.
GPU := $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi 2>/dev/null)
TORCH := $(if $(GPU),torch>=2.11,torch==2.13.0)

.PHONY: train test test-all check clean

train: $(READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node $(NPROC) scripts/train.py --config configs/llama.toml

test: check
	$(BIN)/python -m pytest

test-all: check
	$(BIN)/python -m pytest -m "slow or not slow"

check: $(READY)
	$(BIN)/ruff format --check --quiet . || { echo "Some files are not formatted: $(BIN)/ruff format ." >&2; exit 1; }
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --min-severity error

# Again when pyproject.toml changes. A set-up that was interrupted is taken up where it stopped.
$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "titanlike needs Python 3.10 or newer, and there is no $(PYTHON) here." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "titanlike needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): name another one, such as make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it first (on Debian and Ubuntu the package python3-venv)." >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) -V); the first time takes some minutes."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
