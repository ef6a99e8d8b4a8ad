"""The tick grid: which cells are open, whom they wait for, when they close."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detectors.base import AlignedTick
from streams.matrices import Catalogs, family_matrices
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Gap, Tick, decode, encode

GIVE_UP_CELLS = 5
"""A node absent from so many cells in a row is still expected, but nobody waits for it."""
FEW_IN, HURRY_NS = 200, NS_PER_S // 2
"""For one node in so many, all the others are kept waiting no longer than this."""
WAITED_FOR_NS = 60 * NS_PER_S
"""Whose tick came after its cell had closed is on its way and not gone: for so long nobody hurries past it. By then its clock or its way is
known (`streams.beats`)."""
STALL_NS = 10 * NS_PER_S
"""When nothing at all arrives, nobody is silent for so long: a broker that pauses is not a cluster that died."""
HUSH = 1.5
"""Intervals without a word of anybody after which it is the way to us."""


@dataclass
class _Node:
    """`boot`, `seq`: its newest tick; ticks numbered without a hole lie in cells from `since_cell` to `told_cell`."""

    last_cell: int
    arrived_at_ns: int
    absent_cells: int = 0
    skewed: bool = False
    boot: str = ""
    seq: int = 0
    since_cell: int = 0
    told_cell: int = 0

    def follow(self, tick: Tick, cell: int) -> None:
        """Take a tick's number in. One that comes after its successor fills no hole here: its cell has it, or waited for it."""
        if not tick.boot_id:
            return
        if tick.boot_id == self.boot and tick.seq == self.seq + 1 and cell >= self.told_cell:
            self.seq, self.told_cell = tick.seq, cell
        elif tick.boot_id != self.boot or tick.seq > self.seq:
            self.boot, self.seq, self.since_cell, self.told_cell = tick.boot_id, tick.seq, cell, cell

    def has_passed(self, cell: int) -> bool:
        """Whether it made no tick for this cell: the one before and the one after follow each other by number."""
        return self.since_cell < cell < self.told_cell


