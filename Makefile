# Everything a person or CI runs. `make help` lists it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := .venv-peers
# The environment of the demo: the one for development where that is set up, else one with less in it.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)
SHELL := bash
# `time` shows what makes a phase long: tests that compute, or tests that wait (then user and sys are less than 2 x real).
PYTEST := time $(BIN)/python -m pytest --durations=20 --durations-min=4 -m "not soak and not nodes"
RIGS := time $(BIN)/python -m pytest --durations=30 --durations-min=4 tests/real -m
SOAK := $(BIN)/python -m pytest -m soak
# More processes than two cores, because tests also wait: with 4, 13 % of the CPU time of the unit tests was idle, and 8 %
# of the rigs', which need more memory. A file stays in one process, long files first (tests/file_order.py).
SPREAD := --dist loadfile --no-loadscope-reorder

# Some images set it. Without bytecode each process compiles what it imports, and pytest rewrites every test file again.
export PYTHONDONTWRITEBYTECODE :=

# pip compiles on one core and compiles everything. What few or no tests import is compiled when it is imported.
SELDOM := transformers/models|tests?|torch/_inductor|torch/testing|moto/(iam|stepfunctions|ec2)|sympy/physics|pygments/lexers
SELDOM := $(SELDOM)|fontTools|mypyc?|networkx|pip|pytorch_lightning|setuptools
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/($(SELDOM))/' $(VENV)/lib || true

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint style types rewritten unit coverage chromium podman slurm test-pythons test-versions test-libraries test-nodes test-torch test-torch-suite bench gpu docs messages evidence soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# pip works on one core. So two of them install the pinned versions, each every other line, into different folders; what
# pyproject.toml asks for is then there. The last pip checks that, and installs what they could not; what they could is
# compiled meanwhile.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
$(READY): pyproject.toml constraints.txt src/legroom/version.py
	$(PYTHON) -m venv $(VENV)
	for half in 0 1; do \
	    awk -v half=$$half '/^#/ {exit} NR % 2 == half' constraints.txt > $(VENV)/pinned-$$half.txt; \
	    $(PIP) --no-deps -r $(VENV)/pinned-$$half.txt & done; wait
	$(PIP) -c constraints.txt -e '.[dev]' & pip=$$!; $(COMPILE); wait $$pip
	touch $@

setup: $(READY) ## a virtual environment with everything, versions pinned

.venv-demo/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

demo: $(DEMO)/.ready ## run the demo: what Legroom does, measured on this machine in about a minute
	@mkdir -p build
	$(DEMO)/bin/legroom demo --out build/legroom-demo.png

# mypy uses one core for a minute: it begins beside the other checks, ends beside the first tests, and is heard last.
test: $(READY) ## all checks and all tests
	@mkdir -p build
	nice -n 5 $(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	    $(MAKE) --no-print-directory --output-sync -j 3 style docs podman rewritten \
	    && $(MAKE) --no-print-directory unit; tests=$$?; \
	    wait $$types; types=$$?; cat build/types.txt; exit $$((tests || types))

check: $(READY) ## style, types, and the unit tests that reach what changed since main: the loop while you work
	$(MAKE) --no-print-directory --output-sync -j 2 lint
	$(BIN)/python tests/changed.py -q -n 2 --dist loadfile

lint: style types ## style, types, layers

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

# pytest keeps each test file with its assertions rewritten. Once here: otherwise every process of a run rewrites all
# files at its start.
rewritten: $(READY)
	@$(BIN)/python -m compileall -qq src examples
	@mkdir -p build && { $(BIN)/python -m pytest --collect-only -qqq tests > build/collected.txt || { cat build/collected.txt; exit 1; }; }

# Then, one by one, the rigs that change the whole machine or measure it; last, half a minute of random faults.
unit: $(READY) chromium podman ## every test that has no target of its own
	$(PYTEST) -n 5 $(SPREAD) tests/unit tests/contract
	$(RIGS) "not soak and not alone" -n 4 $(SPREAD)
	$(RIGS) "not soak and alone"
	seed=$${LEGROOM_SOAK_SEED:-$$(date +%s)}; echo "LEGROOM_SOAK_SEED=$$seed"; \
	    LEGROOM_SOAK_SEED=$$seed LEGROOM_SOAK_SECONDS=30 $(SOAK) -n 3 tests/soak/test_soak_random.py

# Tracing more than doubles the CPU time of a test that runs in pytest's own process, so `make test` does without.
coverage: $(READY) ## which lines and branches the unit and contract tests reach
	$(BIN)/coverage erase
	$(PYTEST) -n 5 $(SPREAD) --cov --cov-report=term:skip-covered tests/unit tests/contract

# Never fails: without a browser the tests that need one are skipped with a reason, and CI as root fails there.
chromium: ## Debian's browser, for the tests of the web page; installed where that is allowed
	@command -v chromium >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && export DEBIAN_FRONTEND=noninteractive \
	    && { apt-get install -y -qq --no-install-recommends chromium || { apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends chromium; }; } \
	       >/dev/null 2>&1 </dev/null && command -v chromium >/dev/null; } \
	|| echo "chromium is not installed and could not be: the page is not looked at in a browser"

