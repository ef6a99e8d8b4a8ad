"""Cost of a tick against the number of nodes: decode, align and detect, from 128 to 16,384 nodes of eight GPUs.

    python -m benchmarks.linear [--quick] [--warm 8] [--ticks 12] [--json FILE] [--plot FILE]
    python -m benchmarks.linear --nodes 1250 --warm 60 --ticks 20 --faults STRUCK

The worker's own stage with all detectors is called directly, four cuts a second as in production, on what a simulated cluster of each size
says (ticks, steps, logs, topology); no broker and no client. Shown: milliseconds of processor time for each second of the cluster, means
over the ticks after the warm-up, and the exponent of a power law through all sizes: 1 is linear. `--quick` ends at 2,048 nodes and takes
two minutes. 16,384 nodes need 8 GB of memory. Exit code 1 when the exponent of the total is above the bar.

`--nodes` measures one size and shows each detector by processor time, with `--faults` while these go on (as in `trainwarden simulate`;
STRUCK stands for six kinds from second 36 on). Shown then are the time from a grid point to the cut that closes it when nothing takes any
time (what waiting for each other's ticks alone costs) and digests of all that was said and of the state at the end: two builds whose
digests are the same do the same.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import numpy as np

from benchmarks._stream import Places, seconds
from collectors.simulated.encode import Sent
from collectors.simulated.spec import START_NS
from detectors.base import Detector, Frame
from streams.cycles import collect_rarely
from streams.detect import Pipeline
from streams.stage import RawStage
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.records import Verdict, encode
from trainwarden.selfmetrics import Metrics

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
QUICK_SIZES = SIZES[:5]
EXPONENT_BAR = 1.1
CUTS = 4
PARTS = ("decode", "align", "detect")
STRUCK = (
    "stage_imbalance@job-010:36+900x0.458,packet_loss@n00284/mlx5_2/1:37+900x0.0453,storage_slow@job-004:37+900x0.1516,"
    "slow_receiver@n00280/mlx5_5/1:38+900x0.833,kernel_panic@n00433:40+900,nvswitch_fatal@n00215:42+900"
)
"""What a mix of six is with 1,250 nodes and seed 0, sooner."""


@dataclass
class Worker:
    """Decoding, alignment and detection of one cluster, with processor time of each part."""

    clock: SimulatedClock = field(default_factory=lambda: SimulatedClock(START_NS + NS_PER_S))
    """What a second of the simulation says leaves at its end."""
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    ticks: int = 0
    waits_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = from_table({"cluster": "sim"})
        self.metrics = Metrics("worker")
        self.pipeline = Pipeline(config, metrics=self.metrics)
        self.stage = RawStage(config, self.pipeline, self.clock, "linear", self.metrics)
        self._places = Places()
        self.detectors_s = dict.fromkeys(self.pipeline.detectors, 0.0)
        self._said = hashlib.sha256()
        for name, detector in self.pipeline.detectors.items():
            self._time(name, detector)

    def _time(self, name: str, detector: Detector) -> None:
        """Have a detector's processor time added up: the worker itself counts by the wall."""
        update = detector.update

        def timed(frame: Frame) -> list[Verdict]:
            began_s = thread_time()
            found = update(frame)
            self.detectors_s[name] += thread_time() - began_s
            return found

        detector.update = timed  # type: ignore[method-assign]

    def second(self, sent: list[Sent]) -> dict[str, float]:
        """One second of the cluster; returns milliseconds by part."""
        before = dict(self.spent_s)
        for quarter in quarters(sent):
            self.clock.advance_ns(NS_PER_S // CUTS)
            self._cut(quarter)
        return {part: 1000 * (self.spent_s[part] - before[part]) for part in PARTS}

    def _cut(self, sent: list[Sent]) -> None:
        messages, now_ns = self._places.of(sent, self.clock.now_ns()), self.clock.now_ns()
        began_s = process_time()
        self.stage.take(messages)
        decoded_s = process_time()
        frame = self.pipeline.aligner.cut(now_ns)
        aligned_s = process_time()
        said = self.pipeline.run(frame) if frame is not None else []
        self.pipeline.aligner.inferred.clear()
        detected_s = process_time()
        for tick in frame.ticks if frame is not None else ():
            self.ticks += 1
            self.waits_ms.append((now_ns - tick.at_ns) / NS_PER_MS)
        for verdict in said:
            self._said.update(encode(verdict))
        for part, took_s in zip(
            PARTS, (decoded_s - began_s, aligned_s - decoded_s, detected_s - aligned_s), strict=True
        ):
            self.spent_s[part] += took_s

    def digests(self) -> dict[str, str]:
        """Of every verdict so far, and of the state."""
        state = hashlib.sha256(self.pipeline.snapshot())
        return {"verdicts": self._said.hexdigest()[:16], "state": state.hexdigest()[:16]}


def quarters(sent: list[Sent]) -> Iterator[list[Sent]]:
    """A second's messages by the cut that sees them first."""
    for number in range(CUTS):
        yield [one for one in sent if min(int(CUTS * (one.arrives_s % 1)), CUTS - 1) == number]


def measure(nodes: int, warm: int, ticks: int, faults: str = "none", digests: bool = False) -> dict[str, Any]:
    """Mean milliseconds a tick of `nodes` nodes, of each part and detector; what ticks waited for each other; `digests` if asked for."""
    worker, rows, before = Worker(), [], {}
    for number, sent in enumerate(seconds(nodes, warm + ticks, faults)):
        if number == warm:
            before, worker.waits_ms = dict(worker.detectors_s), []
        taken = worker.second(sent)
        rows.append({**taken, "messages": len(sent)})
    if worker.ticks < warm + ticks - 3:
        raise SystemExit(f"{nodes} nodes: {worker.ticks} ticks were closed of {warm + ticks}")
    timed = rows[warm:]
    means = {part: round(statistics.fmean(row[part] for row in timed), 3) for part in (*PARTS, "messages")}
    spent = {name: round(1000 * (spent_s - before[name]) / ticks, 3) for name, spent_s in worker.detectors_s.items()}
    waits = {f"p{share}": float(np.percentile(worker.waits_ms, share)) for share in (50, 95, 100)}
    total = round(sum(means[part] for part in PARTS), 3)
    told = worker.digests() if digests else {}
    return {"nodes": nodes, **means, "total": total, "detectors_ms": spent, "wait_ms": waits, **told}


def one_size(row: dict[str, Any]) -> str:
    """One size for people."""
    shares = sorted(row["detectors_ms"].items(), key=lambda item: -item[1])
    waits = ", ".join(f"{name} {ms:.0f}" for name, ms in row["wait_ms"].items())
    return "\n".join([
        f"{row['nodes']} nodes: " + ", ".join(f"{part} {row[part]:.1f}" for part in (*PARTS, "total")) + " ms a second",
        "detectors, ms a second: " + ", ".join(f"{name} {ms:.1f}" for name, ms in shares),
        f"grid point to its cut: {waits} ms",
        f"verdicts {row['verdicts']}, state {row['state']}",
    ])  # fmt: skip


def exponent(rows: list[dict[str, Any]], part: str) -> float:
    """Of the power law through the sizes."""
    known = [(row["nodes"], row[part]) for row in rows if row[part] > 0]
    nodes, ms = np.log(np.array(known, dtype=float)).T
    return round(float(np.polyfit(nodes, ms, 1)[0]), 3)


def table(rows: list[dict[str, Any]], exponents: dict[str, float]) -> str:
    """The result for people."""
    lines = [
        f"{'nodes':>7} {'messages':>9} " + " ".join(f"{part + ' ms':>10}" for part in (*PARTS, "total")) + "   us/node"
    ]
    lines += [
        f"{row['nodes']:7d} {row['messages']:9.0f} "
        + " ".join(f"{row[part]:10.1f}" for part in (*PARTS, "total"))
        + f" {1000 * row['total'] / row['nodes']:9.1f}"
        for row in rows
    ]
    lines.append("exponent of the fit: " + ", ".join(f"{part} {value:.2f}" for part, value in exponents.items()))
    lines.append(f"1 is linear; the bar for the total is {EXPONENT_BAR}")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], exponents: dict[str, float], path: Path) -> None:
    """Cost against nodes, both logarithmic, beside a straight line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.4))
    nodes = [row["nodes"] for row in rows]
    for part in (*PARTS, "total"):
        axes.plot(nodes, [row[part] for row in rows], marker="o", label=f"{part}: nodes^{exponents[part]:.2f}")
    first = rows[0]["total"]
    axes.plot(nodes, [first * n / nodes[0] for n in nodes], linestyle=":", color="grey", label="linear")
    axes.set(
        xscale="log", yscale="log", xlabel="nodes (8 GPUs each, 1 Hz)", ylabel="processor ms per second of the cluster"
    )
    axes.legend()
    axes.grid(which="both", alpha=0.2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK_SIZES[-1]} nodes")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="leave out sizes above this")
    parser.add_argument("--warm", type=int, default=8, help="ticks in which detectors allocate")
    parser.add_argument("--ticks", type=int, default=12)
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    parser.add_argument("--plot", type=Path, default=None, help="draw it")
    parser.add_argument("--nodes", type=int, default=0, help="this size alone, with each detector's share")
    parser.add_argument("--faults", default="none", help="what goes on meanwhile, with --nodes")
    given = parser.parse_args()
    collect_rarely()  # as the worker does
    if given.nodes:
        faults = STRUCK if given.faults == "STRUCK" else given.faults
        print(one_size(measure(given.nodes, given.warm, given.ticks, faults, digests=True)))
        return 0
    sizes = [size for size in (QUICK_SIZES if given.quick else SIZES) if size <= given.most]
    if len(sizes) < 2:
        parser.error(f"--most: {given.most} found, expected at least {SIZES[1]}: a fit needs two sizes")
    rows = []
    for size in sizes:
        rows.append(measure(size, given.warm, given.ticks))
        print(f"{size} nodes: {rows[-1]['total']:.1f} ms", file=sys.stderr, flush=True)
        gc.collect()
    exponents = {part: exponent(rows, part) for part in (*PARTS, "total")}
    print(table(rows, exponents))
    if given.json is not None:
        given.json.write_text(
            json.dumps({"rows": rows, "exponents": exponents, "bar": EXPONENT_BAR}, indent=1) + "\n", encoding="utf-8"
        )
    if given.plot is not None:
        plot(rows, exponents, given.plot)
    return int(exponents["total"] > EXPONENT_BAR)


if __name__ == "__main__":
    sys.exit(main())