@dataclass
class Grid:
    """Cells of `interval_ms`; a tick observed from a quarter interval before a grid point belongs to that point.

    Closing rule: a cell closes when every node waited for is in or is known to have made no tick for it (a collector that slept
    through it: the numbers of its ticks go on without a hole), or when event time is `lateness_ms` past it and each missing node
    either reported a later cell or has been silent for `lateness_ms` of arrival time (a partition that is still being fetched is not
    silence). Where nobody at all is heard for one and a half intervals (the broker is away, or this worker was), nobody is silent before
    as much time again, ten seconds at most, has passed since the first came back: each collector tries again by its own clock. In a large
    cluster, where some tick is always late, a cell that lacks one node in 200 or fewer is kept open for them half a second; not past a node
    whose tick came too late for that in the last minute.
    """

    interval_ms: int
    lateness_ms: int
    forget_s: float
    _cells: dict[int, dict[str, Tick]] = field(default_factory=dict)
    _nodes: dict[str, _Node] = field(default_factory=dict)
    _next: int | None = None
    _event_ns: int = 0
    _event_arrived_ns: int = 0
    _newest_ns: int = 0
    _resumed_ns: int = 0
    _patience_ns: int = 0
    _nearly: tuple[int, int] = (0, 0)
    """The cell that lacks only a few, and since when that is so."""
    _forgotten: set[str] = field(default_factory=set)
    _overtaken: dict[str, int] = field(default_factory=dict)
    """Nodes whose tick came after its cell had closed, and which cell was the next then."""
    just_closed: dict[int, dict[str, Tick]] = field(default_factory=dict)
    """The ticks of the cells that were closed last, by time of the cell and node."""

    @property
    def interval_ns(self) -> int:
        return self.interval_ms * NS_PER_MS

    @property
    def _forget_cells(self) -> int:
        return int(self.forget_s * 1000 / self.interval_ms)

    @property
    def _hush_ns(self) -> int:
        return int(HUSH * self.interval_ns)

    def point_ns(self, event_ns: int) -> int:
        """Time of the grid point that something at this time belongs to."""
        return (event_ns + self.interval_ns // 4) // self.interval_ns * self.interval_ns

    def place(self, tick: Tick, correction_ns: int, now_ns: int, later: int = 0) -> bool:
        """Put a tick into its cell, or so many `later`; False when that has closed. Of two of a node in a cell the last observed wins."""
        event_ns = tick.observed_at_ns + correction_ns
        cell = self.point_ns(event_ns) // self.interval_ns + later
        node = self._nodes.get(tick.node)
        if node is None:
            node = self._nodes[tick.node] = _Node(cell, now_ns)
        node.follow(tick, cell)
        node.last_cell, node.arrived_at_ns, node.absent_cells = max(node.last_cell, cell), now_ns, 0
        node.skewed = correction_ns != 0
        self._forgotten.discard(tick.node)
        self._note_pause(now_ns)
        self._advance(event_ns, now_ns)
        if self._next is not None and cell < self._next:
            if self._next - cell <= GIVE_UP_CELLS:  # what waited for longer (a spool) tells nothing about its way now
                self._overtaken[tick.node] = self._next
            return False
        members = self._cells.setdefault(cell, {})
        if tick.node not in members or members[tick.node].observed_at_ns <= tick.observed_at_ns:
            members[tick.node] = tick
        return True

    def close(
        self, now_ns: int, extra_nodes: set[str], catalogs: Catalogs, waiting: Set[str] = frozenset()
    ) -> list[AlignedTick]:
        """Every cell that is due, oldest first. `extra_nodes` are expected though they may never have reported; of those who are `waiting`
        to be believed it is not known whether they are silent."""
        closed: list[AlignedTick] = []
        self.just_closed = {}
        while (cell := self._due(now_ns)) is not None:
            closed.append(self._emit(cell, extra_nodes, catalogs, waiting))
            self._next = cell + 1
        return closed

    def forget(self, node: str) -> None:
        """The node was removed: nobody expects it any more."""
        self._nodes.pop(node, None)
        self._overtaken.pop(node, None)

    @property
    def idle(self) -> bool:
        """Whether no node is expected and nothing waits."""
        return not self._nodes and not self._cells

    @property
    def closed_until_ns(self) -> int:
        """Time of the newest closed cell; 0 before the first."""
        return (self._next - 1) * self.interval_ns if self._next is not None else 0

    def snapshot(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "cells": [[cell, [encode(tick) for tick in members.values()]] for cell, members in self._cells.items()],
            "nodes": {
                name: [n.last_cell, n.arrived_at_ns, n.absent_cells, n.skewed] for name, n in self._nodes.items()
            },
            "words": {name: [n.boot, n.seq, n.since_cell, n.told_cell] for name, n in self._nodes.items() if n.boot},
            "next": self._next,
            "event": [self._event_ns, self._event_arrived_ns, self._newest_ns],
            "resumed": [self._resumed_ns, self._patience_ns],
            "nearly": list(self._nearly),
            "forgotten": sorted(self._forgotten),
            "overtaken": self._overtaken,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take `snapshot`'s containers over."""
        self._cells = {cell: {(tick := decode(p)).node: tick for p in payloads} for cell, payloads in state["cells"]}
        words = state.get("words", {})  # an older worker did not follow numbers
        self._nodes = {name: _Node(*values, *words.get(name, ())) for name, values in state["nodes"].items()}
        self._next = state["next"]
        self._event_ns, self._event_arrived_ns, self._newest_ns = state["event"]
        self._resumed_ns, self._patience_ns = state.get("resumed", (0, 0))  # an older worker followed no pauses
        cell, since_ns = state.get("nearly", (0, 0))
        self._nearly = cell, since_ns
        self._forgotten = set(state["forgotten"])
        self._overtaken = dict(state.get("overtaken", {}))  # an older worker hurried past everybody

    def _advance(self, event_ns: int, now_ns: int) -> None:
        # event time never lies before the newest tick: most ticks of a cell are seen to change nothing without asking how far it has moved
        if event_ns > self._event_ns and event_ns > self._event_at(now_ns):
            self._event_ns, self._event_arrived_ns = event_ns, now_ns

    def _note_pause(self, now_ns: int) -> None:
        pause_ns = now_ns - self._newest_ns if self._newest_ns else 0
        lateness_ns = self.lateness_ms * NS_PER_MS
        if pause_ns >= self._hush_ns:
            self._resumed_ns, self._patience_ns = now_ns, min(pause_ns, STALL_NS)
            for node in self._nodes.values():
                if self._newest_ns - node.arrived_at_ns < lateness_ns:
                    node.absent_cells = 0  # what was closed meanwhile was closed without everybody
        self._newest_ns = now_ns

    def _is_silent(self, node: _Node, now_ns: int) -> bool:
        if self._hush_ns <= now_ns - self._newest_ns < STALL_NS:
            return False
        if node.arrived_at_ns < self._resumed_ns:
            return now_ns - self._resumed_ns >= self._patience_ns
        return now_ns - node.arrived_at_ns >= self.lateness_ms * NS_PER_MS

    def _event_at(self, now_ns: int) -> int:
        """Event time: the newest tick, moved on with arrival time."""
        since_ns = max(0, now_ns - self._event_arrived_ns)
        newest_ns = self._newest_ns
        if now_ns - newest_ns < STALL_NS:
            since_ns = min(
                since_ns, max(0, newest_ns - self._event_arrived_ns) + self.lateness_ms * NS_PER_MS + self.interval_ns
            )
        return self._event_ns + since_ns

    def _due(self, now_ns: int) -> int | None:
        self._drop_forgotten()
        cell = self._first_open()
        if cell is None:
            return None
        members = self._cells.get(cell, {})
        missing = [
            (name, node)
            for name, node in self._nodes.items()
            if name not in members and node.absent_cells < GIVE_UP_CELLS and not node.has_passed(cell)
        ]
        if members and (not missing or self._kept_others_waiting(cell, missing, now_ns)):
            return cell
        over = self._event_at(now_ns) >= cell * self.interval_ns + self.lateness_ms * NS_PER_MS
        silent = all(node.last_cell > cell or self._is_silent(node, now_ns) for _, node in missing)
        return cell if over and silent else None

    def _kept_others_waiting(self, cell: int, missing: list[tuple[str, _Node]], now_ns: int) -> bool:
        if len(missing) * FEW_IN > len(self._nodes) or now_ns - self._resumed_ns < self._patience_ns:
            return False
        if any(self._is_on_its_way(name, cell) for name, _ in missing):
            return False
        if self._nearly[0] != cell:
            self._nearly = cell, now_ns
        return now_ns - self._nearly[1] >= HURRY_NS

    def _is_on_its_way(self, name: str, cell: int) -> bool:
        return name in self._overtaken and (cell - self._overtaken[name]) * self.interval_ns < WAITED_FOR_NS

    def _first_open(self) -> int | None:
        oldest = min(self._cells, default=self._next)
        if self._next is None or not self._nodes or (oldest is not None and oldest - self._next > self._forget_cells):
            self._next = oldest  # a hole longer than anybody is remembered has nothing to say
        return self._next if self._nodes else None

    def _drop_forgotten(self) -> None:
        if self._next is None:
            return
        oldest = self._next - self._forget_cells
        for name in [name for name, node in self._nodes.items() if node.last_cell < oldest]:
            del self._nodes[name]
            self._overtaken.pop(name, None)
            self._forgotten.add(name)

    def _emit(self, cell: int, extra_nodes: set[str], catalogs: Catalogs, waiting: Set[str]) -> AlignedTick:
        members = self.just_closed[cell * self.interval_ns] = self._cells.pop(cell, {})
        for name, node in self._nodes.items():
            node.absent_cells = 0 if name in members else node.absent_cells + 1
        expected = {*self._nodes, *(extra_nodes - self._forgotten)} - waiting
        nodes = tuple(sorted(expected.union(members)))
        ticks = [members[name] for name in nodes if name in members]
        return AlignedTick(
            at_ns=cell * self.interval_ns,
            interval_ms=self.interval_ms,
            nodes=nodes,
            present=np.array([name in members for name in nodes], dtype=np.bool_),
            families=family_matrices(ticks, catalogs),
            gaps=self._gaps(ticks),
        )

    def _gaps(self, ticks: list[Tick]) -> dict[str, tuple[Gap, ...]]:
        found = {tick.node: tick.gaps for tick in ticks if tick.gaps}
        for tick in ticks:
            if tick.node in self._nodes and self._nodes[tick.node].skewed:
                found[tick.node] = (*tick.gaps, Gap("clock", "skew"))
        return found
