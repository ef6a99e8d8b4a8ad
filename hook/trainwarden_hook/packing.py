"""Training state as bytes: a JSON index and raw tensor bytes, no pickle.

Layout: header (one page, written last), index, padding, tensors (each aligned to 64 bytes).
A header that is missing, of another version, or whose checksums do not fit means: not a save.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAGIC = b"TWCKPT\x00\x01"
VERSION = 1
HEADER_BYTES = 4096
ALIGN_BYTES = 64
_HEADER = struct.Struct("<8sIIqiiqQQIIq")
_CHECK = struct.Struct("<I")


class Refused(Exception):
    """A save that must not be used; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a save says about itself.

    ``step`` is the next step to run; ``fingerprint`` stands for names, shapes and kinds of the tensors;
    ``payload_crc`` covers index and tensors.
    """

    step: int
    world: int
    rank: int
    generation: int
    index_bytes: int
    payload_bytes: int
    payload_crc: int
    fingerprint: int
    saved_at_ns: int

    def encode(self) -> bytes:
        """One page, ending the save."""
        body = _HEADER.pack(
            MAGIC,
            VERSION,
            0,
            self.step,
            self.world,
            self.rank,
            self.generation,
            self.index_bytes,
            self.payload_bytes,
            self.payload_crc,
            self.fingerprint,
            self.saved_at_ns,
        )
        return (body + _CHECK.pack(zlib.crc32(body))).ljust(HEADER_BYTES, b"\x00")

    @classmethod
    def decode(cls, page: bytes | memoryview, where: str) -> Header:
        """Read and check a header.

        Raises
        ------
        Refused
            No save, a torn one, or one of another version.
        """
        if len(page) < HEADER_BYTES:
            raise Refused(f"{where} is truncated: {len(page)} bytes, a header has {HEADER_BYTES}")
        body = bytes(page[: _HEADER.size])
        magic, version, _, *fields = _HEADER.unpack(body)
        if magic != MAGIC:
            raise Refused(f"{where} is not a finished save: no magic number")
        if _CHECK.unpack(bytes(page[_HEADER.size : _HEADER.size + 4]))[0] != zlib.crc32(body):
            raise Refused(f"{where} is corrupt: the header's checksum does not fit")
        if version != VERSION:
            raise Refused(f"{where} has version {version}, this program reads version {VERSION}")
        return cls(*fields)


def aligned(size: int) -> int:
    """``size`` rounded up to the tensor alignment."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Plan:
    """Where every part of a state goes; made without copying a tensor.

    Raises
    ------
    TypeError
        A value is of a kind that cannot be packed; the text has its path.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self._watched: list[tuple[str, list[Any]]] = []
        self._data_bytes = 0
        tree = self._encode(dict(state), "state")
        self.index = json.dumps(tree, separators=(",", ":")).encode()
        self.data_start = aligned(len(self.index))
        self.payload_bytes = self.data_start + self._data_bytes

    def _encode(self, value: Any, at: str) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)) and type(value) in (int, float):
            return value
        if isinstance(value, Mapping):
            kind = "o" if isinstance(value, OrderedDict) else "d"
            return {kind: [[self._encode(k, at), self._encode(v, f"{at}.{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            parts = [self._encode(part, f"{at}[{number}]") for number, part in enumerate(value)]
            return {"l": parts} if isinstance(value, list) else {"t": parts}
        if isinstance(value, bytes):
            return {"b": base64.b64encode(value).decode()}
        return self._encode_array(value, at)

    def _encode_array(self, value: Any, at: str) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            place = self._place(value.detach())
            if at.startswith("state.model.") and value.is_floating_point():
                self._watched.append((at.removeprefix("state.model."), place))
            return {"x": place}
        if type(value).__module__ == "numpy":
            if value.ndim == 0:
                return self._encode(value.item(), at)
            return {"n": self._place(torch.from_numpy(value))}
        raise TypeError(
            f"{at} is a {type(value).__name__}, which a checkpoint cannot hold; give tensors, numbers, texts"
        )

    def _place(self, tensor: torch.Tensor) -> list[Any]:
        size = tensor.numel() * tensor.element_size()
        offset = self._data_bytes
        self.tensors.append((offset, tensor))
        self._data_bytes += aligned(size)
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size]

    def write_tensors(self, payload: memoryview) -> None:
        """Copy all tensors (from any device) into ``payload``: the only part that stalls training."""
        import torch

        for offset, tensor in self.tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                start = self.data_start + offset
                flat = torch.frombuffer(payload[start : start + size], dtype=tensor.dtype)
                flat.view(tensor.shape).copy_(tensor)

    def first_nan(self, payload: memoryview) -> str:
        """Name of the first tensor of the model that holds a NaN; empty if none does.

        Infinities may be meant (masks), NaN never is.
        """
        for name, place in self._watched:
            if place[3] and bool(view_of(place, payload[self.data_start :]).isnan().any()):
                return name
        return ""

    def write_index(self, payload: memoryview) -> None:
        """Write the index and zero the padding behind it."""
        payload[: len(self.index)] = self.index
        payload[len(self.index) : self.data_start] = bytes(self.data_start - len(self.index))


def fingerprint(model_state: Mapping[str, Any], optimizer_kind: str) -> int:
    """Checksum of names, shapes and kinds of the model's tensors and of the optimizer's class."""
    parts = [optimizer_kind]
    for name, value in model_state.items():
        shape = list(getattr(value, "shape", ()))
        parts.append(f"{name}:{getattr(value, 'dtype', type(value).__name__)}:{shape}")
    return zlib.crc32("\n".join(parts).encode())


def check(page: memoryview, payload: memoryview, where: str, expected_fingerprint: int | None) -> Header:
    """Check a whole save against its header.

    Raises
    ------
    Refused
        Truncated, corrupt, of another version, or of another model.
    """
    header = Header.decode(page, where)
    if len(payload) < header.payload_bytes:
        raise Refused(f"{where} is truncated: {len(payload)} of {header.payload_bytes} bytes")
    if zlib.crc32(payload[: header.payload_bytes]) != header.payload_crc:
        raise Refused(f"{where} is corrupt: the checksum of step {header.step} does not fit")
    if expected_fingerprint is not None and header.fingerprint != expected_fingerprint:
        raise Refused(f"{where} is of another model: names, shapes or kinds of the tensors differ")
    return header


def unpack(header: Header, payload: memoryview) -> dict[str, Any]:
    """The state that `Plan` packed; tensors are copies, so the source may be overwritten afterwards."""
    tree = json.loads(bytes(payload[: header.index_bytes]))
    state = _decode(tree, payload[aligned(header.index_bytes) :])
    return dict(state)


def _decode(node: Any, data: memoryview) -> Any:
    if not isinstance(node, dict):
        return node
    kind, body = next(iter(node.items()))
    if kind in {"d", "o"}:
        pairs = [(_decode(key, data), _decode(value, data)) for key, value in body]
        return OrderedDict(pairs) if kind == "o" else dict(pairs)
    if kind == "b":
        return base64.b64decode(body)
    if kind in {"x", "n"}:
        tensor = _tensor(body, data)
        return tensor if kind == "x" else tensor.numpy()
    parts = [_decode(part, data) for part in body]
    return parts if kind == "l" else tuple(parts)


def _tensor(body: list[Any], data: memoryview) -> torch.Tensor:
    import torch

    name, shape, _, size = body
    if not size:
        return torch.empty(shape, dtype=getattr(torch, name))
    return view_of(body, data).clone()


def view_of(body: list[Any], data: memoryview) -> torch.Tensor:
    """A tensor over the packed bytes themselves."""
    import torch

    name, shape, offset, size = body
    return torch.frombuffer(data[offset : offset + size], dtype=getattr(torch, name)).view(shape)
