"""Snapshots on the compacted state topic: written in pieces that fit a message, into two slots by turns.

A crash while writing leaves one slot torn and the other whole; a slot counts only when all its pieces are of one writing.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import cramjam
import msgspec

from streams.matrices import pack, unpack
from trainwarden.records import FrameCut, StateSnapshot

log = logging.getLogger(__name__)

PIECE_BYTES = 512 * 1024
SLOTS = 2
MAX_STATE_BYTES = 1 << 31
"""A snapshot that unpacks to more is none of ours."""
LARGE_BYTES = 8 * 1024 * 1024
"""From here on zstd packs a snapshot, five times as fast as zlib; smaller ones stay readable to the builds that know zlib alone."""
MAX_COLD_CUTS = 1000
"""Without any snapshot the cuts themselves are repeated from the first one, as long as they are few."""


@dataclass(frozen=True)
class Resume:
    """Where to go on: state after cut number `seq` and the cuts that were made since.

    Attributes
    ----------
    at_ns
        Time of cut `seq`.
    payload
        Empty for a cold start.
    positions
        Offsets to read on from; empty: from the beginning.
    """

    seq: int
    payload: bytes
    positions: dict[str, int]
    code_version: str
    at_ns: int = 0
    cuts: tuple[FrameCut, ...] = ()


def pieces(
    owner: str,
    payload: bytes | Sequence[bytes],
    positions: dict[str, int],
    *,
    turn: int,
    seq: int,
    at_ns: int,
    cluster: str,
    boot_id: str,
    code_version: str,
) -> list[StateSnapshot]:
    """A snapshot, whole or in parts, as records; `turn` chooses the slot."""
    whole = [payload] if isinstance(payload, bytes) else payload
    size_bytes = sum(map(len, whole))
    large = size_bytes >= LARGE_BYTES
    # each part is a frame of its own (readers take them one after the other): others of this process may go on meanwhile
    packed = (
        b"".join(bytes(cramjam.zstd.compress(part, 1)) for part in whole)
        if large
        else zlib.compress(b"".join(whole), 1)
    )
    size = [size_bytes] if large else []
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
            payload=pack([number, len(parts), part, *size]),
        )
        for number, part in enumerate(parts)
    ]


def newest(owner: str, records: Iterable[StateSnapshot]) -> Resume | None:
    """The newest whole snapshot of `owner`; None when there is none."""
    slots: dict[str, dict[int, StateSnapshot]] = {}
    for record in records:
        name, _, piece = record.owner.rpartition("/")
        if name.startswith(f"{owner}/") and piece.isdecimal():
            slots.setdefault(name, {})[int(piece)] = record
    whole = [found for name, slot in slots.items() if (found := _readable(name, slot)) is not None]
    return max(whole, key=lambda found: found[0], default=(0, None))[1]


def epochs(cuts: Iterable[FrameCut]) -> list[list[FrameCut]]:
    """Cuts by cold start (number 1 again); within one, numbers only rise: what a second writer said is left out."""
    found: list[list[FrameCut]] = []
    for cut in cuts:
        if not found or cut.seq == 1:
            found.append([cut])
        elif cut.seq > found[-1][-1].seq:
            found[-1].append(cut)
    return found


def resume_from(owner: str, snapshots: Iterable[StateSnapshot], cuts: Sequence[FrameCut]) -> Resume | None:
    """How to go on: the newest snapshot and the cuts after it, or all cuts since a recent cold start; None: begin anew."""
    resume = newest(owner, snapshots)
    runs = epochs([cut for cut in cuts if cut.node in ("", owner)])
    if resume is not None and not (runs and _began_later(runs[-1], resume)):
        return replace(resume, cuts=tuple(cut for cut in (runs[-1] if runs else ()) if cut.seq > resume.seq))
    if runs and runs[-1][0].seq == 1 and len(runs[-1]) <= MAX_COLD_CUTS:
        return Resume(0, b"", {}, "", cuts=tuple(runs[-1]))
    return None


def _began_later(run: Sequence[FrameCut], resume: Resume) -> bool:
    """Whether this run of the worker started cold after the snapshot was taken, and so owes it nothing."""
    return run[0].seq == 1 and run[0].now_ns > resume.at_ns


def _readable(name: str, slot: dict[int, StateSnapshot]) -> tuple[int, Resume] | None:
    """The slot's snapshot; None while it is torn, or when it holds what no build of ours wrote."""
    try:
        return _whole(slot)
    except (msgspec.MsgspecError, zlib.error, cramjam.DecompressionError, ValueError, TypeError) as error:
        log.warning("snapshot %s is passed over, it cannot be read: %s", name, error)
        return None


def _whole(slot: dict[int, StateSnapshot]) -> tuple[int, Resume] | None:
    head = slot.get(0)
    if head is None:
        return None
    _, count, _, *size = unpack(head.payload)
    if not 0 < count <= len(slot):
        return None
    parts = [slot.get(number) for number in range(count)]
    if any(part is None or (part.seq, part.boot_id) != (head.seq, head.boot_id) for part in parts):
        return None
    packed = b"".join(unpack(part.payload)[2] for part in parts if part is not None)
    payload = _unpacked_large(packed, size[0]) if size else _unpacked(packed)
    return head.observed_at_ns, Resume(head.seq, payload, dict(head.positions), head.code_version, head.observed_at_ns)


def _unpacked(packed: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    payload = unpacking.decompress(packed, MAX_STATE_BYTES)
    if not unpacking.eof:
        raise ValueError(f"it is torn, or unpacks to more than {MAX_STATE_BYTES} bytes")
    return payload


def _unpacked_large(packed: bytes, size: int) -> bytes:
    if not 0 <= size <= MAX_STATE_BYTES:
        raise ValueError(f"it says that it unpacks to {size} bytes")
    payload = bytearray(size)
    if cramjam.zstd.decompress_into(packed, payload) != size:
        raise ValueError(f"it is torn: it does not unpack to {size} bytes")
    return bytes(payload)
