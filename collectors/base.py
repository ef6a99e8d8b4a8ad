"""What a source is: a named reader of one family of metrics, called once per tick, that says *why* when it has nothing.

A source is one file in `collectors/sources` with one subclass of `Source`. All are sampled by one thread in turn, and one that hangs is
left behind (`collectors.runner`): it may hang, fail or be slow without holding up the tick. What belongs to devices is read by device
(`collectors.devices`). Sources with a socket or a file to watch start their own thread in `start` and hand events out through the
`Outlet` at once.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

from collectors.devices import Together
from collectors.files import Files
from collectors.ranks import RankBoard
from collectors.topology.facts import FactBoard
from collectors.topology.processes import Processes
from collectors.xids import XidBoard
from trainwarden.clock import Clock
from trainwarden.records import Block, Catalog, Gap, LogEvent, Metric, StepRow, catalog_id_of, pack_floats
from trainwarden.registry import Registry
from trainwarden.selfmetrics import Metrics

NAN = float("nan")

Row = Mapping[str, float]


@dataclass(frozen=True)
class Family:
    """Columns of one family; what a catalogue says."""

    name: str
    source: str
    metrics: tuple[Metric, ...]

    @cached_property
    def catalog_id(self) -> str:
        """Identity of the column layout."""
        return catalog_id_of(self.name, self.metrics)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(metric.name for metric in self.metrics)

    @cached_property
    def _absent(self) -> tuple[float, ...]:
        return (NAN,) * len(self.metrics)

    def catalog(self) -> Catalog:
        """The catalogue record, without its header."""
        return Catalog(catalog_id=self.catalog_id, family=self.name, source=self.source, metrics=self.metrics)

    def block(self, rows: Mapping[str, Row]) -> tuple[Block, ...]:
        """One block of `rows` (device → metric → value), absent values NaN; empty when there are no devices."""
        if not rows:
            return ()
        values: list[float] = []
        for row in rows.values():
            values.extend(map(row.get, self._names, self._absent))
        return (Block(self.name, self.catalog_id, tuple(rows), pack_floats(values)),)


def family(name: str, source: str, *columns: tuple[str, str, str, str]) -> Family:
    """A family from (name, unit, kind, meaning) columns."""
    return Family(name, source, tuple(Metric(*column) for column in columns))


@dataclass(frozen=True)
class Sample:
    """What one source read at one tick: blocks of numbers, and codes for what it could not read."""

    blocks: tuple[Block, ...] = ()
    gaps: tuple[Gap, ...] = ()


class SourceError(Exception):
    """A source has nothing to say in this tick.

    Parameters
    ----------
    reason
        Short code for the gap: ``permission``, ``missing``, ``address``...
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Outlet(Protocol):
    """Where a source hands events to, from any thread. Headers are filled in by the receiver."""

    def log(self, event: LogEvent, urgent: bool) -> None:
        """Publish a log event; `urgent` ones leave now instead of with the next tick."""
        ...

    def step(self, job: str, attempt: int, rank: int, world: int, row: StepRow) -> None:
        """Add a step to the report of its rank."""
        ...

    def dead(self, origin: str, reason: str, payload: bytes) -> None:
        """Send bytes that nobody could read to the dead letters."""
        ...

    def topology_changed(self) -> None:
        """The layout of a job on this node changed: announce it soon."""
        ...


@dataclass
class Facts:
    """What one source found out and another one needs. NaN or empty = not known."""

    rail_address: str = ""
    probe_address: str = ""
    rdma_address: str = ""
    rdma_pings: bool = False
    probed: tuple[str, ...] = ()
    agents_gone: frozenset[str] = frozenset()
    clock_offset_ms: float = NAN
    board: FactBoard = field(default_factory=FactBoard)
    processes: Processes = field(default_factory=Processes)
    gpus: int = 0
    pod_devices: dict[str, int] = field(default_factory=dict)
    xids: XidBoard = field(default_factory=XidBoard)
    together: Together = field(default_factory=Together)


@dataclass(frozen=True)
class Context:
    """What a source may use. `files` reads under the configured root; `run_directory` is ours to write into."""

    node: str
    clock: Clock
    files: Files
    ranks: RankBoard
    outlet: Outlet
    metrics: Metrics
    state_directory: Path
    run_directory: Path
    facts: Facts = field(default_factory=Facts)


class Source(ABC):
    """Base of all sources.

    Attributes
    ----------
    name
        Key in the configuration, in gaps and in self-metrics.
    families
        Column layouts of the blocks that `sample` returns.
    inline
        `sample` only looks at memory: it needs no thread.
    every_ticks
        How often it is asked; between, its last answer stands. Above 1 for what asks in the background and only tells what changed.
    Settings
        Dataclass of the keys under ``[collector.sources.<name>]``.
    """

    name: ClassVar[str] = ""
    families: ClassVar[tuple[Family, ...]] = ()
    inline: ClassVar[bool] = False
    every_ticks: ClassVar[int] = 1
    Settings: ClassVar[type[Any]]

    def __init__(self, context: Context, settings: Any) -> None:
        self.context = context
        self.settings = settings

    @abstractmethod
    def sample(self, now_ns: int) -> Sample:
        """Read everything now. May raise `OSError` or `SourceError`; may be slow: the agent does not wait for long."""

    def explain(self) -> str:
        """One sentence for a person about what is here and what is not; empty: what the sample and its gaps say is all.

        Called once, after two samples, by `trainwarden collect --once --explain`; it may wait for a second.
        """
        return ""

    def start(self) -> None:  # noqa: B027 - most sources have nothing to start
        """Open sockets, start threads. Called once before the first sample."""

    def close(self) -> None:  # noqa: B027 - most sources have nothing to close
        """Undo `start`."""


class Rates:
    """Counters into rates, by the monotonic clock. The first reading, and a counter that fell (a reset), have no rate."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: dict[tuple[str, ...], tuple[float, int]] = {}

    def per_second(self, key: tuple[str, ...], value: float | None, scale: float = 1.0) -> float:
        """(value - previous) × `scale` per second; NaN when there is nothing to compare with."""
        if value is None:
            self._last.pop(key, None)
            return NAN
        now_ns = self._clock.monotonic_ns()
        before = self._last.get(key)
        self._last[key] = (value, now_ns)
        if before is None or value < before[0] or now_ns <= before[1]:
            return NAN
        return (value - before[0]) * scale * 1e9 / (now_ns - before[1])

    def keep(self, wanted: Callable[[tuple[str, ...]], bool]) -> None:
        """Forget counters of devices that are gone."""
        self._last = {key: value for key, value in self._last.items() if wanted(key)}


def highest(values: Iterable[float]) -> float:
    """The largest value, NaN ones left out; NaN when there is none."""
    return max((value for value in values if not math.isnan(value)), default=NAN)


class Worker:
    """A daemon thread that calls `turn` until it is closed; an exception is counted by `failed` and does not end it."""

    def __init__(self, name: str, turn: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._turn = turn
        self._failed = failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return self._stop.is_set()

    @property
    def running(self) -> bool:
        """Whether its thread is still there."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Pause between turns; true when the worker is to end."""
        return self._stop.wait(seconds)

    def close(self, timeout_s: float = 1.0, wake: Callable[[], None] | None = None) -> None:
        """End after the present turn; `wake` gets a turn that waits for something to return."""
        self._stop.set()
        if wake is not None:
            wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - a background thread that dies silently is worse than any of its errors
                self._failed(error)
                self._stop.wait(0.5)


def registry() -> Registry[Source]:
    """All sources in `collectors/sources`."""
    return Registry("collectors.sources", Source)  # type: ignore[type-abstract]
