"""Snapshots on the compacted state topic: written in pieces that fit a message, into two slots by turns.

A crash while writing leaves one slot torn and the other whole; a slot counts only when all its pieces are of one writing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streams.matrices import pack, unpack
from trainwarden.records import FrameCut, StateSnapshot

PIECE_BYTES = 512 * 1024
SLOTS = 2


@dataclass(frozen=True)
class Resume:
    """Where to go on: state after cut number `seq` and the cuts that were made since.

    Attributes
    ----------
    positions
        Offsets to read on from.
    """

    seq: int
    payload: bytes
    positions: dict[str, int]
    code_version: str
    cuts: tuple[FrameCut, ...] = ()


def pieces(
    owner: str,
    payload: bytes,
    positions: dict[str, int],
    *,
    turn: int,
    seq: int,
    at_ns: int,
    cluster: str,
    boot_id: str,
    code_version: str,
) -> list[StateSnapshot]:
    """A snapshot as records; `turn` chooses the slot."""
    packed = zlib.compress(payload, 1)
    parts = [packed[i : i + PIECE_BYTES] for i in range(0, len(packed), PIECE_BYTES)]
    return [
        StateSnapshot(
            cluster=cluster,
            node=owner,
            seq=seq,
            observed_at_ns=at_ns,
            boot_id=boot_id,
            owner=f"{owner}/{turn % SLOTS}/{number}",
            code_version=code_version,
            positions=positions,
            payload=pack([number, len(parts), part]),
        )
        for number, part in enumerate(parts)
    ]


def newest(owner: str, records: Iterable[StateSnapshot]) -> Resume | None:
    """The newest whole snapshot of `owner`; None when there is none."""
    slots: dict[str, dict[int, StateSnapshot]] = {}
    for record in records:
        name, _, piece = record.owner.rpartition("/")
        if name.startswith(f"{owner}/"):
            slots.setdefault(name, {})[int(piece)] = record
    whole = [found for slot in slots.values() if (found := _whole(slot)) is not None]
    return max(whole, key=lambda found: found[0], default=(0, None))[1]


def follow(resume: Resume, cuts: Sequence[FrameCut]) -> Resume:
    """Add the cuts that came after the snapshot. Numbers only rise: a second writer's or an older run's cuts are left out."""
    kept: list[FrameCut] = []
    last = resume.seq
    for cut in cuts:
        if cut.seq > last:
            kept.append(cut)
            last = cut.seq
    return Resume(resume.seq, resume.payload, resume.positions, resume.code_version, tuple(kept))


def _whole(slot: dict[int, StateSnapshot]) -> tuple[int, Resume] | None:
    head = slot.get(0)
    if head is None:
        return None
    _, count, _ = unpack(head.payload)
    parts = [slot.get(number) for number in range(count)]
    if any(part is None or (part.seq, part.boot_id) != (head.seq, head.boot_id) for part in parts):
        return None
    packed = b"".join(unpack(part.payload)[2] for part in parts if part is not None)
    return head.observed_at_ns, Resume(head.seq, zlib.decompress(packed), dict(head.positions), head.code_version)
