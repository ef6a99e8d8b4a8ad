"""What the detectors cost on one core: a tick of 1,250 nodes × 430 metrics with 10,000 ranks, through the frames that the pipeline makes.

    python -m benchmarks.detect_cost [--nodes 1250] [--ticks 40] [--families threshold,steps,rules,mesh] [--json FILE]

Each detector sees the same ticks; what is timed is `update` alone (processor time of this process). Names are new objects in every tick,
as they are when records were decoded, and go through the pipeline's own `Names`, whose cost is shown beside. So is the naive way in the
same run: one small Python object for each series with a running mean and deviation. Exit code 1 when the families together need more than
the bar, or memory more than its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time

import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame, registry
from detectors.synthetic import START_NS
from streams.matrices import Names
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent
from trainwarden.topology import Topology

BAR_MS, BAR_BYTES = 60.0, 1e9
FAMILIES = ("threshold", "steps", "rules", "mesh")
GPUS, PORTS, PEERS = 8, 8, 8
BELOW_LEAF, IN_RACK = 32, 8
PEER_STEPS = (1, 35, 2, 97, 3, 162, 5, 229)
HOST = (
    "cpu_busy_ratio", "cpu_user_ratio", "cpu_system_ratio", "cpu_iowait_ratio", "cpu_steal_ratio", "load1", "runnable_tasks",
    "mem_available_ratio", "mem_used_bytes", "swap_used_ratio", "psi_cpu_some_ratio", "psi_memory_some_ratio", "psi_memory_full_ratio",
    "psi_io_some_ratio", "psi_io_full_ratio", "tcp_retrans_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_busy_ratio",
    "run_dir_free_bytes", "context_switches_per_s", "clock_offset_ms",
)  # fmt: skip
GPU = (
    "busy_ratio", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio", "sm_clock_mhz", "memory_clock_mhz", "power_w", "temp_c",
    "memory_temp_c", "fb_used_ratio", "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s", "pcie_gen", "pcie_gen_max", "pcie_width_lanes",
    "pcie_width_max_lanes", "pcie_replay_per_s", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "nvlink_inactive_count",
    "nvlink_recoveries_per_s", "ecc_correctable_per_s", "ecc_uncorrectable_count", "row_remap_pending", "row_remap_failure",
    "clocks_event_reasons_bits", "thermal_violation_ratio", "power_violation_ratio",
)  # fmt: skip
NIC = (
    "up", "carrier", "rx_bytes_per_s", "tx_bytes_per_s", "rx_errors_per_s", "tx_errors_per_s", "carrier_changes_per_s", "speed_mbps",
    "role", "symbol_errors_per_s", "out_of_sequence_per_s", "ecn_marked_per_s",
)  # fmt: skip
PROCESS = ("alive", "state", "cpu_cores", "throttled_ratio", "last_step", "step_age_s", "phase")
MESH = ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count")
LEVELS = {
    "gpu": dict(zip(GPU, (0.9, 0.9, 0.5, 0.5, 1900, 2600, 650, 62, 80, 0.9, 2e9, 2e9, 5, 5, 16, 16, 0, 1e11, 1e11, *[0] * 9), strict=True)),
    "nic": dict(zip(NIC, (1, 1, 4e9, 4e9, 0, 0, 0, 400_000, 1, 0, 0, 0), strict=True)),
    "mesh": dict(zip(MESH, (0.1, 0.15, 3, 0), strict=True)),
}  # fmt: skip
STEADY = frozenset(
    {
        "pcie_gen",
        "pcie_gen_max",
        "pcie_width_lanes",
        "pcie_width_max_lanes",
        "up",
        "carrier",
        "speed_mbps",
        "role",
        "sent_count",
    }
)


@dataclass
class Cluster:
    """Frames of one large job and a small one: heavy-tailed noise with memory around each metric's level."""

    nodes: int = 1250
    step_s: float = 2.0
    seed: int = 0
    _noise: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._large = max(1, int(0.8 * self.nodes))
        self._names = Names()
        self.names_ms: list[float] = []
        self.topology = self._topology()
        self._step = 0

    @property
    def metrics(self) -> int:
        """Values that one node reports each tick."""
        return len(HOST) + GPUS * (len(GPU) + len(PROCESS)) + PORTS * len(NIC) + min(PEERS, self.nodes - 1) * len(MESH)

    def frames(self, ticks: int) -> Iterator[Frame]:
        """`ticks` frames, one second each; every `step_s` seconds all ranks report a step."""
        for number in range(ticks):
            at_ns = START_NS + (number + 1) * NS_PER_S
            nodes = tuple(_name(i) for i in range(self.nodes))
            entities = self._all_entities()
            families = {name: self._family(name, number, rows) for name, rows in entities.items()}
            tick = AlignedTick(at_ns, 1000, nodes, np.ones(self.nodes, dtype=np.bool_), families)
            steps = self._steps(at_ns) if number % max(int(self.step_s), 1) == 0 else ()
            yield Frame(at_ns + 300 * NS_PER_MS, (tick,), steps, (), self.topology)

    def _peers(self, node: int) -> list[int]:
        return list(
            dict.fromkeys((node + step) % self.nodes for step in (*PEER_STEPS, *range(1, 9)) if step % self.nodes)
        )[:PEERS]

    def _topology(self) -> Topology:
        topology = Topology()
        for i in range(self.nodes):
            rails = " ".join(f"{_name(peer)}={rail}" for rail, peer in enumerate(self._peers(i)))
            facts = {"leaf": f"leaf{i // BELOW_LEAF}", "rack": f"rack{i // IN_RACK}", "probe_rails": rails}
            topology.apply(
                TopologyEvent(entity=f"node:{_name(i)}", origin="scheduler", valid_from_ns=START_NS, attributes=facts)
            )
        for job, members in (("large", range(self._large)), ("small", range(self._large, self.nodes))):
            ranks = tuple(
                (r, _name(node), f"gpu{g}") for r, (node, g) in enumerate((n, g) for n in members for g in range(GPUS))
            )
            if ranks:
                topology.apply(
                    TopologyEvent(entity=f"job:{job}", origin="scheduler", valid_from_ns=START_NS, ranks=ranks)
                )
        return topology

    def _all_entities(self) -> dict[str, tuple[tuple[str, str], ...]]:
        blocks = {family: self._blocks(family) for family in ("host", "gpu", "nic", "process", "mesh")}
        started = process_time()
        entities = {family: self._names.of(family, own) for family, own in blocks.items()}
        self.names_ms.append(1000 * (process_time() - started))
        return entities

    def _blocks(self, family: str) -> list[tuple[str, tuple[str, ...]]]:
        names = [_name(i) for i in range(self.nodes)]
        if family == "host":
            return [(name, ("host",)) for name in names]
        if family == "mesh":
            return [(name, tuple(_name(peer) for peer in self._peers(i))) for i, name in enumerate(names)]
        if family == "process":
            first = [(i if i < self._large else i - self._large) * GPUS for i in range(self.nodes)]
            return [(name, tuple(f"rank{first[i] + g}" for g in range(GPUS))) for i, name in enumerate(names)]
        count, device = {"gpu": (GPUS, "gpu"), "nic": (PORTS, "mlx5_")}[family]
        return [(name, tuple(f"{device}{k}" for k in range(count))) for name in names]

    def _family(self, family: str, number: int, entities: tuple[tuple[str, str], ...]) -> FamilyMatrix:
        metrics = {"host": HOST, "gpu": GPU, "nic": NIC, "process": PROCESS, "mesh": MESH}[family]
        if family == "process":
            fixed = np.array([1, 2, 1.2, 0, self._step, 0.4, 2], dtype=np.float32)
            return FamilyMatrix(family, entities, metrics, np.tile(fixed, (len(entities), 1)))
        level = np.array([LEVELS.get(family, {}).get(metric, 0.5) for metric in metrics], dtype=np.float32)
        spread = np.array([0.0 if metric in STEADY else 0.03 for metric in metrics], dtype=np.float32) * level
        before = self._noise.get(family, np.zeros((len(entities), len(metrics)), dtype=np.float32))
        shock = self._rng.standard_normal(before.shape, dtype=np.float32)
        self._noise[family] = 0.6 * before + np.float32(0.5) * shock * (1 + np.abs(shock))
        return FamilyMatrix(
            family, entities, metrics, np.maximum(level + spread * self._noise[family], 0).astype(np.float32)
        )

    def _steps(self, at_ns: int) -> tuple[StepReport, ...]:
        self._step += 1
        jobs = (("large", 0, self._large), ("small", self._large, self.nodes))
        return tuple(report for job, first, last in jobs for report in self._job_steps(job, first, last, at_ns))

    def _job_steps(self, job: str, first: int, last: int, at_ns: int) -> Iterator[StepReport]:
        world = (last - first) * GPUS
        if not world:
            return
        local = 1000.0 * self.step_s * (0.8 + 0.01 * self._rng.standard_normal(world))
        duration, started_ns = float(local.max()) + 100.0, at_ns - int(self.step_s * NS_PER_S)
        for rank in range(world):
            mine = float(local[rank])
            row = StepRow(step=self._step, phase="train", started_at_ns=started_ns, duration_ms=duration, data_ms=5.0,
                          forward_ms=0.3 * mine, backward_ms=0.6 * mine, wait_ms=duration - mine, optimizer_ms=0.1 * mine - 5.0,
                          arrived_at_ns=started_ns + int(mine * NS_PER_MS), loss=2.0, grad_norm_local=0.5, grad_norm=0.4,
                          samples=8)  # fmt: skip
            yield StepReport(node=_name(first + rank // GPUS), seq=self._step, observed_at_ns=at_ns, boot_id="b", job=job, rank=rank,
                             world=world, rows=(row,))  # fmt: skip


class Naive:
    """The way it is usually written: one object for each series, asked in a loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str, str], list[float]] = {}

    def update(self, frame: Frame) -> int:
        """Series beyond four deviations."""
        odd = 0
        for tick in frame.ticks:
            for matrix in tick.families.values():
                for (node, device), row in zip(matrix.entities, matrix.values.tolist(), strict=True):
                    for metric, value in zip(matrix.metrics, row, strict=True):
                        odd += self._see((matrix.family, node, device, metric), value)
        return odd

    def _see(self, key: tuple[str, str, str, str], value: float) -> bool:
        mean, square = self._known.setdefault(key, [value, 0.0])
        away = value - mean
        self._known[key] = [mean + 0.02 * away, 0.98 * (square + 0.02 * away * away)]
        return bool(square > 0 and away * away > 16 * square)


@dataclass
class Cost:
    """One detector's cost. Milliseconds of processor time for each tick, and size of its state."""

    name: str
    family: str
    mean_ms: float
    median_ms: float
    worst_ms: float
    snapshot_bytes: int
    spoken: int


def measure(
    nodes: int = 1250, ticks: int = 40, warm_ticks: int = 30, families: tuple[str, ...] = FAMILIES, naive_ticks: int = 2
) -> dict[str, object]:
    """Cost of every registered detector of these families, and of the naive loop, on the same ticks.

    Parameters
    ----------
    warm_ticks
        Ticks seen before the clock runs, in which detectors allocate and learn.
    """
    cluster = Cluster(nodes)
    kinds = [kind for kind in registry().all().values() if kind.__module__.split(".")[1] in families]
    detectors, naive = [kind() for kind in kinds], Naive()
    before = _resident_bytes()
    times: dict[str, list[float]] = {d.name: [] for d in detectors}
    spoken = dict.fromkeys(times, 0)
    naive_ms: list[float] = []
    gc.collect()
    gc.freeze()
    for number, frame in enumerate(cluster.frames(warm_ticks + ticks)):
        for detector in detectors:
            started = process_time()
            said = detector.update(frame)
            times[detector.name].append(1000 * (process_time() - started))
            spoken[detector.name] += len(said)
        if number == warm_ticks:
            after = _resident_bytes()
        if number >= warm_ticks + ticks - naive_ticks - 1:
            started = process_time()
            naive.update(frame)
            naive_ms.append(1000 * (process_time() - started))
    gc.unfreeze()
    costs = [_cost(d, times[d.name][warm_ticks:], spoken[d.name]) for d in detectors]
    return _result(cluster, costs, after - before, naive_ms[1:], ticks)


def _cost(detector: Detector, times_ms: list[float], spoken: int) -> Cost:
    family = type(detector).__module__.split(".")[1]
    return Cost(
        detector.name,
        family,
        float(np.mean(times_ms)),
        float(np.median(times_ms)),
        max(times_ms),
        len(detector.snapshot()),
        spoken,
    )


def _result(
    cluster: Cluster, costs: list[Cost], grown_bytes: int, naive_ms: list[float], ticks: int
) -> dict[str, object]:
    total_ms = sum(cost.mean_ms for cost in costs)
    by_family = {
        family: sum(c.mean_ms for c in costs if c.family == family) for family in sorted({c.family for c in costs})
    }
    slow_ms = float(np.mean(naive_ms)) if naive_ms else float("nan")
    return {
        "machine": platform.processor() or platform.machine(), "python": platform.python_version(), "numpy": np.__version__,
        "nodes": cluster.nodes, "metrics": cluster.metrics, "series": cluster.nodes * cluster.metrics, "ranks": cluster.nodes * GPUS,
        "ticks": ticks, "detectors": [vars(cost) for cost in sorted(costs, key=lambda c: -c.mean_ms)], "family_ms": by_family,
        "total_ms": total_ms, "bar_ms": BAR_MS, "names_ms": float(np.mean(cluster.names_ms[-ticks:])),
        "naive_ms": slow_ms, "naive_ratio": slow_ms / total_ms if total_ms else float("nan"),
        "resident_bytes": grown_bytes, "snapshot_bytes": sum(cost.snapshot_bytes for cost in costs), "bar_bytes": BAR_BYTES,
    }  # fmt: skip


def table(result: dict[str, object]) -> str:
    """The result for people."""
    size = f"{result['nodes']} nodes x {result['metrics']} metrics = {result['series']:,} series, {result['ranks']:,} ranks"
    head = f"{'detector':22} {'family':10} {'mean ms':>8} {'median':>8} {'worst':>8} {'state MB':>9} {'said':>5}"
    lines = [f"{size}, {result['ticks']} ticks", head]
    rows = result["detectors"]
    assert isinstance(rows, list)
    for row in rows:
        lines.append(
            f"{row['name']:22} {row['family']:10} {row['mean_ms']:8.2f} {row['median_ms']:8.2f} {row['worst_ms']:8.2f} "
            f"{row['snapshot_bytes'] / 1e6:9.1f} {row['spoken']:5d}"
        )
    memory = f"grown by {_mega(result['resident_bytes'])} MB (bar {_mega(result['bar_bytes'])})"
    naive = f"naive loop {result['naive_ms']:.0f} ms = {result['naive_ratio']:.1f} times as long"
    lines.append(f"names kept from tick to tick by the aligner: {result['names_ms']:.2f} ms, not in the total")
    lines.append(f"total {result['total_ms']:.1f} ms a tick (bar {result['bar_ms']:.0f}), {memory}; {naive}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ticks", type=int, default=40)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    chosen = parser.parse_args()
    result = measure(chosen.nodes, chosen.ticks, families=tuple(chosen.families.split(",")))
    print(table(result))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(float(str(result["total_ms"])) > BAR_MS or float(str(result["resident_bytes"])) > BAR_BYTES)


def _name(node: int) -> str:
    return f"n{node:05d}"


def _mega(size: object) -> str:
    return f"{float(str(size)) / 1e6:.0f}"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
