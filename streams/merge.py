"""The second stage's view: summaries of blocks put together to one frame for each grid point.

A frame here is a function of closed cells and not of arrival: its time is that of the latest block's cut, and steps, logs and topology go
with the first grid point that is not before them. So it is the same frame whoever made the summaries, on however many workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from detectors.base import AlignedTick, FamilyMatrix, Frame
from streams.align import Aligner, AlignSettings, Placed, canonical
from streams.matrices import Names, pack, unpack
from streams.speakers import each_node_once, speakers_of, words_of
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import LogEvent, Sheet, StepReport, Summary, Tick, TopologyEvent, decode, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import TICKS

PATIENCE_NS = 15 * NS_PER_S
"""A block whose worker died is with another one by then; its nodes are not said to be silent before."""
HEARD_BYTES, VALUE_BYTES = 8, 4
HELD_LIMIT = 200_000
"""Steps and logs that may wait for their grid point; beyond that all go with the next frame, whatever it is."""


@dataclass
class _Block:
    last_at_ns: int
    arrived_at_ns: int


@dataclass(frozen=True)
class _Held:
    """A record that waits for the grid point it belongs to: the first not before `due_ns`."""

    due_ns: int
    placed: Placed


def summary_of(
    block: int,
    cluster: str,
    tick: AlignedTick,
    now_ns: int,
    inferred: Iterable[TopologyEvent],
    ticks: Mapping[str, Tick],
) -> Summary:
    """One aligned tick of a block, for the second stage; `ticks` are those of the nodes that it was made of."""
    speakers = speakers_of(tick.nodes, ticks)
    return Summary(
        cluster=cluster,
        node=f"block/{block}",
        observed_at_ns=tick.at_ns,
        block=block,
        at_ns=tick.at_ns,
        closed_at_ns=now_ns,
        interval_ms=tick.interval_ms,
        nodes=tick.nodes,
        present=tick.present.astype(np.uint8).tobytes(),
        sheets=tuple(_sheet(tick.families[name]) for name in sorted(tick.families)),
        gaps=tuple(sorted(tick.gaps.items())),
        inferred=tuple(inferred),
        boots=speakers.boots,
        heard=speakers.heard,
        succeeds=speakers.succeeds,
    )


def _sheet(matrix: FamilyMatrix) -> Sheet:
    rows: dict[str, list[str]] = {}
    for node, device in matrix.entities:
        rows.setdefault(node, []).append(device)
    values = np.ascontiguousarray(matrix.values, dtype="<f4").tobytes()
    told = tuple((node, tuple(devices)) for node, devices in rows.items())
    return Sheet(matrix.family, matrix.metrics, tuple(sorted(matrix.states)), told, values)


def misfit_of_summary(part: Summary) -> str:
    """Why the pieces of a summary do not fit each other, and could not be put together with those of others; empty when they do."""
    told = {
        "present": (len(part.present), {len(part.nodes)}), "boots": (len(part.boots), {0, len(part.nodes)}),
        "heard": (len(part.heard), {HEARD_BYTES * len(part.boots)}), "succeeds": (len(part.succeeds), {0, len(part.boots)}),
        "different nodes": (len({*part.nodes}), {len(part.nodes)}),
    }  # fmt: skip
    for sheet in part.sheets:
        rows = sum(len(devices) for _, devices in sheet.rows)
        told[f"bytes of {sheet.family}"] = len(sheet.values), {VALUE_BYTES * rows * len(sheet.metrics)}
        told[f"metrics of {sheet.family}"] = min(1, len(sheet.metrics)), {1}
    for name, (found, fitting) in told.items():
        if found not in fitting:
            wanted = " or ".join(map(str, sorted(fitting)))
            return (
                f"a summary of {len(part.nodes)} nodes by {part.node or 'nobody'} has {found} {name}, expected {wanted}"
            )
    return ""


class BlockAligner(Aligner):
    """An aligner of some of the nodes: who else is expected, because a job is placed there, is known where all blocks come together."""

    def _placed_nodes(self) -> set[str]:
        return set()

    def ticks_of(self, at_ns: int) -> Mapping[str, Tick]:
        """The nodes' own ticks of a cell that the last cut closed."""
        return self._grid.just_closed.get(at_ns, {})


