"""Restoring: all ranks agree on the newest verified save that at least one of them holds.

The state is replicated (data parallel), so a rank without that save takes it from the lowest
rank that has it. Every save that must not be used is refused by name, logged and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainwarden_hook.disk import Folder, open_file
from trainwarden_hook.memory import Buffer, Buffers
from trainwarden_hook.packing import Header, Refused, unpack

log = logging.getLogger("trainwarden.checkpoint")
PIECE_BYTES = 64 << 20


@dataclass
class Candidate:
    """The newest good save that this rank holds; ``step`` -1 when it holds none."""

    step: int = -1
    source: str = "none"
    header: Header | None = None
    payload: memoryview | None = None
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Restored:
    """What all ranks have agreed on and this rank has read."""

    step: int
    source: str
    state: dict[str, Any]
    header: Header


def find(buffers: Buffers, folder: Folder | None, fingerprint: int | None, max_step: int | None) -> Candidate:
    """Look in memory first, then on disk for something newer."""
    best = Candidate()
    for buffer in buffers.pair:
        _consider(best, "memory", buffer.path, max_step, partial(_from_buffer, buffer, fingerprint))
    for step, path in folder.newest_first() if folder is not None else ():
        if step <= best.step:
            break
        if max_step is None or step <= max_step:
            _consider(best, "disk", path, max_step, partial(open_file, path, fingerprint))
    return best


def _from_buffer(buffer: Buffer, fingerprint: int | None) -> tuple[Header, memoryview] | None:
    header = buffer.examine(fingerprint)
    return None if header is None else (header, buffer.payload(header))


def _consider(
    best: Candidate,
    source: str,
    where: str,
    max_step: int | None,
    read: Callable[[], tuple[Header, memoryview] | None],
) -> None:
    try:
        found = read()
    except (Refused, OSError) as error:
        best.refused.append(str(error))
        log.warning("not restored: %s", error)
        return
    if found is None:
        return
    step = found[0].step
    if max_step is not None and step > max_step:
        log.info("not restored: %s holds step %d, above the ordered %d", where, step, max_step)
    elif step > best.step:
        best.step, best.source = step, source
        best.header, best.payload = found


def agree(mine: Candidate) -> Restored | None:
    """Agree with all ranks (a collective when a process group is up) and read the state.

    Returns
    -------
    Restored or None
        ``None`` when no rank holds any good save.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _restored(mine, mine.source) if mine.step >= 0 else None
    held: list[int] = [-1] * dist.get_world_size()
    dist.all_gather_object(held, mine.step)
    step = max(held)
    if step < 0:
        return None
    if min(held) < step:
        _share(mine, held, step)
    return _restored(mine, mine.source)


def _restored(mine: Candidate, source: str) -> Restored:
    if mine.header is None or mine.payload is None:
        raise RuntimeError("no save to restore from")
    return Restored(mine.step, source, unpack(mine.header, mine.payload), mine.header)


def _share(mine: Candidate, held: list[int], step: int) -> None:
    """Broadcast header and payload of ``step`` from the lowest rank that holds it."""
    import torch.distributed as dist

    source = held.index(step)
    has_it = mine.step == step
    box: list[Any] = [mine.header if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, src=source)
    header: Header = box[0]
    # Headers of the same step differ between ranks (index_bytes): only the source may send from its own buffer, and a rank
    # that has the save already takes part with scratch, so that its own header and payload stay a pair.
    is_source = dist.get_rank() == source and mine.payload is not None
    payload = mine.payload if is_source else memoryview(bytearray(header.payload_bytes))
    assert payload is not None
    _broadcast(payload[: header.payload_bytes], source)
    if not has_it:
        mine.step, mine.source, mine.header, mine.payload = step, "peer", header, payload


def _broadcast(payload: memoryview, source: int) -> None:
    import torch
    import torch.distributed as dist

    on_gpu = dist.get_backend() == "nccl"
    for start in range(0, len(payload), PIECE_BYTES):
        piece = torch.frombuffer(payload[start : start + PIECE_BYTES], dtype=torch.uint8)
        if dist.get_rank() != source:
            # A rank that has the same save takes part, but into scratch: its own copy stays as verified.
            target = torch.empty_like(piece)
            moved = target.cuda() if on_gpu else target
            dist.broadcast(moved, src=source)
            piece.copy_(moved)
        else:
            dist.broadcast(piece.cuda() if on_gpu else piece, src=source)