podman: | chromium ## containers for the tests of `legroom run`; installed where that is allowed
	@command -v podman >/dev/null && command -v runc >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && export DEBIAN_FRONTEND=noninteractive \
	    && { apt-get install -y -qq --no-install-recommends podman runc || { apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends podman runc; }; } \
	       >/dev/null 2>&1 </dev/null && command -v podman >/dev/null; } \
	|| echo "podman is not installed and could not be: no diagnosis is tested in a container"

# Starting four nodes of Ray takes 20 to 50 s on two cores, and its wheel has 76 MB, so `make test` does without.
$(VENV)/.ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[ray]' 'ray[train,tune]'
	touch $@

slurm: ## Debian's Slurm, for the tests with several nodes; installed where that is allowed
	@PATH=$$PATH:/usr/sbin; command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	    && export DEBIAN_FRONTEND=noninteractive \
	    && { apt-get install -y -qq --no-install-recommends slurm-wlm munge || { apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends slurm-wlm munge; }; } \
	       >/dev/null 2>&1 </dev/null && command -v slurmctld >/dev/null; } \
	|| echo "slurm-wlm and munge are not installed and could not be: nothing is tested with Slurm"

# As root: namespaces with a network, a /dev/shm and a link limit each. Everything is removed, also after a failure or a kill.
test-nodes: $(VENV)/.ray slurm ## several nodes with Ray or Slurm on this machine; needs root, takes minutes
	$(BIN)/python -m pytest -p no:cacheprovider -m nodes tests/nodes

test-pythons: $(READY) ## the wheel in an empty environment of every Python here, without torch
	$(BIN)/python tests/release/pythons.py

# Environments of 1 GB each, in a temporary folder; KEEP=folder keeps them, ONLY=oldest makes one of them.
test-versions: $(READY) ## formats, cache and loaders with the oldest and newest packages that pyproject.toml allows
	$(BIN)/python tests/release/versions.py $(addprefix --only ,$(ONLY)) $(addprefix --keep ,$(KEEP))

# The oldest torch that pyproject.toml allows has an environment of its own; the newest is the one of constraints.txt.
# It needs a Python that this torch has a wheel for (PYTHON=python3.11).
TORCH_OLDEST ?= $(shell sed -n 's/^torch = \["torch>=\(.*\)"\]$$/\1/p' pyproject.toml)
OLDEST := .venv-torch-oldest
OLDEST_READY := $(OLDEST)/.ready-$(TORCH_OLDEST)
TORCH_CONTRACT := tests/contract/test_contract_dataloader.py $(addprefix tests/unit/loader/test_dataloader, \
    .py _batch_lifetime.py _nested_collate.py _orphaned_workers.py _private_interfaces.py _queues.py _slots.py)
$(OLDEST_READY): pyproject.toml
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    'torch==$(TORCH_OLDEST)' -e '.[test]'
	touch $@

test-torch: $(READY) $(OLDEST_READY) ## the DataLoader's tests with the oldest torch that is supported, and the newest
	for python in $(OLDEST)/bin/python $(BIN)/python; do \
	    $$python -c 'import torch; print("torch", torch.__version__)' && \
	    $$python -m pytest -q -p no:cacheprovider $(TORCH_CONTRACT) || exit 1; done

