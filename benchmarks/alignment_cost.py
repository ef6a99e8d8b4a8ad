"""What it costs to turn the ticks of 1,250 nodes into one aligned tick, per tick, and how that grows with nodes.

    python -m benchmarks.alignment_cost [--nodes 1250] [--ticks 20]

Decoding is counted apart. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from streams.align import Aligner, AlignSettings
from trainwarden.clock import NS_PER_S
from trainwarden.records import Block, Catalog, Metric, Tick, catalog_id_of, decode, encode, pack_floats

START_NS = 1_700_000_000 * NS_PER_S
DEVICES = {"host": 1, "nic": 8, "gpu": 8}
METRICS = {"host": 22, "nic": 16, "gpu": 36}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ticks", type=int, default=20)
    given = parser.parse_args()
    sizes = sorted({given.nodes // 4, given.nodes // 2, given.nodes})
    rows = [measure(nodes, given.ticks) for nodes in sizes]
    print(json.dumps({"values_per_node": sum(DEVICES[f] * METRICS[f] for f in DEVICES), "rows": rows}, indent=1))
    return 0


def measure(nodes: int, ticks: int) -> dict[str, float]:
    """Median milliseconds per tick of `nodes` nodes."""
    catalogs = {family: _catalog(family) for family in DEVICES}
    aligner = Aligner(AlignSettings())
    for offset, catalog in enumerate(catalogs.values()):
        aligner.add("tw.catalog", 0, offset, catalog)
    rng = np.random.default_rng(1)
    decoding, aligning = [], []
    for second in range(ticks):
        messages = [encode(_tick(f"n{number}", second, catalogs, rng)) for number in range(nodes)]
        started = time.perf_counter()
        records = [decode(message) for message in messages]
        decoded = time.perf_counter()
        for number, record in enumerate(records):
            aligner.add("tw.ticks", 0, second * nodes + number, record)
        frame = aligner.cut(START_NS + second * NS_PER_S + NS_PER_S // 10)
        aligned = time.perf_counter()
        if frame is not None and frame.ticks:
            decoding.append(1000 * (decoded - started))
            aligning.append(1000 * (aligned - decoded))
    if not aligning:
        raise SystemExit(f"no tick of {nodes} nodes closed")
    return {
        "nodes": nodes,
        "ticks_closed": len(aligning),
        "decode_ms": round(statistics.median(decoding), 2),
        "align_ms": round(statistics.median(aligning), 2),
    }


def _catalog(family: str) -> Catalog:
    metrics = tuple(Metric(f"{family}_{number}", "1") for number in range(METRICS[family]))
    return Catalog(catalog_id=catalog_id_of(family, metrics), family=family, source="benchmark", metrics=metrics)


def _tick(node: str, second: int, catalogs: dict[str, Catalog], rng: np.random.Generator) -> Tick:
    blocks = tuple(
        Block(
            family,
            catalogs[family].catalog_id,
            tuple(f"{family}{number}" for number in range(devices)),
            pack_floats(rng.random(devices * METRICS[family])),
        )
        for family, devices in DEVICES.items()
    )
    return Tick(node=node, seq=second, observed_at_ns=START_NS + second * NS_PER_S, boot_id="b", blocks=blocks)


if __name__ == "__main__":
    raise SystemExit(main())
