"""What goes wrong with telemetry without anything being wrong with a node: changes made to frames by the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from detectors.base import F32, AlignedTick, FamilyMatrix, Frame
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, LogEvent, StepReport, StepRow, TopologyEvent
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
ODD_NAMES = (
    "gpu node/7:rack|2", "größe-\N{SNOWMAN}", "'; drop table nodes; --", "%s{}\\n\t", "x" * 253, "0", "fabric:", "leaf:a", "NaN", "-1",
)  # fmt: skip
"""Names that some site, or some attacker, gives a node."""


def thinned(frame: Frame, number: int) -> Frame:
    """A fifth of the ticks and reports is missing."""
    rng = np.random.default_rng(number)
    ticks = frame.ticks if rng.random() > 0.2 else ()
    return replace(frame, ticks=ticks, steps=tuple(r for r in frame.steps if rng.random() > 0.2))


def with_nan(frame: Frame, rng: np.random.Generator) -> Frame:
    """A twentieth of the samples, and whole families at times, are not a number."""
    ticks = []
    for tick in frame.ticks:
        families = {}
        for name, matrix in tick.families.items():
            hidden = rng.random(matrix.values.shape) < (1.0 if rng.random() < 0.02 else 0.05)
            families[name] = replace(matrix, values=np.where(hidden, np.float32(np.nan), matrix.values))
        ticks.append(replace(tick, families=families))
    steps = tuple(_with_nan_rows(report, rng) for report in frame.steps)
    return replace(frame, ticks=tuple(ticks), steps=steps)


def shifted(report: StepReport, by_ns: int) -> StepReport:
    """A report of a node whose clock is off."""
    rows = tuple(
        msgspec.structs.replace(r, started_at_ns=r.started_at_ns + by_ns, arrived_at_ns=r.arrived_at_ns + by_ns)
        for r in report.rows
    )
    return msgspec.structs.replace(report, rows=rows, observed_at_ns=report.observed_at_ns + by_ns)


def turned(tick: AlignedTick) -> AlignedTick:
    """Nodes and rows in reverse order."""
    families = {name: _turned_rows(matrix) for name, matrix in tick.families.items()}
    return replace(tick, nodes=tick.nodes[::-1], present=tick.present[::-1].copy(), families=families)


def without(tick: AlignedTick, node: str, forgotten: bool) -> AlignedTick:
    """A tick in which `node` is silent: still expected, or (`forgotten`) not even that."""
    families = {name: _rows_where(matrix, lambda pair: node not in pair) for name, matrix in tick.families.items()}
    here = np.array([name != node for name in tick.nodes], dtype=np.bool_)
    if not forgotten:
        return replace(tick, present=tick.present & here, families=families)
    nodes = tuple(name for name in tick.nodes if name != node)
    return replace(tick, nodes=nodes, present=tick.present[here], families=families)


def renamed(frames: Sequence[Frame], names: dict[str, str]) -> list[Frame]:
    """The same frames of nodes with other names; a node that is not in `names` keeps its own."""
    pictures: dict[int, Topology] = {}
    return [_renamed_frame(frame, names, pictures) for frame in frames]


def named(entity: Entity, names: dict[str, str]) -> tuple[str, str]:
    """Kind and node of an entity under the other names; of one without a node, its name."""
    place = entity.node or entity.name
    return str(entity.kind), names.get(place, place)


def emptied(tick: AlignedTick) -> AlignedTick:
    """A tick in which every family is there and has no row."""
    return replace(
        tick, families={name: _rows_where(matrix, lambda _: False) for name, matrix in tick.families.items()}
    )


def cheap_frames(ticks: int, churn_every: int = 1000) -> Iterator[Frame]:
    """`ticks` frames of two nodes in one job, one tick and one step each; every `churn_every` ticks the job is another one and so is
    its second node, out of 16 of each. Noise repeats after 64 ticks: what is tested is the memory, not the judgement.
    """  # fmt: skip
    rng = np.random.default_rng(17)
    noise = rng.standard_normal((64, 4)).astype(np.float32)
    for number in range(ticks):
        episode = number // churn_every % 16
        if number % churn_every == 0:
            topology, nodes = _small_job(episode, number)
        yield _cheap_frame(number, noise[number % 64], topology, nodes, f"j{episode}")


def _small_job(episode: int, number: int) -> tuple[Topology, tuple[str, str]]:
    at_ns = START_NS + number * NS_PER_S
    nodes = ("steady", f"guest{episode}")
    topology = Topology()
    for node in nodes:
        topology.apply(
            TopologyEvent(entity=f"node:{node}", origin="scheduler", valid_from_ns=at_ns, attributes={"leaf": "l0"})
        )
    ranks = tuple((rank, node, "gpu0") for rank, node in enumerate(nodes))
    topology.apply(
        TopologyEvent(entity=f"job:j{episode}", origin="scheduler", valid_from_ns=at_ns, attempt=number, ranks=ranks)
    )
    return topology, nodes


def _cheap_frame(number: int, noise: F32, topology: Topology, nodes: tuple[str, str], job: str) -> Frame:
    at_ns = START_NS + (number + 1) * NS_PER_S
    near, far = float(noise[0]), float(noise[1])
    rows = {
        "host": ((("cpu_busy_ratio", "load1"), [(0.5 + 0.02 * near, 2 + 0.1 * far), (0.5 + 0.02 * far, 2 + 0.1 * near)]), "host"),
        "nic": ((("carrier", "rx_bytes_per_s", "role"), [(1, 4e7 + 1e6 * near, 1), (1, 4e7 + 1e6 * far, 1)]), "eth0"),
    }  # fmt: skip
    families = {
        name: FamilyMatrix(name, tuple((node, device) for node in nodes), metrics, np.array(values, dtype=np.float32))
        for name, ((metrics, values), device) in rows.items()
    }
    probes = np.array([(0.2 + 0.01 * near, 0.3, 3, 0), (0.2 + 0.01 * far, 0.3, 3, 0)], dtype=np.float32)
    families["mesh"] = FamilyMatrix(
        "mesh", (nodes, nodes[::-1]), ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count"), probes
    )
    tick = AlignedTick(at_ns, 1000, nodes, np.ones(2, dtype=np.bool_), families)
    logs = (_harmless(number, nodes[1], at_ns),) if number % 5000 == 0 else ()
    return Frame(at_ns, (tick,), _one_step(number, at_ns, noise, nodes, job), logs, topology)


def _one_step(number: int, at_ns: int, noise: F32, nodes: tuple[str, str], job: str) -> tuple[StepReport, ...]:
    local = 700.0 + 20.0 * noise[2:4]
    longest = float(local.max()) + 100.0
    return tuple(
        StepReport(node=node, seq=number, observed_at_ns=at_ns, boot_id="b", job=job, attempt=0, rank=rank, world=2, rows=(
            StepRow(step=number, phase="train", started_at_ns=at_ns - NS_PER_S, duration_ms=longest, data_ms=1.0,
                    forward_ms=float(local[rank]) * 0.6, backward_ms=float(local[rank]) * 0.3, optimizer_ms=float(local[rank]) * 0.1,
                    wait_ms=longest - float(local[rank]), arrived_at_ns=at_ns - NS_PER_S + int(local[rank] * NS_PER_MS), loss=2.0,
                    grad_norm_local=0.5, grad_norm=0.4, samples=64),
        )) for rank, node in enumerate(nodes)
    )  # fmt: skip


def _harmless(number: int, node: str, at_ns: int) -> LogEvent:
    return LogEvent(
        node=node, seq=number, observed_at_ns=at_ns, boot_id="b", source="kernel", severity="warning", code="hung_task"
    )


def _with_nan_rows(report: StepReport, rng: np.random.Generator) -> StepReport:
    blank = {"data_ms": float("nan"), "wait_ms": float("nan"), "grad_norm_local": float("nan"), "loss": float("nan")}
    rows = tuple(msgspec.structs.replace(row, **blank) if rng.random() < 0.05 else row for row in report.rows)
    return msgspec.structs.replace(report, rows=rows)


def _turned_rows(matrix: FamilyMatrix) -> FamilyMatrix:
    return replace(matrix, entities=matrix.entities[::-1], values=matrix.values[::-1].copy())


def _rows_where(matrix: FamilyMatrix, wanted: Callable[[tuple[str, str]], bool]) -> FamilyMatrix:
    keep = [number for number, pair in enumerate(matrix.entities) if wanted(pair)]
    return replace(matrix, entities=tuple(matrix.entities[i] for i in keep), values=matrix.values[keep])


def _renamed_frame(frame: Frame, names: dict[str, str], pictures: dict[int, Topology]) -> Frame:
    if id(frame.topology) not in pictures:
        pictures[id(frame.topology)] = _renamed_topology(frame.topology, names)
    ticks = tuple(_renamed_tick(tick, names) for tick in frame.ticks)
    steps = tuple(msgspec.structs.replace(r, node=names.get(r.node, r.node)) for r in frame.steps)
    logs = tuple(msgspec.structs.replace(e, node=names.get(e.node, e.node)) for e in frame.logs)
    return replace(frame, ticks=ticks, steps=steps, logs=logs, topology=pictures[id(frame.topology)])


def _renamed_tick(tick: AlignedTick, names: dict[str, str]) -> AlignedTick:
    families = {
        name: replace(
            matrix,
            entities=tuple((names.get(node, node), names.get(device, device)) for node, device in matrix.entities),
        )
        for name, matrix in tick.families.items()
    }
    return replace(tick, nodes=tuple(names.get(node, node) for node in tick.nodes), families=families)


def _renamed_topology(old: Topology, names: dict[str, str]) -> Topology:
    """Job attributes and whatever else a later topology knows are copied as they are."""
    new = Topology()
    for key, value in vars(old).items():
        setattr(new, key, _renamed_value(value, names))
    return new


def _renamed_value(value: object, names: dict[str, str]) -> object:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {_renamed_value(k, names): _renamed_value(v, names) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_renamed_value(v, names) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{f: _renamed_value(getattr(value, f), names) for f in value.__dataclass_fields__})  # type: ignore[type-var]
    return value
