"""Two-stage detection as units of work: what a unit says depends on the unit alone, not on which worker has it, or how many there are.

First stage: one unit for each block of nodes (a partition of the ticks) aligns it and publishes a summary for each grid point. Second
stage: units that see all nodes and each run some of the detectors. Detectors compare nodes of a job, of a rack or of the cluster, so none
of them could be split by node and still say the same; by detector they are split exactly (docs/design/0008).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from streams.detect import Pipeline
from streams.merge import BlockAligner, Merger
from streams.stage import Role
from trainwarden.config import Config
from trainwarden.errors import UnavailableError
from trainwarden.records import Catalog, LogEvent, Record, StepReport, Summary, Tick, TopologyEvent
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import CATALOG, EVENTS, LOGS, STEPS, SUMMARIES, TICKS, TOPOLOGY, UNITS

SHARES: dict[str, frozenset[str]] = {
    "relation": frozenset({"relation"}),
    "lines": frozenset({"dynamic_threshold"}),
    "trends": frozenset({"foretell", "seasonal_band"}),
    "links": frozenset({"mesh_links", "series_residual", "stale_series"}),
}
"""Detectors of a second-stage unit, about equally dear; what no unit names is the last one's, `REST`."""
REST = "jobs"


DECK = (
    "share/relation",
    "share/lines",
    "block/0",
    "block/1",
    "block/2",
    f"share/{REST}",
    "block/3",
    "share/links",
    "share/trends",
)
"""Units of the first partitions of the unit topic; further blocks follow."""


class UnitMetrics(Metrics):
    """Self-metrics of a worker's part: each carries the name of the unit, and goes with it."""

    def __init__(self, unit: str) -> None:
        super().__init__("worker")
        self._unit = unit

    def _key(self, name: str, labels: Mapping[str, str]) -> Any:
        return super()._key(name, {**labels, "unit": self._unit})


@dataclass(frozen=True)
class Unit:
    """A share of the work.

    Attributes
    ----------
    places
        What it reads: topics, or "topic/partition".
    share
        Which detectors it runs, empty for a block.
    blocks
        How many blocks a share puts together; 0: it is not known.
    """

    role: Role
    places: tuple[str, ...]
    share: str = ""
    blocks: int = 0

    @property
    def name(self) -> str:
        """Name of the unit in cuts, snapshots and metrics."""
        return self.role.owner

    @property
    def correlates(self) -> bool:
        """Whether the cluster's correlator is with this unit."""
        return self.share == REST

    def pipeline(self, config: Config, metrics: Metrics) -> Pipeline:
        """The unit's computation."""
        aligner = partial(Merger, blocks=self.blocks) if self.share else BlockAligner
        return Pipeline(config, metrics=metrics, aligner=aligner, only=self.runs)

    def runs(self, detector: str) -> bool:
        """Whether a detector is this unit's."""
        if self.share == REST:
            return not any(detector in named for named in SHARES.values())
        return detector in SHARES.get(self.share, frozenset())


def units(blocks: int = TICKS.partitions) -> tuple[Unit, ...]:
    """All units of a cluster whose ticks lie in so many partitions, the dearest first."""
    shares = ("relation", "lines", REST, "trends", "links")
    return (*(_share(name, blocks) for name in shares), *map(_block, range(blocks)))


def deck(blocks: int, partitions: int) -> tuple[Unit, ...]:
    """The unit of each partition of the unit topic; partitions beyond the last unit have none.

    A partition keeps its unit when partitions are added to the ticks. The order is one in which two workers have about the same to do,
    whether partitions are dealt to them in turn or a second one takes over the first half of what the first one had.

    Raises
    ------
    UnavailableError
        There are fewer partitions than units.

    Examples
    --------
    >>> [unit.name for unit in deck(4, 9)]  # doctest: +NORMALIZE_WHITESPACE
    ['share/relation', 'share/lines', 'block/0', 'block/1', 'block/2', 'share/jobs', 'block/3', 'share/links', 'share/trends']
    """
    found = {unit.name: unit for unit in units(blocks)}
    if partitions < len(found):
        raise UnavailableError(
            f"topic {UNITS.name} has {partitions} partitions, {len(found)} are needed, one for each unit: {len(found) - blocks} shares, "
            f"and a block for each of the {blocks} partitions of {TICKS.name}: add them "
            f"(kafka-topics.sh --alter --topic {UNITS.name} --partitions {len(found)})"
        )
    first = [found.pop(name) for name in DECK if name in found]
    return (*first, *found.values())


def dealt(work: Sequence[Unit], workers: int) -> list[list[Unit]]:
    """The units of each worker: dealt like cards, the dear ones first.

    Examples
    --------
    >>> [[unit.role.owner for unit in hand] for hand in dealt(units(2), 2)]
    [['share/relation', 'share/jobs', 'share/links', 'block/1'], ['share/lines', 'share/trends', 'block/0']]
    """
    return [list(work[number::workers]) for number in range(workers)]


def _block(number: int) -> Unit:
    reads: dict[str, type[Record]] = {TICKS.name: Tick, CATALOG.name: Catalog, TOPOLOGY.name: TopologyEvent}
    refuses = {TICKS.name, *((CATALOG.name, TOPOLOGY.name) if number == 0 else ())}
    role = Role(f"block/{number}", reads, number, frozenset(refuses))
    return Unit(role, (f"{TICKS.name}/{number}", CATALOG.name, TOPOLOGY.name))


def _share(name: str, blocks: int) -> Unit:
    reads: dict[str, type[Record]] = {
        SUMMARIES.name: Summary,
        STEPS.name: StepReport,
        EVENTS.name: LogEvent,
        LOGS.name: LogEvent,
        TOPOLOGY.name: TopologyEvent,
    }
    refuses = (SUMMARIES.name, STEPS.name, EVENTS.name, LOGS.name, TICKS.name) if name == REST else ()
    return Unit(Role(f"share/{name}", reads, refuses=frozenset(refuses)), tuple(reads), name, blocks)
