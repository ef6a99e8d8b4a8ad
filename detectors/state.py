"""Detector state as plain structs: one encoding, exact to the bit, arrays included."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import pack_array, unpack_array

Array = np.ndarray[Any, Any]
"""Annotation for arrays inside state structs."""

S = TypeVar("S", bound=msgspec.Struct)


def encode_state(state: msgspec.Struct) -> bytes:
    """MessagePack of a state struct and everything in it.

    Examples
    --------
    >>> class Mean(msgspec.Struct):
    ...     values: Array
    >>> decode_state(encode_state(Mean(np.array([1.0, np.nan]))), Mean).values
    array([ 1., nan])
    """
    return msgspec.msgpack.encode(state, enc_hook=_encode_array)


def decode_state(payload: bytes, kind: type[S]) -> S:
    """Inverse of `encode_state`; raises `msgspec.ValidationError` when the payload is of another shape."""
    return msgspec.msgpack.decode(payload, type=kind, dec_hook=_decode_array)


def nan_array(*shape: int) -> NDArray[np.float64]:
    """An array in which nothing is known yet."""
    return np.full(shape, np.nan)


def _encode_array(value: Any) -> Any:
    """As `pack_array`, without a copy of its own where the array lies in one piece: a cluster's are hundreds of megabytes."""
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous and value.size and value.dtype.kind in "biuf":
            return list(value.shape), value.dtype.str, value.reshape(-1).view(np.uint8).data
        return pack_array(value)
    raise NotImplementedError(
        f"detector state holds a {type(value).__name__}, expected numbers, text, lists, dicts, structs or arrays"
    )


def _decode_array(kind: Any, value: Any) -> Any:
    return unpack_array(value)
