# Everything a newcomer needs: `make run` predicts, `make test` tests; each sets up .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SCENARIO ?= deepseek-v3-2048xh800
TREES ?= trees

.PHONY: run app lint test long check docs pages proof scoreboard screenshots bench clean

run: $(VENV)/.core
	@$(BIN)/moesim simulate $(SCENARIO)

app: $(VENV)/.test
	@$(BIN)/moesim app

# LONG_TOO=PATHS: their long tests as well.
test: $(VENV)/.test
	$(BIN)/python -m pytest --long-too "$(LONG_TOO)" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# What takes minutes together: a browser, the recipes, the commands and figures of pages. ONLY=PATHS: a part of it.
long: $(VENV)/.test
	$(BIN)/python -m pytest $(ONLY) -m long -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: lint
	$(MAKE) --no-print-directory test

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# The site of the pages, in site/; a dead link fails.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --quiet

# Rewrites docs/validation.md, the answer in README.md and examples/*.out from fresh runs.
pages: $(VENV)/.core
	$(BIN)/python -m lab.writers.pages

# What takes too long for every change; its tables are committed. 200,000 fuzzed inputs: half an hour of one core. Then the trainers' own
# readers judge the exports, as far as their environments and trees are in TREES (lab/proofs/trainers/README.md lists them); others are skipped by name.
proof: $(VENV)/.test
	$(BIN)/python lab/proofs/fuzz/fuzz.py --cases 200000 --seed 0 --table lab/docs/proof/fuzz.md
	PYTHONPATH=tests/simulator/engine $(BIN)/python lab/proofs/engines/prove_engines.py --steps 1000 --prepared 200 --cases 10000 --table lab/docs/proof/engines.md
	$(BIN)/python tests/simulator/planner/prove_plans.py
	$(BIN)/python lab/proofs/trainers/prove.py $(TREES)
	$(BIN)/python lab/proofs/serving/prove.py $(TREES)
	$(BIN)/python -m pytest lab/tests
	MOESIM_EVERY_PAGE=1 $(BIN)/python -m pytest -m long

# Rewrites docs/screenshots/*.png from a server of its own; needs Chromium.
screenshots: $(VENV)/.test
	$(BIN)/python -m lab.writers.screenshots

# The open scoreboard anew, with the pages; half an hour of two cores.
scoreboard: $(VENV)/.core
	$(BIN)/python -m lab.writers.pages --scoreboard

bench: $(VENV)/.core
	$(BIN)/python benchmarks/performance.py
	$(BIN)/python -m lab.benchmarks.network

clean:
	rm -rf $(VENV)

# pip's own output stays quiet unless something fails; an editable install follows every edit.
$(VENV)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/.core

$(VENV)/.docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@ $(VENV)/.core
