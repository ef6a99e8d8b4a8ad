"""Two-stage detection as units of work: what a unit says depends on the unit alone, not on which worker has it, or how many there are.

First stage: one unit for each block of nodes (a partition of the ticks) aligns it and publishes a summary for each grid point. Second
stage: units that see all nodes and each run some of the detectors. Detectors compare nodes of a job, of a rack or of the cluster, so none
of them could be split by node and still say the same; by detector they are split exactly (docs/design/0008).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streams.detect import Pipeline
from streams.merge import BlockAligner, Merger
from streams.stage import Role
from trainwarden.config import Config
from trainwarden.records import Catalog, LogEvent, Record, StepReport, Summary, Tick, TopologyEvent
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import CATALOG, LOGS, STEPS, SUMMARIES, TICKS, TOPOLOGY

SHARES: dict[str, frozenset[str]] = {
    "relation": frozenset({"relation"}),
    "lines": frozenset({"dynamic_threshold"}),
    "trends": frozenset({"foretell", "seasonal_band"}),
    "links": frozenset({"mesh_links", "series_residual", "stale_series"}),
}
"""Detectors of a second-stage unit, about equally dear; what no unit names is the last one's, `REST`."""
REST = "jobs"


@dataclass(frozen=True)
class Unit:
    """A share of the work.

    Attributes
    ----------
    places
        What it reads: topics, or "topic/partition".
    share
        Which detectors it runs, empty for a block.
    """

    role: Role
    places: tuple[str, ...]
    share: str = ""

    @property
    def correlates(self) -> bool:
        """Whether the cluster's correlator is with this unit."""
        return self.share == REST

    def pipeline(self, config: Config, metrics: Metrics) -> Pipeline:
        """The unit's computation."""
        aligner = Merger if self.share else BlockAligner
        return Pipeline(config, metrics=metrics, aligner=aligner, only=self.runs)

    def runs(self, detector: str) -> bool:
        """Whether a detector is this unit's."""
        if self.share == REST:
            return not any(detector in named for named in SHARES.values())
        return detector in SHARES.get(self.share, frozenset())


def units(blocks: int = TICKS.partitions) -> tuple[Unit, ...]:
    """All units of a cluster whose ticks lie in so many partitions, the dearest first."""
    shares = ("relation", "lines", REST, "trends", "links")
    return (*map(_share, shares), *map(_block, range(blocks)))


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
    return Unit(Role(f"block/{number}", reads, number), (f"{TICKS.name}/{number}", CATALOG.name, TOPOLOGY.name))


def _share(name: str) -> Unit:
    reads: dict[str, type[Record]] = {
        SUMMARIES.name: Summary,
        STEPS.name: StepReport,
        LOGS.name: LogEvent,
        TOPOLOGY.name: TopologyEvent,
    }
    return Unit(Role(f"share/{name}", reads), tuple(reads), name)
