"""Step reports as columns: one pass over the objects of a frame, shared by all detectors that read steps.

Reading an attribute of ten thousand objects costs a fraction of a millisecond in C and ten times that in a Python loop, so nothing in this
family loops over reports or rows. A column is made when it is first asked for, and kept for as long as the frame is the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, compress, groupby
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from detectors.base import Frame
from trainwarden.records import StepReport, StepRow

PHASES = {"": 0, "first": 1, "train": 2, "eval": 3, "checkpoint": 4}
OTHER_PHASE = 5
_SOME = 64
PLAIN_PHASES = (0, 2)

_recency = attrgetter("observed_at_ns", "seq")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
K = TypeVar("K")


class StepTable:
    """Rows of one job's reports, in the frame's order. All columns are per row and belong to one attempt (see `of_attempt`)."""

    def __init__(self, job: str, reports: Sequence[StepReport], former: StepTable | None = None) -> None:
        self.job = job
        self.reports = reports
        self._former_nodes = former.report_nodes if former is not None else []

    def nodes_by_rank(self, known: list[str]) -> list[str]:
        """`known` (node of each rank) with what the reports say: the same list when they say nothing new. Other ranks are passed over."""
        if self.in_order and len(self.reports) == len(known):
            return known if self.report_nodes is known or self.report_nodes == known else self.report_nodes
        changed = list(known)
        for rank, node in zip(self.report_ranks.tolist(), self.report_nodes, strict=True):
            if 0 <= rank < len(changed):
                changed[rank] = node
        return known if changed == known else changed

    @cached_property
    def one_step(self) -> bool:
        """Whether the table holds one row of every rank from 0 on, in order, all of one step: what a large job sends each tick."""
        return bool(self._singles) and self.in_order and bool((self.step == self.step[0]).all())

    @cached_property
    def attempts(self) -> tuple[int, ...]:
        """Attempts in the table, ascending."""
        return tuple(sorted(set(map(attrgetter("attempt"), self.reports))))

    @cached_property
    def world(self) -> int:
        """Number of ranks, as the newest report says; what the ranks need when it does not say."""
        newest: int = self.reports[0].world if len(self.worlds) == 1 else max(self.reports, key=_recency).world
        return newest or int(self.report_ranks.max()) + 1

    @cached_property
    def report_ranks(self) -> Ints:
        """Rank of each report."""
        return _ints(map(attrgetter("rank"), self.reports), len(self.reports))

    @cached_property
    def report_nodes(self) -> list[str]:
        """Node of each report: the very list of the last frame where nothing changed, so nobody may alter it."""
        found: list[str] = list(map(attrgetter("node"), self.reports))
        return self._former_nodes if found == self._former_nodes else found

    @cached_property
    def rows(self) -> list[StepRow]:
        """All rows."""
        return self._singles or list(chain.from_iterable(map(attrgetter("rows"), self.reports)))

    @cached_property
    def _singles(self) -> list[StepRow]:
        """The rows when every report has exactly one, else nothing."""
        try:
            return [row for (row,) in map(attrgetter("rows"), self.reports)]
        except ValueError:
            return []

    @cached_property
    def rank(self) -> Ints:
        """Rank of each row."""
        if self._singles:
            return self.report_ranks
        counts = _ints(map(len, map(attrgetter("rows"), self.reports)), len(self.reports))
        return np.repeat(self.report_ranks, counts)

    @cached_property
    def started_ns(self) -> Ints:
        """Starts of some rows, enough to say when a step began: all, or of a whole step of a large job a few spread over the ranks."""
        return self._some("started_at_ns", np.dtype(np.int64))

    def sampled(self, field: str) -> Ints:
        """An integer column of the same rows as `started_ns`."""
        return self._some(field, np.dtype(np.int64))

    @property
    def some(self) -> slice:
        """Which rows `started_ns` holds."""
        return slice(None, None, max(1, len(self.rows) // _SOME)) if self.one_step else slice(None)

    def says(self, field: str) -> bool:
        """Whether a float column has a number in it; of a whole step of a large job a few rows spread over the ranks are asked."""
        return bool(np.isfinite(self._some(field, np.dtype(np.float64))).any())

    def _some(self, field: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        rows = self.rows[self.some]
        return np.fromiter(map(attrgetter(field), rows), dtype, len(rows))

    @cached_property
    def step(self) -> Ints:
        """Step number of each row."""
        return self.whole("step")

    @cached_property
    def phase(self) -> Ints:
        """Phase of each row, a number of `PHASES` (unknown names: `OTHER_PHASE`)."""
        numbers = {name: PHASES.get(name, OTHER_PHASE) for name in set(map(attrgetter("phase"), self.rows))}
        if len(numbers) == 1:
            return np.full(len(self.rows), next(iter(numbers.values())), dtype=np.int64)
        return _ints(map(numbers.__getitem__, map(attrgetter("phase"), self.rows)), len(self.rows))

    def number(self, field: str) -> Floats:
        """A float column, milliseconds or as `StepRow` says; made once."""
        return self._column(field, np.dtype(np.float64))

    def whole(self, field: str) -> Ints:
        """An integer column; made once."""
        return self._column(field, np.dtype(np.int64))

    def flag(self, field: str) -> NDArray[np.bool_]:
        """A boolean column; made once."""
        return self._column(field, np.dtype(np.bool_))

    def of_attempt(self, attempt: int, world: int = 0) -> StepTable:
        """The part of one attempt (and, with `world`, of the reports that speak of so many ranks or of no number)."""
        if self.attempts == (attempt,) and (not world or self.worlds <= {world, 0}):
            return self
        keep = [r.attempt == attempt and (not world or r.world in (0, world)) for r in self.reports]
        return StepTable(self.job, list(compress(self.reports, keep)))

    def every(self, stride: int) -> StepTable:
        """Only the reports of every `stride`-th rank."""
        return (
            self if stride == 1 else StepTable(self.job, list(compress(self.reports, self.report_ranks % stride == 0)))
        )

    @cached_property
    def worlds(self) -> set[int]:
        """Numbers of ranks that the reports speak of."""
        return set(map(attrgetter("world"), self.reports))

    @cached_property
    def in_order(self) -> bool:
        """Whether report i is rank i's."""
        return bool(np.array_equal(self.report_ranks, np.arange(len(self.reports))))

    def kept(self, name: str, make: Callable[[StepTable], K]) -> K:
        """Something derived from the table, made once."""
        if name not in self._derived:
            self._derived[name] = make(self)
        found: K = self._derived[name]
        return found

    @cached_property
    def _derived(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        return {}

    def _column(self, field: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        known = self._columns.get(field)
        if known is None:
            known = self._columns[field] = np.fromiter(map(attrgetter(field), self.rows), dtype, len(self.rows))
        return known


def _ints(values: Iterable[int], count: int) -> Ints:
    return np.fromiter(values, np.int64, count)


_newest: list[tuple[Any, dict[str, StepTable]]] = []


def tables_of(frame: Frame) -> dict[str, StepTable]:
    """The frame's step reports by job, jobs in order of first appearance.

    The tables of the newest frame are kept so that the next detector finds its columns made: a memo of a pure function, no state.
    """
    if not _newest or _newest[0][0] is not frame.steps:
        former = _newest[0][1] if _newest and _newest[0][1] else {}
        _newest[:] = [(frame.steps, _split(frame.steps, former))]
    return _newest[0][1]


def _split(reports: tuple[StepReport, ...], former: dict[str, StepTable]) -> dict[str, StepTable]:
    jobs = set(map(attrgetter("job"), reports))
    if len(jobs) <= 1:
        return {job: StepTable(job, reports, former.get(job)) for job in jobs}
    grouped: dict[str, list[StepReport]] = {}
    for job, run in groupby(reports, attrgetter("job")):
        grouped.setdefault(job, []).extend(run)
    return {job: StepTable(job, members, former.get(job)) for job, members in grouped.items()}
