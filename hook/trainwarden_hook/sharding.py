"""Sharded tensors put together from the parts that some number of ranks saved, for any other number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwarden_hook.packing import Part, Refused

if TYPE_CHECKING:
    import torch

Path = tuple[Any, ...]
Read = Callable[[int, int, int], memoryview]


@dataclass(frozen=True, slots=True)
class Region:
    """A box in a tensor: index of its first element and its size, one number a dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def meet(self, other: Region) -> Region:
        """What both have in common; perhaps nothing (no elements)."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True))
        return Region(start, tuple(max(0, end - first) for first, end in zip(start, ends, strict=True)))

    def within(self, outer: Region) -> tuple[slice, ...]:
        """This box as an index into a tensor that holds ``outer``."""
        return tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(self.start, outer.start, self.shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """One part in a save: which rank saved it, its box, kind, and where its bytes begin among the tensors."""

    saved_rank: int
    region: Region
    dtype: str
    offset: int


def stored_parts(index: Any, saved_rank: int, at: Path = ()) -> Iterator[tuple[Path, tuple[int, ...], Stored]]:
    """Path, whole shape and place of every sharded tensor in the index of one save."""
    if not isinstance(index, dict):
        return
    kind, body = next(iter(index.items()))
    if kind == "s":
        (dtype, part_shape, offset, _), shape, start = body
        yield at, tuple(shape), Stored(saved_rank, Region(tuple(start), tuple(part_shape)), dtype, offset)
    elif kind in {"d", "o"}:
        for key, value in body:
            yield from stored_parts(value, saved_rank, (*at, key))
    elif kind in {"l", "t"}:
        for number, value in enumerate(body):
            yield from stored_parts(value, saved_rank, (*at, number))


class Parts:
    """Every part of one save of the job, by path.

    Parameters
    ----------
    indexes
        The index of each rank's save.
    read
        ``read(saved_rank, offset, size)`` gives bytes of that rank's tensors.
    """

    def __init__(self, indexes: dict[int, Any], read: Read) -> None:
        self._read = read
        self.shapes: dict[Path, tuple[int, ...]] = {}
        self._stored: dict[Path, list[Stored]] = {}
        for saved_rank, index in indexes.items():
            for path, shape, stored in stored_parts(index, saved_rank):
                if self.shapes.setdefault(path, shape) != shape:
                    raise Refused(f"{dotted(path)} has shape {list(shape)} for one rank and another for the others")
                self._stored.setdefault(path, []).append(stored)

    def cut(self, path: Path, wanted: Region) -> torch.Tensor:
        """The elements of ``wanted``, from whichever parts hold them.

        Raises
        ------
        Refused
            The parts do not cover it.
        OSError
            A holder cannot be read.
        """
        import torch

        stored = self._stored.get(path, [])
        if not stored:
            raise Refused(f"{dotted(path)} is in none of the saves")
        target = torch.empty(wanted.shape, dtype=getattr(torch, stored[0].dtype))
        filled = sum(self._fill(target, wanted, part) for part in _distinct(stored))
        if filled != wanted.elements:
            raise Refused(f"{dotted(path)} is incomplete: {filled} of {wanted.elements} elements are in the saves")
        return target

    def _fill(self, target: torch.Tensor, wanted: Region, part: Stored) -> int:
        common = wanted.meet(part.region)
        if not common.elements:
            return 0
        target[common.within(wanted)] = self._rows(part, common)
        return common.elements

    def _rows(self, part: Stored, common: Region) -> torch.Tensor:
        """The box ``common`` of a part; read are the whole rows (of the first dimension) that it lies in."""
        import torch

        dtype = getattr(torch, part.dtype)
        if not part.region.shape:
            return torch.frombuffer(self._read(part.saved_rank, part.offset, dtype.itemsize), dtype=dtype).view(())
        row_shape = part.region.shape[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        first, count = common.start[0] - part.region.start[0], common.shape[0]
        data = self._read(part.saved_rank, part.offset + first * row_bytes, count * row_bytes)
        rows = torch.frombuffer(data, dtype=dtype).view(count, *row_shape)
        held = Region((common.start[0], *part.region.start[1:]), (count, *row_shape))
        return rows[common.within(held)]


def _distinct(stored: list[Stored]) -> list[Stored]:
    """One of each box: replicas of a shard lie on several ranks."""
    return list({part.region: part for part in reversed(stored)}.values())


def dotted(path: Path) -> str:
    """A path for people."""
    return ".".join(map(str, path))


Leaf = Callable[[Path, Any], Any]


def rebuild(state: Any, leaf: Leaf, at: Path = ()) -> Any:
    """A copy of a nested state in which ``leaf(path, tensor or part)`` has replaced every tensor and part."""
    import torch

    if isinstance(state, (torch.Tensor, Part)):
        return leaf(at, state)
    if isinstance(state, dict):
        made = type(state)()
        made.update((key, rebuild(value, leaf, (*at, key))) for key, value in state.items())
        return made
    if isinstance(state, (list, tuple)):
        return type(state)(rebuild(value, leaf, (*at, number)) for number, value in enumerate(state))
    return state
