# make demo   hurt a real training job on this machine and watch it heal   (FAULT=kill SEED=3 choose another fault)
# make test   lint, types, import contracts and every test but those of make test-faults and make test-long
# Both create the virtual environment and install what they need; VENV=/path shares one.

PYTHON ?= python3
VENV ?= .venv
FAULT ?= freeze
SEED ?= 0
BENCH_VENV ?= .venv-bench
SPLIT ?= test
OUT ?= benchmarks/results/tmp/recordings
FAULTS ?= all
BIN := $(VENV)/bin
STAMP := $(VENV)/.trainwarden-installed
BENCH_STAMP := $(BENCH_VENV)/.trainwarden-installed

.PHONY: demo test lint unit integration test-faults test-long bench bench-detect bench-scale bench-training bench-collector bench-relation bench-recordings clean install

install: $(STAMP)

$(STAMP): pyproject.toml hook/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable hook --editable ".[demo,gnn,notebooks,dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/trainwarden demo --fault $(FAULT) --seed $(SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd hook && $(abspath $(BIN))/mypy trainwarden_hook
	$(BIN)/lint-imports

# what needs no broker on Java, no training processes and no root runs on three workers; the rest would disturb itself
unit: $(STAMP)
	$(BIN)/python -m pytest -n 3 -m "not (kafka or torch or slow or root or long)"

# what only waits much, two at a time; then what has brokers on Java, training processes and namespaces, each alone on the machine
integration: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not (kafka or torch or root or faults or long)"
	$(BIN)/python -m pytest -m "(kafka or torch or root) and not (faults or long)"

# kills, broker restarts, garbage, Ctrl-C: whole clusters on Apache Kafka, about a quarter of an hour, alone on the machine
test-faults: $(STAMP)
	$(BIN)/python -m pytest -m faults

# the recordings under every change of circumstances, whole fabrics, hundreds of thousands of ticks: half an hour on two cores
test-long: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m long

test: lint unit integration

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# the whole collector on a node with 8 GPUs and 8 ports; ARGS="--ticks 100000" or ARGS="--real 600" for its other two parts
bench-collector: $(STAMP)
	$(BIN)/python -m benchmarks.collector $(ARGS)

# 10,000 GPUs at 1 Hz on this machine (broker, worker, store and action service, six minutes), what the units of two stages cost, every hop
# beside a plain confluent-kafka loop (in BENCH_VENV, where it is there), cost against nodes to 16,384, events through correlation: half an hour.
# SCALE="--nodes 96 --minutes 1 --broker tansu" for a small cluster, SCALE="--minutes 30" for the whole bar, LINEAR=--quick up to 2,048 nodes
bench-scale: $(STAMP)
	@missed=0; run() { echo "$(BIN)/python -m $$*"; $(BIN)/python -m "$$@" || missed=1; }; \
	run benchmarks.hops --plain-python $(BENCH_VENV)/bin/python --json benchmarks/results/hops.json; \
	run benchmarks.correlation --json benchmarks/results/correlation.json; \
	run benchmarks.linear $(LINEAR) --json benchmarks/results/linear.json --plot benchmarks/results/linear.png; \
	run benchmarks.scale_units; \
	run benchmarks.scale_workers --json benchmarks/results/scale_workers.json; \
	run benchmarks.scale $(SCALE) --json benchmarks/results/scale.json; \
	exit $$missed

# detectors, ours and the usual tools, on public labelled series; an environment of its own, for the peers pin other versions
bench-detect: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m benchmarks.detect --split $(SPLIT)

# who names the culprit among thousands of nodes: ours and ten floors on simulations held out from training; QUICK=--quick for a quick look
bench-relation: $(STAMP)
	$(BIN)/python -m benchmarks.relation $(QUICK)

# a real job of four nodes under real faults, with what is drawn from SEED, recorded into OUT and scored: root, two minutes a fault.
# FAULTS="exits,net_delay+disk_full,kill9:2" for some of them: one, two at the same time, one that comes twice
bench-recordings: $(STAMP)
	$(BIN)/python -m benchmarks.recorder $(OUT) --seed $(SEED) --faults $(FAULTS)
	$(BIN)/trainwarden evaluate $(OUT)

# saves, recovery, fewer and more nodes, shares and link escape, beside the peers that install here, within 19 minutes; TRAINING=--quick takes five
bench-training: $(STAMP)
	$(BIN)/python -m benchmarks.training $(TRAINING)

$(BENCH_STAMP): pyproject.toml benchmarks/detect/constraints.txt
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --constraint benchmarks/detect/constraints.txt --editable ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) $(BENCH_VENV) demo-run .pytest_cache .mypy_cache .ruff_cache
