"""Whose word a summary's rows are, so that the second stage believes the same collectors as the first (`streams.voices`).

A block sees only its own partition of the ticks. Whoever forges records chooses the partition, so a block that never heard of a node may
take an impostor for its collector: which of two blocks speaks for a node is known where all blocks come together.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from trainwarden.records import Sheet, Summary, Tick

NOBODY = Tick()
FORGED, ABSENT, NOT_TOLD, BELIEVED = range(4)
"""How good a block's word about a node is; an absent node is better than an impostor's."""


class Speakers(NamedTuple):
    """By node: boot id and time of the tick that its row is made of, and whom that names as the one before; nothing and 0 without one."""

    boots: tuple[str, ...]
    heard: bytes
    succeeds: tuple[str, ...]


def speakers_of(nodes: Sequence[str], ticks: Mapping[str, Tick]) -> Speakers:
    """Whose word the rows of these nodes are."""
    found = [ticks.get(node, NOBODY) for node in nodes]
    heard = array("q", [tick.observed_at_ns for tick in found])
    return Speakers(tuple(t.boot_id for t in found), heard.tobytes(), tuple(t.succeeds for t in found))


def words_of(part: Summary) -> Iterator[Tick]:
    """A tick without values for each node that has spoken."""
    if not part.boots:
        return  # an older worker did not say whose word it is
    heard = array("q")
    heard.frombytes(part.heard)
    before = part.succeeds or ("",) * len(part.nodes)
    for node, boot, heard_ns, succeeds in zip(part.nodes, part.boots, heard, before, strict=True):
        if boot:
            yield Tick(cluster=part.cluster, node=node, boot_id=boot, observed_at_ns=heard_ns, succeeds=succeeds)


def each_node_once(parts: list[Summary], boot_of: Callable[[str], str]) -> list[Summary]:
    """The parts, of which each node is in one only: where its own voice speaks, else where it is missed."""
    counts = Counter(node for part in parts for node in part.nodes)
    twice = {node for node, count in counts.items() if count > 1}
    if not twice:
        return parts
    best: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(parts):
        for at, node in enumerate(part.nodes):
            if node in twice:
                best[node] = max(best.get(node, (-1, 0)), (_trust(part, at, boot_of(node)), -number))
    lost = [{node for node in twice & {*part.nodes} if -best[node][1] != number} for number, part in enumerate(parts)]
    return [without(part, nodes) for part, nodes in zip(parts, lost, strict=True)]


def _trust(part: Summary, at: int, boot: str) -> int:
    if not part.present[at]:
        return ABSENT
    if not part.boots or not boot:
        return NOT_TOLD
    return BELIEVED if part.boots[at] == boot else FORGED


def without(part: Summary, nodes: Set[str]) -> Summary:
    """The part as if it had never heard of some nodes."""
    if not nodes:
        return part
    kept = [at for at, node in enumerate(part.nodes) if node not in nodes]
    heard = np.frombuffer(part.heard, dtype="<i8")
    return replace(
        part,
        nodes=tuple(part.nodes[at] for at in kept),
        present=bytes(part.present[at] for at in kept),
        sheets=tuple(sheet for sheet in (_sheet_without(sheet, nodes) for sheet in part.sheets) if sheet.rows),
        gaps=tuple((node, gaps) for node, gaps in part.gaps if node not in nodes),
        inferred=tuple(event for event in part.inferred if event.node not in nodes),
        boots=tuple(part.boots[at] for at in kept) if part.boots else (),
        heard=heard[kept].tobytes() if part.boots else b"",
        succeeds=tuple(part.succeeds[at] for at in kept) if part.succeeds else (),
    )


def _sheet_without(sheet: Sheet, nodes: Set[str]) -> Sheet:
    values = np.frombuffer(sheet.values, dtype="<f4").reshape(-1, len(sheet.metrics))
    stays = np.array([node not in nodes for node, devices in sheet.rows for _ in devices], dtype=np.bool_)
    rows = tuple((node, devices) for node, devices in sheet.rows if node not in nodes)
    return Sheet(sheet.family, sheet.metrics, sheet.states, rows, values[stays].tobytes())
