"""What a detector sees and what it must be: frames in, verdicts out, nothing else.

A `Frame` is one cut of the input: the grid ticks that closed, the steps and log events that came with them, and the topology as it
was known. Everything downstream is a pure function of the sequence of frames, so live and replayed verdicts are identical.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, Evidence, Gap, LogEvent, Reach, StepReport, Verdict, stable_id
from trainwarden.registry import Registry
from trainwarden.topology import Topology

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class FamilyMatrix:
    """Samples of one family at one tick, over all nodes.

    Attributes
    ----------
    entities
        (node, device) of each row.
    metrics
        Column names, with their unit in the name.
    values
        entities × metrics, float32, NaN = not reported.
    states
        Metrics that their source calls states (codes, positions, limits, totals since boot): rules read them, and no line or band is
        learnt for them.
    """

    family: str
    entities: tuple[tuple[str, str], ...]
    metrics: tuple[str, ...]
    values: F32
    states: frozenset[str] = frozenset()

    def column(self, metric: str) -> F32:
        """One metric over all entities; all-NaN when no source reports it."""
        if metric not in self.metrics:
            return np.full(len(self.entities), np.nan, dtype=np.float32)
        return self.values[:, self.metrics.index(metric)]

    def rows_of(self, node: str) -> list[int]:
        """Row numbers of a node's devices."""
        return [i for i, (owner, _) in enumerate(self.entities) if owner == node]


@dataclass(frozen=True)
class AlignedTick:
    """All nodes at one point of the tick grid.

    `nodes` are the nodes expected, `present` which of them reported in time (a node expected but absent is news, not health).
    """

    at_ns: int
    interval_ms: int
    nodes: tuple[str, ...]
    present: NDArray[np.bool_]
    families: dict[str, FamilyMatrix]
    gaps: dict[str, tuple[Gap, ...]] = field(default_factory=dict)

    def family(self, name: str) -> FamilyMatrix | None:
        """Samples of a family, or None when no node reports it."""
        return self.families.get(name)


@dataclass(frozen=True)
class Frame:
    """One cut of the input, in event order.

    Attributes
    ----------
    now_ns
        When the cut was made (the live pipeline's clock; recorded, and given back in a replay).
    ticks
        Grid ticks that closed since the last cut, oldest first; often none.
    steps, logs
        Reports and events consumed since the last cut, sorted by (observed_at_ns, node, boot_id, seq).
    topology
        The picture after all topology events of this cut. Read only.
    """

    now_ns: int
    ticks: tuple[AlignedTick, ...]
    steps: tuple[StepReport, ...]
    logs: tuple[LogEvent, ...]
    topology: Topology


@dataclass(frozen=True)
class NoSettings:
    """Settings of a detector that has none."""


class Detector(ABC):
    """A pure, bounded-memory function of frames.

    Subclasses set `name`, `version`, `kinds` (what they may say, see `trainwarden.policy.KINDS`) and `Settings`, a frozen dataclass whose
    fields become the configuration keys ``detectors.<name>.<field>``. State lives in attributes; `snapshot` must hold all of it.

    `false_alarms_per_node_day` is what the detector promises: opinions that could open an incident (of a detector that only supports
    others: all opinions), counted once however often restated, per node and day of health. The contract holds it to that.
    """

    name: ClassVar[str] = ""
    version: ClassVar[int] = 1
    kinds: ClassVar[tuple[str, ...]] = ()
    Settings: ClassVar[type[Any]] = NoSettings
    false_alarms_per_node_day: ClassVar[float] = math.inf

    def __init__(self, settings: Any | None = None) -> None:
        self.settings = self.Settings() if settings is None else settings
        self.config_hash = stable_id(self.name, self.version, *settings_items(self.settings))

    @abstractmethod
    def update(self, frame: Frame) -> list[Verdict]:
        """Verdicts that this frame adds. Linear in nodes × metrics; never blocks, never reads a clock."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Complete state, so that `restore` goes on exactly where this one stood."""

    @abstractmethod
    def restore(self, payload: bytes) -> None:
        """Take over a snapshot written by the same name and version."""

    def coverage(self) -> dict[str, tuple[int, int]]:
        """What warms up, by part (a family, ``jobs``, ``pairs``): how many of how many that it follows are judged already.

        Parts are few and their names do not grow with the cluster. Empty for a detector that judges from the first value on.
        """
        return {}

    def warm(self, history: Iterable[Frame]) -> None:
        """Learn from past frames without speaking."""
        for frame in history:
            self.update(frame)

    def verdict(self, *, kind: str, entity: Entity, window: tuple[int, int], **facts: Any) -> Verdict:
        """A verdict in this detector's name.

        Parameters
        ----------
        window
            (start, end) unix ns of what was looked at. Kind, entity, job, attempt, `clears` and the second of the onset
            make the identity: the same finding is the same record however often it is said.
        facts
            Other fields of `Verdict`. `reach` is the most that this detector asks for (as far as verdicts of the kind go, where it is not
            given): the worker never lets it go farther.
        """
        onset_ns = int(facts.pop("onset_at_ns", window[0]))
        cluster = str(facts.pop("cluster", ""))
        job, attempt, clears = facts.get("job", ""), facts.get("attempt", 0), facts.get("clears", False)
        facts.setdefault("reach", Reach.ACT)
        identity = stable_id(
            self.name, self.version, kind, entity, job, attempt, clears, onset_ns // NS_PER_S, window[1]
        )
        return Verdict(cluster=cluster, observed_at_ns=window[1], verdict_id=identity, detector=self.name, version=self.version,
                       config_hash=self.config_hash, kind=kind, entity=entity, onset_at_ns=onset_ns, window_start_ns=window[0],
                       window_end_ns=window[1], **facts)  # fmt: skip


def settings_items(settings: Any) -> list[tuple[str, Any]]:
    """(key, value) pairs of a settings dataclass, in order of definition."""
    return [(f.name, getattr(settings, f.name)) for f in fields(settings)] if is_dataclass(settings) else []


def registry() -> Registry[Detector]:
    """Every detector found in the package, by name."""
    return Registry("detectors", Detector)  # type: ignore[type-abstract]


def series_evidence(name: str, unit: str, at_ns: Iterable[int], values: Iterable[float], low: float = float("nan"),
                    high: float = float("nan"), note: str = "", limit: int = 40) -> Evidence:  # fmt: skip
    """Evidence from a series, cut to its last `limit` points (evidence stays under 2 kB)."""
    times, points = list(at_ns)[-limit:], [round(float(v), 4) for v in list(values)[-limit:]]
    return Evidence(name, unit, tuple(times), tuple(points), low, high, note)


def pack_state(state: Any) -> bytes:
    """MessagePack of plain containers, for `Detector.snapshot`; arrays go in as (shape, dtype, bytes) by `pack_array`."""
    return msgspec.msgpack.encode(state)


def unpack_state(payload: bytes) -> Any:
    """Inverse of `pack_state`."""
    return msgspec.msgpack.decode(payload)


def pack_array(values: NDArray[Any]) -> tuple[list[int], str, bytes]:
    """An array as plain data."""
    return list(values.shape), values.dtype.str, values.tobytes()


def unpack_array(packed: Any) -> NDArray[Any]:
    """Inverse of `pack_array`; the array is writable."""
    shape, dtype, payload = packed
    return np.frombuffer(payload, dtype=np.dtype(dtype)).reshape(shape).copy()
