PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-slow coverage benchmark clean

demo: $(VENV)/installed
	$(BIN)/secure-fedclust demo --out demo

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

test-slow: $(VENV)/installed
	$(BIN)/pytest -m slow

coverage: $(VENV)/installed
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage report

benchmark: $(VENV)/installed
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/papers.py
	$(BIN)/python benchmarks/utility.py
	$(BIN)/python benchmarks/ledger.py
	$(BIN)/python benchmarks/masking.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/ckks.py
	$(BIN)/python benchmarks/deployment.py
	$(BIN)/python benchmarks/networks.py
	$(BIN)/python benchmarks/noisy_networks.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/attacks.py
	$(BIN)/python benchmarks/sweep.py

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
