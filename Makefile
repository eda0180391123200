# Two commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo    sets up, makes a robot dataset, trains a tiny world action model, shows what it learnt
#   make test    sets up, passes all tests
#   make lab     sets up, opens JupyterLab on the notebooks
#   make docs    builds the documentation into build/docs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Left empty, pip may pick any version; the tested ones are the default.
CONSTRAINTS ?= constraints.txt

.PHONY: setup demo lab test lint docs audit clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wamlab needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/wamlab demo

# In containers people are root, whom Jupyter only serves when told to; it listens on the loopback, with a token.
lab: setup
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --notebook-dir notebooks notebooks/00_first_run.ipynb $(LAB)

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadfile
	env WAMLAB_SMOKE=1 $(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 120 --nbval-kernel-startup-timeout 60 notebooks

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs-ready
	DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

$(VENV)/.docs-ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[docs]'
	@touch $@

# Into an environment of its own: what audits shall not decide what is audited. Asks the advisory database.
audit:
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check 'bandit[toml]>=1.8' 'pip-audit>=2.9'
	$(VENV)/audit/bin/bandit -q -c pyproject.toml -r wamlab
	$(VENV)/audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) build *.egg-info
