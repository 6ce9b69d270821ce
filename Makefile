# `make serve` serves the embedded model from a fresh clone, `make test` runs lint, types and tests. CI runs `make test`,
# `make test-slow`, `make faults-quick`, `make soak`, `make test-clients` for two clients, `make test-cluster`,
# `make test-ui` and `make test-deploy`. `make help` lists the targets. Variables:
#
#   TORCH      requirement of torch                             make setup TORCH='torch==2.13.0'
#   PIP_ARGS   arguments of every `pip install`                 make setup PIP_ARGS='--extra-index-url URL'
#   LOCK       empty: versions of constraints.txt without      make setup LOCK=
#              hashes, for an index that builds wheels itself
#   PYTHON     Python of .venv, 3.11 or newer                   make setup PYTHON=python3.12
#   ARGS       additional flags of `tiercel serve`              make serve ARGS='--log-format console'
#   BROWSER    `required`: fail without Chromium                make test-ui BROWSER=required
#   ENGINE     `required`: fail without a Docker engine         make test-deploy ENGINE=required
#   TOOLS      `required`: fail without strace, promtool, npm   make test TOOLS=required
#   CLIENTS    names of client libraries; default: all          make test-clients CLIENTS='openai langchain'
#   TESTS      paths and flags of pytest                        make pytest TESTS='tests/cli -k port'
#   MINUTES    length of the soak; default: 75 seconds          make soak MINUTES=30
#   SOAK       further flags of the soak                        make soak SOAK='--break memory'

TORCH ?= torch==2.13.0
PIP_ARGS ?=
PYTHON ?=
LOCK ?= requirements.lock
ARGS ?=
ENGINE ?=
TOOLS ?=
CLIENTS ?=
TESTS ?= tests
MINUTES ?=
SOAK ?=
WORKERS ?= 4

# Processes that tests start read the bytecode of the first one, and do not compile hundreds of modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS := $(VENV)/constraints.txt
READY := $(VENV)/.setup
TEST_READY := $(VENV)/.setup-test
BROWSER_READY := $(VENV)/.setup-browser
CLUSTER_READY := $(VENV)/.setup-cluster
FAST_TESTS := $(wildcard tests/values tests/system tests/settings tests/wire tests/cli tests/kvcache tests/scheduler tests/docker tests/test_*.py)

# Installs Chromium if it is missing and the user is root. Otherwise prints that nothing is tested in a browser.
CHROMIUM := for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && \
	  apt-get install -qy --no-install-recommends chromium; then exit 0; fi; \
	echo "Chromium is missing: NOTHING is tested in a browser. On Debian and Ubuntu: apt install chromium" >&2; \
	[ "$(BROWSER)" != required ]

# Without this, pyright looks for newer versions of itself on the network.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-slow test-long faults faults-quick test-fast test-report test-clients test-cluster test-ui test-deploy soak lint format pytest constraints lock clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1 /p' Makefile | awk '{ name = $$1; $$1 = ""; printf "  make %-12s%s\n", name, $$0 }'

setup: $(READY)  ## create .venv, install tiercel and compile its CPU kernels; no effect if all is up to date
	@$(BIN)/python tiercel/engine/native/build.py --if-needed

serve: $(READY)  ## serve the embedded model on port 8000
	@exec $(BIN)/tiercel serve --port 8000 $(ARGS)

# Lint and types take a minute on one core. The tests run beside them, once the emulated kernels are compiled.
test: $(TEST_READY)  ## lint, types and all tests that need no browser and no Docker
	@$(MAKE) lint & linting=$$!; $(BIN)/python -m tests.engine.native.emulated && $(MAKE) pytest; status=$$?; \
	wait $$linting || { echo "lint or types: see above" >&2; exit 1; }; exit $$status

lint: $(TEST_READY)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(TEST_READY)  ## format and fix with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pytest: $(TEST_READY)  ## all tests that need no browser, no Docker and no fault; installs strace and promtool if it may
	@TOOLS='$(TOOLS)' $(BIN)/python -m tests.programs
	TOOLS='$(TOOLS)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/browser --ignore tests/deploy --ignore tests/faults --ignore tests/clients $(TESTS)

test-slow: $(TEST_READY)  ## killed processes, disk faults, hundreds of random walks: about ten minutes
	@TOOLS='$(TOOLS)' $(BIN)/python -m tests.programs
	TOOLS='$(TOOLS)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m slow --ignore tests/browser --ignore tests/deploy --ignore tests/faults --ignore tests/clients tests

faults: $(TEST_READY)  ## the score of the 42 rows of docs/faults.md, with hundreds of kills: about two hours
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.score

faults-quick: $(TEST_READY)  ## the same with the tests that take seconds: at most four minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.score --quick

test-long: $(TEST_READY)  ## thousands of simulations and preemptions: about an hour
	$(BIN)/python -m pytest -q -n 2 --timeout 3600 -m long tests --ignore tests/browser --ignore tests/deploy --ignore tests/faults --ignore tests/clients

test-fast: $(TEST_READY)  ## tests that load no model
	$(BIN)/python -m pytest -q -x $(FAST_TESTS)

