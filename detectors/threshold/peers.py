"""What like devices of the same job do at the moment: what all of them do alike is no news about one of them.

Two things are taken for a job's doing. A movement: the median of what is left of the peers' values once their history is taken out. And a
job that moves as one (it stops, starts, waits): when most peers have left their usual place in the same direction, on most of the job's
nodes, the level that they have come to says where a series should lie, whatever its own level was before. A fault of a node, a leaf, a
rail or a rack strikes fewer than that, so it is not taken for the job's.

A drift is shared by fewer already. When a job stops and goes on, its lines have followed it down and follow it up again, and a series that
mostly rests (marked packets, retries) moves on some of the ports only, on others of them each moment. So a series that has lain to one side
of its place is no news while a quarter of its peers, on most of the nodes, have begun to lie there too.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import F32
from detectors.robust import median_of_known, medians_of_known
from detectors.state import Array
from detectors.threshold.lines import Lines
from trainwarden.clock import NS_PER_S
from trainwarden.topology import JobLayout, Topology

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
_DIGITS = re.compile(r"\d+")
_LEAST_PEERS, _LEAST_NODES = 3, 2
_ASKED = 63
"""The common movement of more peers than this is read off an even sample of them."""
_MOVED = np.float32(4.0)
"""Spreads from its usual place at which a peer counts as having left it."""
_SHARED = 0.25
"""Share of the peers that drift together when their job does; one rail of eight, or of four, is no more."""
_BEGUN = 0.2
"""Share of the way to its line at which a walk counts as a drift that has begun: one healthy series in forty is there."""
_MAD_TO_SIGMA = np.float32(1.4826)
_REMEMBERED_NS = 600 * NS_PER_S


class FellowsState(msgspec.Struct):
    """Job of each node, and since when (unix ns) a node is in none any more."""

    jobs: dict[str, str] = {}
    left_ns: dict[str, int] = {}


class Fellows:
    """Each node's job, that which it was in last included: a job that ends or begins anew is not placed on all its nodes at once."""

    def __init__(self, state: FellowsState | None = None) -> None:
        self.state = state or FellowsState()
        self._layouts: tuple[JobLayout, ...] | None = None

    def jobs(self, topology: Topology, at_ns: int) -> dict[str, str]:
        """Job by node; the same dict as before when nothing changed."""
        layouts, left_ns = topology.jobs(), self.state.left_ns
        over = bool(left_ns) and at_ns - min(left_ns.values()) > _REMEMBERED_NS
        if over or self._layouts is None or not _same(layouts, self._layouts):
            self._layouts = layouts
            self._take(layouts, at_ns)
        return self.state.jobs

    def _take(self, layouts: tuple[JobLayout, ...], at_ns: int) -> None:
        now = {node: layout.job for layout in layouts for node in layout.nodes}
        since = self.state.left_ns
        left = {node: since.get(node, at_ns) for node in self.state.jobs if node not in now}
        kept = {node: at for node, at in left.items() if at_ns - at <= _REMEMBERED_NS}
        self.state = FellowsState(now | {node: self.state.jobs[node] for node in kept}, kept)


