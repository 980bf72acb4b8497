# make demo   set up, then show what the package does; writes build/demo/report.html
# make test   set up, then run every check
# make test-slow, make bench, make format, make clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow bench lint format clean

demo: $(READY)
	$(BIN)/dsnet demo --out build/demo

test: lint
	$(BIN)/python -m pytest -n auto --dist loadgroup -q

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks.slicing

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "dsnet needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python"; exit 1; }
	@echo "Setting up .venv (the first time this installs torch and takes a few minutes)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