class Merger(Aligner):
    """An aligner whose ticks are made of summaries. One cut gives one frame; `more` says whether another one is due at once.

    `blocks` is how many there are: a cold start waits for the first word of each, since it cannot know which of them have nodes.
    """

    def __init__(self, settings: AlignSettings, metrics: Metrics | None = None, blocks: int = 0) -> None:
        super().__init__(settings, metrics)
        self._expected_blocks = blocks
        self._names = Names()
        self._blocks: dict[int, _Block] = {}
        self._cells: dict[int, dict[int, Summary]] = {}
        self._opened_ns: dict[int, int] = {}
        self._members: dict[int, tuple[str, ...]] = {}
        self._gone: set[str] = set()
        self._held: list[_Held] = []
        self._closed_ns = 0
        self._frame_ns = 0
        self._spoke_ns = 0

    @property
    def closed_until_ns(self) -> int:
        """Time of the newest closed cell; 0 before the first."""
        return self._closed_ns

    def cut(self, now_ns: int) -> Frame | None:
        """The oldest cell that is due, with what belongs to it; without one, what nobody's ticks came for."""
        pending, self._pending = sorted(self._pending, key=canonical), []
        self.positions = dict(self._read_to)
        for placed in pending:
            self._admit(placed, now_ns)
        if (at_ns := self._due(now_ns)) is not None:
            self._spoke_ns = now_ns
            return self._emit(at_ns)
        if self._cells or not (self._held or self._blocks):
            return None  # cells that wait for a block are due within its patience, and what is held goes with them
        self._spoke_ns = self._spoke_ns or now_ns
        quiet_ns = self.settings.lateness_ms * NS_PER_MS + self._interval_ns
        if now_ns - self._spoke_ns < quiet_ns:
            return None
        self._spoke_ns = now_ns
        return self._frame(now_ns, now_ns - quiet_ns, [])

    def more(self, now_ns: int) -> bool:
        """Whether another cell is due now."""
        return not self._pending and self._due(now_ns) is not None

    def snapshot(self) -> bytes:
        """State as of the last cut."""
        return pack({
            "aligner": super().snapshot(),
            "blocks": [[block, b.last_at_ns, b.arrived_at_ns] for block, b in self._blocks.items()],
            "cells": [[self._opened_ns[at], [encode(s) for s in cell.values()]] for at, cell in self._cells.items()],
            "held": [[h.due_ns, h.placed.topic, h.placed.partition, h.placed.offset, encode(h.placed.record)] for h in self._held],
            "members": [list(self._members.items()), sorted(self._gone)],
            "closed": [self._closed_ns, self._frame_ns, self._spoke_ns],
        })  # fmt: skip

    def restore(self, payload: bytes) -> None:
        """Take `snapshot`'s state over."""
        state: dict[str, Any] = unpack(payload)
        super().restore(state["aligner"])
        self._blocks = {block: _Block(last_at_ns, arrived) for block, last_at_ns, arrived in state["blocks"]}
        self._cells, self._opened_ns = {}, {}
        for opened_ns, payloads in state["cells"]:
            found: list[Summary] = [decode(part) for part in payloads]
            self._cells[found[0].at_ns] = {summary.block: summary for summary in found}
            self._opened_ns[found[0].at_ns] = opened_ns
        self._held = [
            _Held(due_ns, Placed(topic, partition, offset, decode(part)))
            for due_ns, topic, partition, offset, part in state["held"]
        ]
        members, gone = state["members"]
        self._members, self._gone = {block: tuple(nodes) for block, nodes in members}, set(gone)
        self._closed_ns, self._frame_ns, self._spoke_ns = state["closed"]

    @property
    def _interval_ns(self) -> int:
        return self.settings.interval_ms * NS_PER_MS

    def _admit(self, placed: Placed, now_ns: int) -> None:
        if not isinstance(placed.record, Summary):
            if self._first_time(placed) or isinstance(placed.record, TopologyEvent):
                observed_ns = placed.record.observed_at_ns
                ahead = observed_ns > now_ns + self.settings.lateness_ms * NS_PER_MS
                self._held.append(_Held(now_ns if ahead else observed_ns, placed))
            return
        summary = placed.record
        known = self._blocks.setdefault(summary.block, _Block(summary.at_ns, now_ns))
        known.last_at_ns, known.arrived_at_ns = max(known.last_at_ns, summary.at_ns), now_ns
        if summary.at_ns <= self._closed_ns:
            self._metrics.count("tw_summaries_late_total", block=str(summary.block))
            return
        # a successor repeats what its predecessor said: the first is as good as the second
        self._cells.setdefault(summary.at_ns, {}).setdefault(summary.block, summary)
        self._opened_ns.setdefault(summary.at_ns, now_ns)

    def _due(self, now_ns: int) -> int | None:
        at_ns = min(self._cells, default=None)
        if at_ns is None:
            return None
        waited_ns = now_ns - self._opened_ns[at_ns]
        if not self._closed_ns and waited_ns < self._first_wait_ns:
            return None
        forget_ns = int(self.settings.forget_s * NS_PER_S)
        here = self._cells[at_ns]
        # a block that is past this cell has nothing for it
        missing = [
            number
            for number, block in self._blocks.items()
            if number not in here and block.last_at_ns < at_ns and now_ns - block.arrived_at_ns < forget_ns
        ]
        return at_ns if not missing or waited_ns >= PATIENCE_NS else None

    @property
    def _first_wait_ns(self) -> int:
        """How long the very first cell stays open: until it is known which blocks speak."""
        if not self._expected_blocks:
            return self.settings.lateness_ms * NS_PER_MS
        return PATIENCE_NS if len(self._blocks) < self._expected_blocks else 0

    def _emit(self, at_ns: int) -> Frame:
        cell = self._cells.pop(at_ns)
        del self._opened_ns[at_ns]
        self._closed_ns = at_ns
        parts = [cell[block] for block in sorted(cell)]
        return self._frame(max(part.closed_at_ns for part in parts), at_ns, parts)

    def _frame(self, now_ns: int, until_ns: int, parts: list[Summary]) -> Frame:
        self._frame_ns = max(now_ns, self._frame_ns + 1)  # no two frames are of one moment
        ticks = [Placed(TICKS.name, part.block, -1, tick) for part in parts for tick in words_of(part)]
        said = sorted(self._heard([*ticks, *self._release(until_ns)], self._frame_ns), key=canonical)
        parts = each_node_once(parts, self._voices.boot)
        for part in parts:
            for event in part.inferred:
                self._apply_owned(event)
        self._learn(placed.record for placed in said)
        said = [placed for placed in said if not self._is_of_another(placed)]
        steps = tuple(placed.record for placed in said if isinstance(placed.record, StepReport))
        self._infer_placements(steps)
        logs = tuple(placed.record for placed in said if isinstance(placed.record, LogEvent))
        aligned = (self._tick(until_ns, parts),) if parts else ()
        return Frame(self._frame_ns, aligned, steps, logs, self.topology)

    def _release(self, until_ns: int) -> list[Placed]:
        """What belongs to a frame that ends at `until_ns`."""
        if len(self._held) > HELD_LIMIT:
            self._metrics.count("tw_records_hurried_total", len(self._held))
            until_ns = max(held.due_ns for held in self._held)
        ready = [held.placed for held in self._held if held.due_ns <= until_ns]
        self._held = [held for held in self._held if held.due_ns > until_ns]
        return ready

    def _apply_owned(self, event: TopologyEvent) -> None:
        self._own_topology()
        self._apply(event)

    def _tick(self, at_ns: int, parts: list[Summary]) -> AlignedTick:
        present = {n: bool(p) for part in parts for n, p in zip(part.nodes, part.present, strict=True)}
        present.update(dict.fromkeys(self._never_heard(parts) - present.keys(), False))
        nodes = tuple(sorted(present))
        sheets: dict[str, list[Sheet]] = {}
        for part in parts:
            for sheet in part.sheets:
                sheets.setdefault(sheet.family, []).append(sheet)
        return AlignedTick(
            at_ns=at_ns,
            interval_ms=parts[0].interval_ms,
            nodes=nodes,
            present=np.array([present[node] for node in nodes], dtype=np.bool_),
            families={family: _joined(sheets[family], self._names) for family in sorted(sheets)},
            gaps={node: gaps for part in parts for node, gaps in part.gaps},
        )

    def _never_heard(self, parts: list[Summary]) -> set[str]:
        """Nodes where a job is placed and nobody expects ticks from: not those forgotten, nor those of a block that is not heard."""
        for part in parts:
            self._gone |= set(self._members.get(part.block, ())).difference(part.nodes)
            self._gone.difference_update(part.nodes)
            self._members[part.block] = part.nodes
        here = {part.block for part in parts}
        unheard = {node for block, nodes in self._members.items() if block not in here for node in nodes}
        return self._placed_nodes() - self._gone - unheard


