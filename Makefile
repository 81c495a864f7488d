# The two that matter: `make predict` and `make test`. See README.md.

PYTHON ?= python3
PORT ?= 5000
PROMPT ?= What is machine learning?
# Of make soak: minutes of load; CHAOS=1 kills parts of the servers, and so does KILLS, so many times.
MINUTES ?= 10
STREAMS ?= 64
CHAOS ?=
KILLS ?=

BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup predict serve test test-unit bench soak lint fix docs lock audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) scripts/setup_environment.py
	@touch $@

models/demo/config.json: $(STAMP) $(wildcard tools/demo_model/*.py tools/demo_model/*.yaml)
	@$(BIN)/python scripts/make_demo_model.py >&2
	@touch $@

# Ctrl-C reaches make as well, which ends with status 130 by itself once the command has ended.
predict: models/demo/config.json
	@trap : INT; $(BIN)/python scripts/run_prediction.py "$(PROMPT)" || test $$? = 130

serve: models/demo/config.json
	@trap : INT; PORT=$(PORT) $(BIN)/python scripts/serve.py || test $$? = 130

# A file of tests stays in one process, which starts the servers that its tests share.
test: models/demo/config.json
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

# The fast half, on all cores, but for the few that take seconds.
test-unit: models/demo/config.json
	$(BIN)/python -m pytest -q -n auto -m "not slow" tests/unit

bench: models/demo/config.json
	@$(BIN)/python scripts/benchmark.py --suite

soak: models/demo/config.json
	@$(BIN)/python scripts/soak.py --minutes $(MINUTES) --streams $(STREAMS) \
		$(if $(filter-out 0,$(CHAOS)),--chaos) $(if $(KILLS),--kills $(KILLS))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/check_bounds.py

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python scripts/make_docs.py

# Keeps the versions of the lock that fit; `make lock UPGRADE=--upgrade` takes the newest.
lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" $(UPGRADE) \
		--constraint requirements/tensorrt_llm.txt requirements/image.in --output-file requirements/image.txt

audit: $(STAMP)
	@$(BIN)/python scripts/audit.py

clean:
	rm -rf .venv .venv-* .cog artifacts models/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
