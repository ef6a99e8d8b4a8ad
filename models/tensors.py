"""The safetensors file format, which a model file has because nothing in it can be executed: a length, a JSON header, raw numbers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.errors import UsageError

NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
NAMES = {np.dtype(dtype): name for name, dtype in NUMBERS.items()}
MOST_HEADER_BYTES = 1 << 20


def write(path: Path, tensors: dict[str, NDArray[Any]], about: dict[str, str] | None = None) -> None:
    """Write named arrays; `about` goes into the header's metadata. The file is whole or not there."""
    header: dict[str, Any] = {"__metadata__": about or {}}
    at = 0
    parts = []
    for name, array in sorted(tensors.items()):
        payload = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(payload)],
        }
        parts.append(payload)
        at += len(payload)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fresh = path.with_suffix(".part")
    fresh.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    fresh.replace(path)


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Named arrays of a file.

    Raises
    ------
    UsageError
        There is no such file, or it is no safetensors file.
    """
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}, expected model weights: `trainwarden train` makes them") from None
    try:
        length = int(struct.unpack_from("<Q", payload)[0])
        if length > min(MOST_HEADER_BYTES, len(payload) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(payload[8 : 8 + length])
        return {name: _array(payload, 8 + length, row) for name, row in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UsageError(f"{path}: {error}, expected a safetensors file: `trainwarden train` makes one") from None


def _array(payload: bytes, base: int, row: dict[str, Any]) -> NDArray[Any]:
    begin, end = row["data_offsets"]
    dtype = np.dtype(NUMBERS[row["dtype"]])
    if not 0 <= begin <= end <= len(payload) - base or end - begin != dtype.itemsize * int(np.prod(row["shape"])):
        raise ValueError("it is cut short")
    return np.frombuffer(payload, dtype, (end - begin) // dtype.itemsize, base + begin).reshape(row["shape"]).copy()