def _joined(sheets: list[Sheet], names: Names) -> FamilyMatrix:
    """Rows of all blocks, sorted by node; columns by name, in the order in which the blocks name them."""
    family = sheets[0].family
    metrics = tuple(dict.fromkeys(metric for sheet in sheets for metric in sheet.metrics))
    blocks = [(node, devices) for sheet in sheets for node, devices in sheet.rows]
    values = np.concatenate([_columns(sheet, metrics) for sheet in sheets])
    order = sorted(range(len(blocks)), key=lambda number: blocks[number][0])
    starts = np.concatenate(([0], np.cumsum([len(devices) for _, devices in blocks])))
    places = np.concatenate([np.arange(starts[number], starts[number + 1]) for number in order])
    entities = names.of(family, [blocks[number] for number in order])
    states = frozenset(state for sheet in sheets for state in sheet.states)
    return FamilyMatrix(family, entities, metrics, values[places], states)


def _columns(sheet: Sheet, metrics: tuple[str, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = np.frombuffer(sheet.values, dtype="<f4").reshape(-1, len(sheet.metrics)).astype(np.float32)
    if sheet.metrics == metrics:
        return found
    values = np.full((len(found), len(metrics)), np.nan, dtype=np.float32)
    values[:, [metrics.index(metric) for metric in sheet.metrics]] = found
    return values