test-clients: $(TEST_READY)  ## client libraries of OpenAI, LangChain, ... against the daemon; CLIENTS='openai langchain'
	PIP_ARGS='$(PIP_ARGS)' TOOLS='$(TOOLS)' $(BIN)/python -m tests.clients.environments $(CLIENTS)
	TOOLS='$(TOOLS)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs --timeout 1200 \
	  $(or $(patsubst %,tests/clients/test_%.py,$(CLIENTS)),tests/clients)

test-cluster: $(CLUSTER_READY)  ## engines on a real Ray of this machine: growth, a killed actor, shrinking; two minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -m ray tests/cluster

test-report: $(BROWSER_READY)  ## the load-test report in headless Chromium; installs Chromium if run as root
	@$(CHROMIUM)
	BROWSER='$(BROWSER)' $(BIN)/python -m pytest -q -rs tests/browser/test_report_page.py

test-ui: $(BROWSER_READY)  ## the dashboard at /ui in headless Chromium; writes screenshots to tests/browser/pictures
	@$(CHROMIUM)
	BROWSER='$(BROWSER)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/browser/test_ui_*.py

test-deploy: $(TEST_READY)  ## image and compose file on a separate Docker engine; without Docker, static checks only
	TORCH='$(TORCH)' PIP_ARGS='$(PIP_ARGS)' ENGINE='$(ENGINE)' \
	  $(BIN)/python -m pytest -q -rs --timeout 1200 tests/deploy tests/docker

soak: $(READY)  ## a daemon under load, kills and a full disk: 100 seconds, or MINUTES=30; fails if a limit is broken
	$(BIN)/python -m benchmarks.soak $(if $(MINUTES),--minutes $(MINUTES)) $(SOAK)

constraints: $(BROWSER_READY) $(CLUSTER_READY)  ## write constraints.txt from the packages in .venv; run `make clean test` first
	{ echo '# Versions that CI tested. Written by `make constraints`.'; \
	  $(PIP) freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' | grep -v '[@#]' | LC_ALL=C sort -f; } > constraints.new
	mv constraints.new constraints.txt
	$(MAKE) lock

# The dependencies of torch are named because torch itself, whose build depends on the machine, is not locked.
lock: $(READY)  ## write requirements.lock from constraints.txt and pyproject.toml; needs PyPI
	@rm -rf build/lock
	@$(BIN)/python -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check --quiet install $(PIP_ARGS) pip-tools
	@{ $(BIN)/python docker/requirements.py fast bench otel | grep -v '^torch'; \
	  printf '%s\n' filelock fsspec networkx sympy; } > build/lock/wanted.in
	@grep -v '^torch==' constraints.txt > build/lock/pins.txt
	@PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= build/lock/bin/pip-compile --quiet --generate-hashes --strip-extras \
	  --allow-unsafe --no-header --no-annotate --no-emit-options --index-url https://pypi.org/simple \
	  --constraint build/lock/pins.txt --output-file build/lock/found.txt build/lock/wanted.in
	@{ sed -n '/^#/p' requirements.lock; cat build/lock/found.txt; } > build/lock/requirements.lock
	mv build/lock/requirements.lock requirements.lock

clean:  ## remove .venv and all build products
	rm -rf $(VENV) .clients build dist *.egg-info tiercel/engine/native/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@set -e; found=; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "tiercel needs Python 3.11 or newer; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." >&2; \
	  echo "Install Python 3.11 or newer, or name one that is installed: make setup PYTHON=/path/to/python3" >&2; exit 1; fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot create virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; fi; \
	echo "creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv --clear $(VENV)

# Folders of a checkout from before decision 22. Kernels and caches are left in them, which git does not know.
OLD_ROOMS := $(wildcard cli cluster device embedded engine fleet loadtest modelfile simulation)

# torch is installed separately, because its build depends on the machine: TORCH replaces the pin.
# The rest comes from the lock before it, with hashes; nothing is resolved.
$(READY): pyproject.toml constraints.txt requirements.lock setup.py $(wildcard tiercel/engine/native/src/*) tiercel/engine/native/build.py | $(BIN)/python
	@$(if $(OLD_ROOMS),find $(OLD_ROOMS) \( -name '*.pyc' -o -name '_kernels*.so*' \) -delete; find $(OLD_ROOMS) -type d -empty -delete)
	@grep -v '^torch==' constraints.txt > $(PINS)
	@echo "installing $(TORCH) and tiercel; the first time takes minutes"
	@$(if $(LOCK),$(PIP) install $(PIP_ARGS) --require-hashes --no-deps -r $(LOCK))
	@$(PIP) install $(PIP_ARGS) -c $(PINS) "$(TORCH)"
	@$(PIP) install $(PIP_ARGS) $(if $(LOCK),--no-deps -e .,-c $(PINS) -e ".[fast]")
	@touch $@

$(TEST_READY): $(READY)
	@echo "installing the dependencies of the tests"
	@$(PIP) install $(PIP_ARGS) -c $(PINS) -e ".[fast,test]"
	@touch $@

$(CLUSTER_READY): $(TEST_READY)
	@echo "installing Ray"
	@$(PIP) install $(PIP_ARGS) -c $(PINS) -e ".[ray]"
	@touch $@

$(BROWSER_READY): $(TEST_READY)
	@echo "installing the dependencies of the browser tests"
	@$(PIP) install $(PIP_ARGS) -c $(PINS) -e ".[browser]"
	@touch $@