def _same(some: Sequence[JobLayout], others: Sequence[JobLayout]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


@dataclass(frozen=True)
class Group:
    """Rows of like devices on nodes of one job, sorted by node; `starts` says where each node's begin, `asked` is an even sample."""

    rows: Ints
    starts: Ints
    asked: Ints
    span: slice | None
    """The rows as a slice where they lie together."""

    def moves(self, part: Flags, known: Flags) -> Flags:
        """Per column, whether most known peers are `part` of it, on most of the nodes known, two at least (rows × columns)."""
        return self.shares(part, known, 0.5)

    def shares(self, part: Flags, known: Flags, share: float) -> Flags:
        """Per column, whether more than this share of known peers are `part` of it, on most of the nodes known, two at least."""
        nodes = np.logical_or.reduceat(part, self.starts, axis=0).sum(axis=0)
        of = np.logical_or.reduceat(known, self.starts, axis=0).sum(axis=0)
        enough = part.sum(axis=0) > share * known.sum(axis=0)
        return np.asarray(enough & (2 * nodes > of) & (nodes >= _LEAST_NODES))


class Groups:
    """Who is whose peer in a family; made anew when its rows or the jobs change."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._made: tuple[int, dict[str, str]] | None = None
        self._groups: list[Group] = []

    def of(self, entities: Sequence[tuple[str, str]], changes: int, jobs: dict[str, str]) -> list[Group]:
        """Groups of three peers or more. `changes` grows whenever `entities` changed; `jobs` names each node's job."""
        if self._made is None or self._made != (changes, jobs):
            found: dict[tuple[str, str], list[int]] = {}
            for row in sorted(range(len(entities)), key=entities.__getitem__):
                node, device = entities[row]
                if node in jobs:
                    found.setdefault((jobs[node], self._like(device)), []).append(row)
            self._groups = [_group(rows, entities) for rows in found.values() if len(rows) >= _LEAST_PEERS]
            self._made = changes, jobs
        return self._groups

    def numbers(self, rows: int) -> Ints:
        """Number of each row's group among those that `of` gave last, -1 for rows without peers."""
        number = np.full(rows, -1, np.int64)
        for i, group in enumerate(self._groups):
            number[group.rows] = i
        return number

    def _like(self, device: str) -> str:
        """Kind of device. Bonds lead to networks of their own (management, storage), rails do not."""
        if self._family == "mesh":
            return "peer"
        return device if device.startswith("bond") else _DIGITS.sub("#", device)


def _group(rows: list[int], entities: Sequence[tuple[str, str]]) -> Group:
    nodes = [entities[row][0] for row in rows]
    starts = [i for i, node in enumerate(nodes) if i == 0 or node != nodes[i - 1]]
    every = -(-len(rows) // _ASKED)
    # an even stride would ask the same device of every node
    asked = rows[:: every | 1] if every > 1 else rows
    together = rows == list(range(rows[0], rows[0] + len(rows)))
    span = slice(rows[0], rows[0] + len(rows)) if together else None
    return Group(np.array(rows), np.array(starts), np.array(asked), span)


def common(lines: Lines, compared: F32, load: F32, phase: Array, groups: Sequence[Group]) -> F32 | None:
    """What peers do at this moment beyond what is expected of a series, rows × columns; None without peers."""
    if not groups:
        return None
    groups = sorted(groups, key=lambda group: len(group.asked))
    sizes = np.array([len(group.asked) for group in groups])
    starts = np.cumsum(sizes) - sizes
    asked = np.concatenate([group.asked for group in groups])
    surprise = compared[asked] - lines.expected(asked, load[asked], phase[asked])
    movements = _zero_unknown(_medians(surprise, sizes))
    far = np.minimum.reduceat(lines.breadth(asked), starts, axis=0) * _MOVED
    out = np.zeros(compared.shape, np.float32)
    for group, movement in zip(groups, movements, strict=True):
        out[group.span or group.rows] = movement
    moved = np.abs(movements) >= far
    for number in np.flatnonzero(moved.any(axis=1)).tolist():
        columns = np.flatnonzero(moved[number])
        _follow(lines, compared, load, phase, groups[number], columns, movements[number, columns], out)
    return out


def _medians(surprise: F32, sizes: Ints) -> F32:
    """Median of each group; their rows come one group after the other, and those with as many rows together."""
    kinds, first = np.unique(sizes, return_index=True)
    parts, start = [], 0
    for size, count in zip(kinds.tolist(), np.diff(np.append(first, len(sizes))).tolist(), strict=True):
        rows = surprise[start : start + size * count]
        parts.append(medians_of_known(rows.reshape(count, size, rows.shape[1])))
        start += size * count
    return np.concatenate(parts).astype(np.float32)


def _follow(
    lines: Lines, compared: F32, load: F32, phase: Array, group: Group, columns: Ints, movement: F32, out: F32
) -> None:
    """Put what peers explain of `columns` into `out` where the job moves as one: all but what lies beyond their level as well."""
    rows = group.rows
    grid = np.ix_(rows, columns)
    values = compared[grid]
    surprise = values - lines.expected(rows, load[rows], phase[rows], columns)
    known = np.isfinite(surprise) & (lines.state.places.seen[grid] >= lines.settings.warm_ticks)
    breadth = lines.breadth(rows, columns)
    far = breadth * _MOVED
    for moved in (known & (surprise >= far), known & (surprise <= -far)):
        alike = np.flatnonzero(group.moves(moved, known))
        if len(alike):
            left = _beyond_level(values[:, alike], moved[:, alike], breadth[:, alike])
            left = smaller(surprise[:, alike] - movement[alike], left)
            out[np.ix_(rows, columns[alike])] = _zero_unknown(surprise[:, alike] - left)


def drifts_shared(lines: Lines, pairs: Ints, groups: Sequence[Group], number: Ints) -> Flags:
    """Which of these series, (row, column) pairs that have shifted, do what a part of their peers that is too large for a fault does.

    `number` is each row's group (see `Groups.numbers`).
    """
    found = np.zeros(len(pairs), np.bool_)
    if not len(pairs):
        return found
    _, side = lines.state.shifts.score_of(pairs[:, 0], pairs[:, 1])
    own = number[pairs[:, 0]]
    for group, column, below in sorted(
        {(int(g), int(c), int(s)) for g, c, s in zip(own, pairs[:, 1], side, strict=True) if g >= 0}
    ):
        rows = groups[group].rows
        known = lines.state.places.seen[rows, column] >= lines.settings.warm_ticks
        begun = known & (lines.state.shifts.walk[below, rows, column] >= _BEGUN * lines.shift_line(rows, column))
        shared = groups[group].shares(begun[:, None], known[:, None], _SHARED)[0]
        found[(own == group) & (pairs[:, 1] == column) & (side == below)] = shared
    return found


def _beyond_level(values: F32, moved: Flags, breadth: F32) -> F32:
    """How far values lie from the level of the peers that moved; counted in the peers' spread there where that is wider than their own."""
    level = np.where(moved, values, np.float32(np.nan))
    middle = median_of_known(level).astype(np.float32)
    width = median_of_known(np.abs(level - middle)).astype(np.float32) * _MAD_TO_SIGMA
    return np.asarray((values - middle) * (breadth / np.maximum(breadth, width)))


def smaller(one: F32, other: F32) -> F32:
    """The value nearer to zero, 0 where they disagree in sign.

    Examples
    --------
    >>> smaller(np.array([2.0, -3.0, 1.0]), np.array([1.0, -4.0, -1.0])).tolist()
    [1.0, -3.0, 0.0]
    """
    up = np.maximum(np.minimum(one, other), np.float32(0.0))
    return np.asarray(up + np.minimum(np.maximum(one, other), np.float32(0.0)))


def _zero_unknown(values: F32) -> F32:
    values[~np.isfinite(values)] = 0.0
    return values
