"""What child and parent say to each other over a socket that keeps messages apart: one byte of kind, then JSON or a frame of rows."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROWS, INVENTORY, EVENT, SHIFT = b"R", b"I", b"E", b"S"
MESSAGE_BYTES = 1 << 18
"""Room for 64 GPUs of which each lacks every column, with its reasons: 140 KB, and 45 KB for their parts."""

STARTING, RUNNING, NO_LIBRARY, NO_DRIVER, NO_PERMISSION, HUNG, OLD_DRIVER = range(7)
REASONS = {STARTING: "starting", NO_LIBRARY: "no_library", NO_DRIVER: "no_driver", NO_PERMISSION: "permission",
           HUNG: "driver_hung", OLD_DRIVER: "driver_changed"}  # fmt: skip

_SHIFT = struct.Struct("<cq")
_HEAD = struct.Struct("<cBHHHqQII")


class WireError(Exception):
    """A message that is none of ours."""


@dataclass(frozen=True)
class Frame:
    """Rows of all GPUs and their parts at one moment.

    Parameters
    ----------
    generation
        Which inventory names the rows.
    hung
        Bit per GPU, in the order of the inventory: a call has not come back.
    took_us
        What the driver says it spent on the fields of this frame.
    cpu_ms
        Processor time of the child so far.
    """

    status: int
    generation: int
    gpus: int
    parts: int
    at_ns: int
    hung: int
    took_us: int
    cpu_ms: int
    rows: bytes

    def pack(self) -> bytes:
        """The message."""
        head = _HEAD.pack(ROWS, self.status, self.generation & 0xFFFF, self.gpus, self.parts, self.at_ns, self.hung,
                          min(self.took_us, 2**32 - 1), self.cpu_ms & 0xFFFFFFFF)  # fmt: skip
        return head + self.rows


def frame_of(message: bytes, gpu_bytes: int, part_bytes: int) -> Frame:
    """The frame in a message; raises `WireError` when its length is not what its head promises."""
    if len(message) < _HEAD.size:
        raise WireError(f"a frame of {len(message)} bytes, expected {_HEAD.size} and more")
    _, status, generation, gpus, parts, at_ns, hung, took_us, cpu_ms = _HEAD.unpack_from(message)
    expected = _HEAD.size + gpus * gpu_bytes + parts * part_bytes
    if len(message) != expected:
        raise WireError(f"a frame of {len(message)} bytes, expected {expected} for {gpus} GPUs and {parts} parts")
    return Frame(status, generation, gpus, parts, at_ns, hung, took_us, cpu_ms, message[_HEAD.size :])


def inventory(generation: int, facts: Mapping[str, Any]) -> bytes:
    """The message that names the rows of the frames to come."""
    return INVENTORY + json.dumps({**facts, "generation": generation & 0xFFFF}, separators=(",", ":")).encode()


def event(facts: Mapping[str, Any]) -> bytes:
    """The message of something that happened."""
    return EVENT + json.dumps(facts, separators=(",", ":")).encode()


def facts_of(message: bytes) -> dict[str, Any]:
    """The JSON of a message; raises `WireError`."""
    try:
        facts = json.loads(message[1:])
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message of {len(message)} bytes is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise WireError(f"a message holds a {type(facts).__name__}, expected an object")
    return facts


def shift(by_ns: int) -> bytes:
    """The message that moves the child's clock."""
    return _SHIFT.pack(SHIFT, by_ns)


def shift_of(message: bytes) -> int:
    """By how much the parent wants the clock moved; 0 for any other message."""
    return int(_SHIFT.unpack(message)[1]) if message[:1] == SHIFT and len(message) == _SHIFT.size else 0


def hung_mask(hung: Sequence[bool]) -> int:
    """A bit for each of the first 64."""
    return sum(1 << index for index, value in enumerate(hung[:64]) if value)
