"""Training state as bytes: a JSON index and raw tensor bytes, no pickle.

A sharded tensor is packed as this rank's part, with the whole shape and where the part begins.

Layout: header (one page, written last), index, padding, tensors (each aligned to 64 bytes).
A header that is missing, of another version, or whose checksums do not fit means: not a save.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwarden_hook.copying import Piece, copy_all, move_all
from trainwarden_hook.sums import checksum

if TYPE_CHECKING:
    import torch

MAGIC = b"TWCKPT\x00\x01"
VERSION = 2
SHARDED = 1
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
    flags: int = 0

    @property
    def sharded(self) -> bool:
        """Whether this is one rank's part of a state, rather than all of it."""
        return bool(self.flags & SHARDED)

    def encode(self) -> bytes:
        """One page, ending the save."""
        body = _HEADER.pack(
            MAGIC,
            VERSION,
            self.flags,
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
        magic, version, flags, *fields = _HEADER.unpack(body)
        fields.append(flags)
        if magic != MAGIC:
            raise Refused(f"{where} is not a finished save: no magic number")
        if _CHECK.unpack(bytes(page[_HEADER.size : _HEADER.size + 4]))[0] != zlib.crc32(body):
            raise Refused(f"{where} is corrupt: the header's checksum does not fit")
        if version != VERSION:
            raise Refused(f"{where} has version {version}, this program reads version {VERSION}")
        return cls(*fields)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A sharded tensor in an unpacked state: the part that this save holds.

    Attributes
    ----------
    shape
        Of the whole tensor.
    start
        Index of the part's first element in the whole, one number a dimension.
    data
        The part.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: torch.Tensor


def aligned(size: int) -> int:
    """``size`` rounded up to the tensor alignment."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Plan:
    """Where every part of a state goes; made without copying a tensor.

    Parameters
    ----------
    stable
        Whether nothing but the optimizer's step changes the tensor at this path (see `Overlap`).

    Raises
    ------
    TypeError
        A value is of a kind that cannot be packed; the text has its path.
    """

    def __init__(self, state: Mapping[str, Any], stable: Callable[[str, torch.Tensor], bool] | None = None) -> None:
        self.tensors: list[Piece] = []
        self.sharded = False
        self._stable = stable or (lambda at, tensor: False)
        self._watched: list[tuple[str, list[Any]]] = []
        self._data_bytes = 0
        self._dtypes: dict[torch.dtype, str] = {}
        # training stands still while this is made: what is asked of every tensor is looked up once
        self._tensor_kind, self._strided = tensor_kind(), torch_strided()
        tree = self._encode(dict(state), "state")
        self.index = json.dumps(tree, separators=(",", ":")).encode()
        self.data_start = aligned(len(self.index))
        self.payload_bytes = self.data_start + self._data_bytes

    def _encode(self, value: Any, at: str) -> Any:
        if isinstance(value, self._tensor_kind):
            return self._encode_tensor(value, at)
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

    def _encode_tensor(self, value: torch.Tensor, at: str) -> Any:
        local = local_part(value)
        place = self._place(at, value.detach() if local is None else local[0], value)
        if at.startswith("state.model.") and value.is_floating_point():
            self._watched.append((at.removeprefix("state.model."), place))
        if local is None:
            return {"x": place}
        self.sharded = True
        return {"s": [place, list(value.shape), local[1]]}

    def _encode_array(self, value: Any, at: str) -> Any:
        if type(value).__module__ == "numpy":
            if value.ndim == 0:
                return self._encode(value.item(), at)
            import torch

            tensor = torch.from_numpy(value)
            return {"n": self._place(at, tensor, tensor)}
        raise TypeError(
            f"{at} is a {type(value).__name__}, which a checkpoint cannot hold; give tensors, numbers, texts"
        )

    def _place(self, at: str, tensor: torch.Tensor, whole: torch.Tensor) -> list[Any]:
        if tensor.layout is not self._strided or tensor.is_quantized:
            raise TypeError(f"{at} is a {tensor.layout} tensor, which a checkpoint cannot hold; give a dense one")
        piece = Piece(at.removeprefix("state."), self._data_bytes, tensor, whole, self._stable(at, whole))
        self.tensors.append(piece)
        self._data_bytes += aligned(piece.size)
        dtype = tensor.dtype
        name = self._dtypes.get(dtype) or self._dtypes.setdefault(dtype, str(dtype).removeprefix("torch."))
        return [name, list(tensor.shape), piece.offset, piece.size]

    def write_tensors(self, payload: memoryview) -> None:
        """Copy all tensors (from any device) into ``payload``: the only part that stalls training."""
        copy_all(self.tensors, payload[self.data_start :])

    def first_nan(self, payload: memoryview) -> str:
        """Name of the first tensor of the model that holds a NaN; empty if none does.

        Infinities may be meant (masks), NaN never is.
        """
        for name, place in self._watched:
            if place[3] and _has_nan(view_of(place, payload[self.data_start :])):
                return name
        return ""

    def write_index(self, payload: memoryview) -> None:
        """Write the index and zero the padding behind it."""
        payload[: len(self.index)] = self.index
        payload[len(self.index) : self.data_start] = bytes(self.data_start - len(self.index))


def _has_nan(tensor: torch.Tensor) -> bool:
    """A sum is finite unless something in it is not (or it overflows): one pass, and rarely a second."""
    if tensor.element_size() >= 2 and bool(tensor.sum().isfinite()):
        return False
    return bool(tensor.isnan().any())


def tensor_kind() -> type[torch.Tensor]:
    """The class of tensors."""
    import torch

    return torch.Tensor


def torch_strided() -> torch.layout:
    """The layout of dense tensors."""
    import torch

    return torch.strided


def local_part(value: torch.Tensor) -> tuple[torch.Tensor, list[int]] | None:
    """This rank's part of a distributed tensor and where it begins; ``None`` for an ordinary one."""
    if not hasattr(value, "placements"):
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(value, DTensor):
        return None
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local().detach(), list(start)


def fingerprint(model_state: Mapping[str, Any], optimizer_kind: str) -> int:
    """Checksum of names, shapes and kinds of the model's tensors and of the optimizer's class."""
    parts = [optimizer_kind]
    for name, value in model_state.items():
        shape = list(getattr(value, "shape", ()))
        parts.append(f"{name}:{getattr(value, 'dtype', type(value).__name__)}:{shape}")
    return zlib.crc32("\n".join(parts).encode())


def fits(header: Header, payload_bytes: int, where: str, expected_fingerprint: int | None) -> None:
    """What can be said without reading the payload; raises `Refused`."""
    if payload_bytes < header.payload_bytes:
        raise Refused(f"{where} is truncated: {payload_bytes} of {header.payload_bytes} bytes")
    if expected_fingerprint is not None and header.fingerprint != expected_fingerprint:
        raise Refused(f"{where} is of another model: names, shapes or kinds of the tensors differ")


def check(header: Header, payload: memoryview, where: str, expected_fingerprint: int | None) -> None:
    """Check a whole save against its header.

    Raises
    ------
    Refused
        Truncated, corrupt, or of another model.
    """
    fits(header, len(payload), where, expected_fingerprint)
    verify(header, payload, where)


def verify(header: Header, payload: memoryview, where: str) -> None:
    """Compare the payload with its checksum; raises `Refused`."""
    if checksum(payload[: header.payload_bytes]) != header.payload_crc:
        raise Refused(f"{where} is corrupt: the checksum of step {header.step} does not fit")


def read_index(header: Header, payload: memoryview) -> Any:
    """The tree of the packed state, as `Plan` wrote it."""
    return json.loads(bytes(payload[: header.index_bytes]))


def unpack(header: Header, payload: memoryview, views: Collection[str] = ()) -> dict[str, Any]:
    """The state that `Plan` packed.

    Parameters
    ----------
    views
        Entries of the state whose tensors lie over ``payload`` itself, gone with the next save there; all
        others are copies.
    """
    data = payload[aligned(header.index_bytes) :]
    kind, pairs = next(iter(read_index(header, payload).items()))
    if kind != "d":
        raise Refused(f"the save of step {header.step} holds no state but a {kind!r}")
    copied = sum(tensor_bytes(value) for key, value in pairs if key not in views)
    space = room(copied)
    unpacker = Unpacker(data, space)
    state = {key: unpacker.decode(value, key in views) for key, value in pairs}
    unpacker.copy()
    return state


def tensor_bytes(node: Any) -> int:
    """Bytes of all tensors under a node of the index, each rounded up to the alignment."""
    if not isinstance(node, dict):
        return 0
    kind, body = next(iter(node.items()))
    if kind in {"d", "o"}:
        return sum(tensor_bytes(part) for pair in body for part in pair)
    if kind == "s":
        return aligned(body[0][3])
    if kind in {"x", "n"}:
        return aligned(body[3])
    return 0 if kind == "b" else sum(map(tensor_bytes, body))


def room(size: int) -> memoryview:
    """Private memory for ``size`` bytes, in large pages where the system gives them."""
    area = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)[:size]


