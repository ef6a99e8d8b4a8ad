"""Checksums of the parameters, which replicas must have in common: a flipped bit in one of them shows and names its rank.

A step pays for one chunk at most: chunks are hashed in turn, one every so many steps, and what is reported is the sum of the
newest hashes of all. A parameter that differs therefore shows from the turn of its chunk on, in every later check. Which chunk
is hashed in which step follows from the step's number alone, so that all ranks do the same without a word.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger("trainwarden.hook")
EVERY_STEPS = 10
CHUNK_BYTES = 1 << 19
DEVICE_CHUNK_BYTES = 1 << 26
MAX_SLICES = 32
BITS = 24
"""A value from a device travels as float32, and the store keeps float32, which is exact to 24 bits."""
MAX_FAILURES = 3
WORD_BYTES = 8
Slice = tuple[int, int, int]


def plan_chunks(sizes: list[tuple[int, int]], chunk_bytes: int) -> list[list[Slice]]:
    """Cut parameters of (numbers, bytes of a number) into chunks of slices (parameter, from, to).

    >>> plan_chunks([(10, 4), (3, 4)], 24)
    [[(0, 0, 6)], [(0, 6, 10), (1, 0, 2)], [(1, 2, 3)]]
    """
    chunks: list[list[Slice]] = [[]]
    left = chunk_bytes
    for number, (count, width) in enumerate(sizes):
        start = 0
        while start < count:
            if left < width or len(chunks[-1]) >= MAX_SLICES:
                chunks.append([])
                left = chunk_bytes
            stop = min(count, start + left // width)
            chunks[-1].append((number, start, stop))
            left -= (stop - start) * width
            start = stop
    return [chunk for chunk in chunks if chunk]


class Checksums:
    """Of one model; used by the training thread after the optimizer has stepped.

    Parameters
    ----------
    every
        Steps between checks; every rank must have the same.
    chunk_bytes
        What one check reads at most; every rank must have the same. Default: half a MiB, 64 on a device.
    """

    def __init__(self, parameters: list[torch.Tensor], every: int = EVERY_STEPS, chunk_bytes: int = 0) -> None:
        import torch

        self._parameters = [parameter.detach() for parameter in parameters if parameter.numel()]
        self.every = max(1, every)
        on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        size = chunk_bytes or (CHUNK_BYTES if on_host else DEVICE_CHUNK_BYTES)
        self._chunks = plan_chunks([(p.numel(), p.element_size()) for p in self._parameters], size)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._hashes = torch.zeros(max(1, len(self._chunks)), dtype=torch.int64, device=device)
        self._seen = 0
        self.failures = 0

    def take(self, step: int) -> Any:
        """The checksum after ``step`` (number or device tensor); ``None`` without a check, and until all chunks have had a turn."""
        if step % self.every or not self._chunks or self.failures >= MAX_FAILURES:
            return None
        try:
            return self._take(step // self.every % len(self._chunks))
        except Exception:
            # a parameter on another device, or replaced by another kind: the step is reported without
            self.failures += 1
            if self.failures == 1:
                log.exception("the parameters have no checksum in step %d; training goes on", step)
            return None

    def _take(self, turn: int) -> Any:
        words = [_words(self._parameters[number].view(-1)[start:stop]) for number, start, stop in self._chunks[turn]]
        total = words[0]
        for word in words[1:]:
            # not a plain sum: the same change in two parameters would cancel where they are tied with opposite signs
            total = total * 31 + word
        self._hashes[turn] = total
        self._seen += 1
        if self._seen < len(self._chunks):
            return None
        return _fold(self._hashes.sum())


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Sum of the numbers' bits as whole numbers, wrapping at 64 bits: a single flipped bit always changes it."""
    import torch

    width = numbers.element_size()
    aligned = numbers.data_ptr() % WORD_BYTES == 0
    whole = numbers.numel() * width // WORD_BYTES * WORD_BYTES // width if aligned else 0
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    total = numbers[whole:].view(plain).sum(dtype=torch.int64)
    return total + numbers[:whole].view(torch.int64).sum() if whole else total


def _fold(total: torch.Tensor) -> Any:
    """`BITS` of the sum in which each of its 64 has a say."""
    mask = (1 << BITS) - 1
    if total.device.type == "cpu":
        number = int(total.item())
        return float((number ^ (number >> BITS) ^ (number >> (2 * BITS))) & mask)
    return (total ^ (total >> BITS) ^ (total >> (2 * BITS))) & mask
