"""Random numbers that depend on (seed, purpose, place in time) only: asking in another order, or not at all, changes nothing else."""

from __future__ import annotations

import zlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

_MASK = (1 << 64) - 1


class Noise:
    """Streams of one seed.

    Examples
    --------
    >>> Noise(3).stream("gpu", 7).random() == Noise(3).stream("gpu", 7).random()
    True
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def stream(self, purpose: str, *place: int) -> np.random.Generator:
        """The generator for `purpose` at `place` (tick, job, step...); at most two numbers."""
        high, low = (*place, 0, 0)[:2]
        counter = np.array([0, 0, low & _MASK, high & _MASK], dtype=np.uint64)
        key = np.array([self._seed & _MASK, zlib.crc32(purpose.encode())], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Drift:
    """First-order autoregressive noise of unit variance, advanced once per tick or step.

    Parameters
    ----------
    phi
        Correlation of neighbours in time.
    """

    def __init__(self, shape: tuple[int, ...], phi: float, first: np.random.Generator) -> None:
        self._phi = np.float32(phi)
        self._fresh = np.float32((1.0 - phi * phi) ** 0.5)
        self.value: F32 = first.standard_normal(shape, dtype=np.float32)

    def advance(self, stream: np.random.Generator) -> F32:
        """The next value."""
        fresh = stream.standard_normal(self.value.shape, dtype=np.float32)
        self.value = self._phi * self.value + self._fresh * fresh
        return self.value