class Unpacker:
    """Turns the index and the bytes of the tensors into a state; see `unpack`.

    Parameters
    ----------
    space
        Where copies go, one after the other: fresh memory for each would cost more than the copy.
    """

    def __init__(self, data: memoryview, space: memoryview) -> None:
        self._data = data
        self._space = space
        self._taken = 0
        self._copies: list[tuple[memoryview, memoryview]] = []

    def copy(self) -> None:
        """Fill the copies, on several threads; until then they hold nothing."""
        move_all(self._copies)
        self._copies.clear()

    def decode(self, node: Any, views: bool) -> Any:
        """One node of the tree."""
        if not isinstance(node, dict):
            return node
        kind, body = next(iter(node.items()))
        if kind in {"d", "o"}:
            pairs = [(self.decode(key, views), self.decode(value, views)) for key, value in body]
            return OrderedDict(pairs) if kind == "o" else dict(pairs)
        if kind == "b":
            return base64.b64decode(body)
        if kind == "s":
            place, shape, start = body
            return Part(tuple(shape), tuple(start), self._tensor(place, views))
        if kind in {"x", "n"}:
            tensor = self._tensor(body, views)
            return tensor if kind == "x" else tensor.numpy()
        parts = [self.decode(part, views) for part in body]
        return parts if kind == "l" else tuple(parts)

    def _tensor(self, body: list[Any], views: bool) -> torch.Tensor:
        import torch

        name, shape, offset, size = body
        dtype = getattr(torch, name)
        if not size:
            return torch.empty(shape, dtype=dtype)
        if views:
            return view_of(body, self._data)
        target = self._space[self._taken : self._taken + size]
        self._taken += aligned(size)
        self._copies.append((target, self._data[offset : offset + size]))
        return torch.frombuffer(target, dtype=dtype).view(shape)


def view_of(body: list[Any], data: memoryview) -> torch.Tensor:
    """A tensor over the packed bytes themselves."""
    import torch

    name, shape, offset, size = body
    return torch.frombuffer(data[offset : offset + size], dtype=getattr(torch, name)).view(shape)
