"""Which rows of the process family are which ranks of which job.

Under faults nodes come and go each second, and with them ten thousand rows: what an entity is, is worked out once while the jobs stay the
same, and what was found for the rows before the newest change is kept.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from detectors.numbers import whole_number
from detectors.steps.processes import Ints
from trainwarden.topology import JobLayout

Entities = tuple[tuple[str, str], ...]
_UNKNOWN, _NOBODY = -2, -1
_MOST_OVER = 8
"""All is worked out anew when there have been so many times as many layouts, or processes, as there are."""


@dataclass(frozen=True)
class Rows:
    """Rows of the processes that are this job's ranks where its layout says they are."""

    job: str
    attempt: int
    rows: Ints
    ranks: Ints
    nodes: list[str]


class Seats:
    """Ranks by row; nothing of it is state."""

    def __init__(self) -> None:
        self._layouts: tuple[JobLayout, ...] = ()
        self._found: list[tuple[Entities, list[Rows]]] = []
        self._forget()

    def of(self, entities: Entities, layouts: Sequence[JobLayout]) -> list[Rows]:
        """Rows of each job that has any, in the order of the layouts: the same list as before where nothing changed."""
        if len(layouts) != len(self._layouts) or not all(map(operator.is_, layouts, self._layouts)):
            self._follow(tuple(layouts))
        if len(self._seat) > _MOST_OVER * (len(entities) + len(self._layouts) + 16):
            self._forget()
            now, self._layouts = self._layouts, ()
            self._follow(now)
        for known, found in self._found:
            if known is entities or known == entities:
                return found
        self._found = [(entities, self._made(entities)), *self._found[:1]]
        return self._found[0][1]

    def _forget(self) -> None:
        self._all: list[JobLayout] = []
        """Layouts by number, those that are over included."""
        self._jobs_on: dict[str, list[int]] = {}
        self._known_on: dict[str, list[tuple[str, str]]] = {}
        self._seat: dict[tuple[str, str], int] = {}
        self._taken: list[tuple[int, int]] = []
        """Layout's number and rank of each seat."""
        self._further: dict[int, list[int]] = {}
        """Seats of a process that is a rank of several jobs, besides its first."""
        self._found = []

    def _follow(self, layouts: tuple[JobLayout, ...]) -> None:
        """Only what is on nodes of a job that changed is looked at anew."""
        if len(self._all) > _MOST_OVER * (len(layouts) + 1):
            self._layouts = ()
            self._forget()
        before, now = set(map(id, self._layouts)), set(map(id, layouts))
        over = [number for number, layout in enumerate(self._all) if id(layout) in before - now]
        new = [layout for layout in layouts if id(layout) not in before]
        for node in {node for layout in (*(self._all[number] for number in over), *new) for node in layout.nodes}:
            self._jobs_on[node] = [number for number in self._jobs_on.get(node, ()) if number not in over]
            for entity in self._known_on.pop(node, ()):
                del self._seat[entity]
        for layout in new:
            for node in layout.nodes:
                self._jobs_on[node].append(len(self._all))
            self._all.append(layout)
        self._layouts, self._found = layouts, []

    def _made(self, entities: Entities) -> list[Rows]:
        seats = np.fromiter(map(self._seat.get, entities, repeat(_UNKNOWN)), np.int64, len(entities))
        for row in np.flatnonzero(seats == _UNKNOWN).tolist():
            seats[row] = self._learn(entities[row])
        rows = np.flatnonzero(seats >= 0)
        seats = seats[rows]
        if self._further:
            more = [(row, seat) for row, first in zip(rows.tolist(), seats.tolist(), strict=True)
                    for seat in self._further.get(first, ())]  # fmt: skip
            rows = np.append(rows, np.array([row for row, _ in more], np.int64))
            seats = np.append(seats, np.array([seat for _, seat in more], np.int64))
        return self._by_job(entities, rows, seats)

    def _by_job(self, entities: Entities, rows: Ints, seats: Ints) -> list[Rows]:
        if not len(rows):
            return []
        number, rank = np.array(self._taken, np.int64)[seats].T
        places = {id(layout): place for place, layout in enumerate(self._layouts)}
        job = np.array([places.get(id(layout), -1) for layout in self._all], np.int64)[number]
        order = np.lexsort((rows, job))
        rows, job, rank = rows[order], job[order], rank[order]
        ends = np.append(np.flatnonzero(np.diff(job)) + 1, len(job)).tolist()
        found = []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            layout, mine = self._layouts[int(job[start])], rows[start:end]
            nodes = [entities[row][0] for row in mine.tolist()]
            found.append(Rows(layout.job, layout.attempt, mine, rank[start:end], nodes))
        return found

    def _learn(self, entity: tuple[str, str]) -> int:
        """The (first) seat of an entity."""
        node, device = entity
        rank = whole_number(device.removeprefix("rank"), -1)
        jobs = [n for n in self._jobs_on.get(node, ()) if self._all[n].ranks.get(rank, ("", ""))[0] == node]
        first = len(self._taken)
        self._taken += [(number, rank) for number in jobs]
        if len(jobs) > 1:
            self._further[first] = list(range(first + 1, first + len(jobs)))
        self._known_on.setdefault(node, []).append(entity)
        self._seat[entity] = first if jobs else _NOBODY
        return self._seat[entity]
