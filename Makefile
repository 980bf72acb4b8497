# make demo   set up what the demo needs, then show what the package does; writes build/demo/report.html
# make test   set up what the checks need as well, then run all of them
# make docs   build the documentation into build/docs; any warning is an error
# make test-slow, make bench, make format, make clean

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
DEMO_READY := .venv/.ready-demo
READY := .venv/.ready-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# The code of this checkout, also where several checkouts share a .venv.
export PYTHONPATH := $(CURDIR)/src

.PHONY: demo test test-slow bench docs lint format clean
.NOTPARALLEL:

demo: $(DEMO_READY)
	$(BIN)/dsnet demo --out build/demo
	@echo
	@echo "Open build/demo/report.html in a browser. To go on with the command line:"
	@echo "  . $(BIN)/activate        # from then on dsnet is a command; or write $(BIN)/dsnet"
	@echo "  dsnet predict build/demo/supernet build/demo/images --budget 20%"
	@echo "  dsnet --help"

test: lint docs
	$(BIN)/python -m pytest -n auto --dist loadgroup -q

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadgroup -q -m slow

bench: $(READY)
	$(BIN)/python -m benchmarks.slicing

docs: $(READY)
	$(BIN)/mkdocs build --quiet

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What both need of .venv itself, which may be a link to a folder elsewhere.
define make_venv
	@test -n "$(PYTHON)" || { echo "dsnet needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv "$$($(PYTHON) -c 'import os; print(os.path.realpath(".venv"))')"
	@echo "Setting up .venv for $(1) (the first time this installs torch and takes a few minutes)"
endef

$(DEMO_READY): pyproject.toml constraints.txt
	$(call make_venv,the demo)
	$(PIP) -e '.[demo]'
	@touch $@

$(READY): pyproject.toml constraints.txt
	$(call make_venv,the checks)
	$(PIP) -e '.[dev]'
	@touch $(DEMO_READY) $@

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis
