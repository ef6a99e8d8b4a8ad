"""Records as the store reads them: names of devices and ranks in a tick stay bytes, which are nearly always those of the second before.

Whoever first looks at such bytes (`streams.store.words`) decodes and checks them as they would have been here.
"""

from __future__ import annotations

from typing import Any, Union, get_args

import msgspec

from trainwarden.errors import DecodeError
from trainwarden.records import SCHEMA, AnyRecord, Block, Placement, Tick

_EMPTY = msgspec.Raw(b"\x90")
"""An empty array: what an older record leaves out."""


def _like(kind: type[msgspec.Struct], tag: str | None, **other: Any) -> Any:
    """The same struct with other types for some fields, given with their defaults."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        changed = other.get(field.name, (field.type, field.default))
        fields.append((field.name, changed[0]) if changed[1] is msgspec.NODEFAULT else (field.name, *changed))
    return msgspec.defstruct(f"Lean{kind.__name__}", fields, frozen=True, array_like=True, gc=False, tag=tag)


LeanBlock: Any = _like(Block, None, devices=(msgspec.Raw, msgspec.NODEFAULT))
LeanTick: Any = _like(  # type: ignore[valid-type]
    Tick, "tick", blocks=(tuple[LeanBlock, ...], ()), placements=(msgspec.Raw, _EMPTY)
)
_decoder = msgspec.msgpack.Decoder(Union[tuple(LeanTick if kind is Tick else kind for kind in get_args(AnyRecord))])  # noqa: UP007
_devices = msgspec.msgpack.Decoder(tuple[str, ...])
_placements = msgspec.msgpack.Decoder(tuple[Placement, ...])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_lean(payload: bytes) -> Any:
    """Like `trainwarden.records.decode`, with a `LeanTick` for a tick.

    Raises
    ------
    DecodeError
        As there, but for what stays bytes.
    """
    record = _decode(_decoder, payload)
    if record.schema != SCHEMA:
        raise DecodeError(f"record of schema {record.schema}, this build reads {SCHEMA}: upgrade the reader first")
    return record


def devices_of(raw: bytes) -> tuple[str, ...]:
    """The devices of a block; raises `DecodeError`."""
    found: tuple[str, ...] = _decode(_devices, raw)
    return found


def placements_of(raw: bytes) -> tuple[Placement, ...]:
    """The placements of a tick; raises `DecodeError`, also for a number that no label column holds."""
    found: tuple[Placement, ...] = _decode(_placements, raw)
    for placement in found:
        if not (0 <= placement.attempt < 1 << 32 and -(1 << 31) <= placement.rank < 1 << 31):
            raise DecodeError(
                f"rank {placement.rank} in attempt {placement.attempt} of job {placement.job}: no job has such a rank"
            )
    return found


def _decode(decoder: Any, raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except _UNREADABLE as error:
        raise DecodeError(f"not a record: {error}") from None