# The tests are not part of this project: TORCH_TESTS names the folder "test" of the torch source of the same version.
# Another torch: TORCH_PYTHON names the python of an environment with it, expecttest, and what legroom needs.
TORCH_PYTHON ?= $(BIN)/python
test-torch-suite: ## torch's own tests of its DataLoader with ours: TORCH_TESTS=path/to/pytorch/test
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH LEGROOM_TORCH_TESTS=$(abspath $(TORCH_TESTS)) \
	    $(TORCH_PYTHON) tests/release/torch_suite.py $(TESTS)

# The peers want packages of their own versions: they have an environment to themselves, each if it can be had. The last
# three require other versions of numpy or torch than the pinned ones, and are installed without their requirements.
STREAMING := transformers Brotli zstd python-snappy catalogue oci paramiko azure-storage-blob azure-storage-file-datalake \
    azure-identity google-cloud-storage
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	for peer in datasets tensordict ray 'vineyard setuptools<81' webdataset lmdb $(STREAMING); do \
	    $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$peer \
	    || echo "$$peer cannot be installed here: it is not measured"; done
	for peer in torchvision megatron-core mosaicml-streaming; do \
	    $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt $$peer \
	    || echo "$$peer cannot be installed here: it is not measured"; done
	touch $@

test-libraries: $(PEERS)/.ready ## the readers compared with the libraries of their formats, also those that `make test` does not install
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    pytest pytest-timeout hypothesis pyyaml dill
	$(PEERS)/bin/python tests/release/libraries.py

bench: $(READY) $(PEERS)/.ready ## measure: speed as ratios against peers, side by side
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/formats.py
	$(BIN)/python bench/cache.py
	$(BIN)/python bench/loader_batches.py
	$(BIN)/python bench/loader_transport.py
	$(BIN)/python bench/share.py
	$(BIN)/python bench/stream.py
	$(BIN)/python bench/tune.py --loader torch
	$(BIN)/python bench/tune.py --loader legroom
	$(BIN)/python bench/watch.py
	$(BIN)/python bench/parquet_ranks.py
	$(BIN)/python bench/freeze.py
	$(BIN)/python bench/leak.py
	$(PEERS)/bin/python bench/formats_peers.py
	$(PEERS)/bin/python bench/peers.py
	$(BIN)/python bench/tables.py

gpu: ## every GPU test, real rig, experiment and benchmark, with the machine's own python3 and nothing else
	PYTHONPATH=$(CURDIR)/src python3 -m pytest -p no:cacheprovider -c tests/gpu/pytest.ini --rootdir . --confcutdir . \
	    -m "(gpu or real) and not soak" tests/gpu tests/real --ignore=tests/real/test_real_evidence.py
	bash tests/gpu/chat_t5_zero.sh
	python3 docs/evidence/run.py
	PYTHONPATH=$(CURDIR)/src python3 bench/gpu_loader.py
	PYTHONPATH=$(CURDIR)/src python3 bench/gpu_memory.py
	PYTHONPATH=$(CURDIR)/src python3 bench/gpu_train.py
	PYTHONPATH=$(CURDIR)/src python3 bench/gpu_shared.py
	PYTHONPATH=$(CURDIR)/src python3 bench/gpu_shared_batches.py
	PYTHONPATH=$(CURDIR)/src python3 bench/weights.py

docs: $(READY) ## build the documentation, warnings are errors
	$(BIN)/mkdocs build --strict --quiet

messages: $(READY) ## bring the translations up to date with the sentences in the code, and compile them
	$(BIN)/python po/messages.py update
	$(BIN)/python po/messages.py compile
	$(BIN)/python po/messages.py check

evidence: $(READY) ## run the experiments behind the claims
	$(BIN)/python docs/evidence/run.py

# Ten minutes of random kills, damage, changing sources, damaged files and failing calls; then what else takes long.
# Each part prints its seed: LEGROOM_SOAK_SEED=N repeats it, LEGROOM_SOAK_SECONDS=N gives all parts together more time.
soak: $(READY) ## random kills, damage and faults for ten minutes, and what else takes long
	LEGROOM_SOAK_SECONDS=$${LEGROOM_SOAK_SECONDS:-600} $(SOAK)

clean: ## remove what was built
	rm -rf $(VENV) .venv-demo $(PEERS) site build dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
