# make demo    a small trained model from checkpoint to text, on the CPU, with and without drafts
# make test    all tests but the slow ones
# make check   format, lint, types, who may import whom, spelling
# make clean   remove what the above have made

PYTHON ?= python3
# The default index has PyTorch for CUDA; give another requirement or set up pip for a smaller one.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO := demo
QUESTION := "Which number is the largest: 417, 86, 903, 255?"
NOVEL := "Elizabeth looked at Mr. Darcy, and"

# Everything here computes on tiny tensors, where threads only wait for each other.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/cpu.stamp
	@rm -rf $(DEMO) && mkdir $(DEMO)
	@echo "== an engine for the CPU: $(DEMO)/engine"
	$(BIN)/ink-build engines/nano/checkpoint -o $(DEMO)/engine --target cpu --max-seq-len 2048 --costs
	@echo "== what the engine is"
	$(BIN)/ink-inspect $(DEMO)/engine
	@echo "== a question, one token a step"
	$(BIN)/ink-run $(DEMO)/engine -p $(QUESTION) --seed 1 --stats --spec none
	@echo "== the same with drafts by DSpark"
	$(BIN)/ink-run $(DEMO)/engine -p $(QUESTION) --seed 1 --stats
	@echo "== old novels are harder to foresee: plain, then with drafts"
	$(BIN)/ink-run $(DEMO)/engine --raw -p $(NOVEL) --max-tokens 64 --seed 3 --stats --spec none
	$(BIN)/ink-run $(DEMO)/engine --raw -p $(NOVEL) --max-tokens 64 --seed 3 --stats
	@echo "== to serve it to OpenAI's clients: $(BIN)/pip install -e .[serve] && $(BIN)/ink-serve $(DEMO)/engine"
	@echo "== done: a model of nine million parameters knows nothing, but the way was the real one"

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not slow and not gpu and not multigpu" $(PYTEST_ARGS)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python 3.11+ is needed')"
	$(PYTHON) -m venv $(VENV)

# PyTorch first, so that it is this one whatever else asks for it.
$(VENV)/torch.stamp: | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	@touch $@

$(VENV)/cpu.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install --quiet --editable ".[cpu]"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml $(VENV)/torch.stamp
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@ $(VENV)/cpu.stamp
