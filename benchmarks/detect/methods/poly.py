"""POLY: a polynomial through the neighbourhood of each block of rows, scored by the block's misfit; TSB-AD's cheap second best."""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.metrics.vus import period

POWER = 4


class Poly(Method):
    """Blocks of one period; the polynomial of degree 4 never sees the block it is held against. Sees the whole series at once."""

    name = "poly"
    family = "uni"
    paper = "TSB-AD (NeurIPS 2024), POLY (TSB-UAD, VLDB 2022); transductive"
    depends = ("benchmarks.detect.metrics.vus",)

    def fit(self, train: F64, seed: int) -> None:
        self.history = train

    def score(self, test: F64) -> F64:
        values = np.concatenate([self.history, test])[:, 0]
        return block_misfit(values, period(values))[-len(test) :]


def block_misfit(values: F64, width: int) -> F64:
    """Distance of each block from its neighbourhood's polynomial; zero in the first tenth (at most 500 rows)."""
    low, high = values.min(), values.max()
    scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
    out = np.zeros(len(values))
    first = math.ceil(min(500, len(values) // 10) / width)
    for start in range(first * width, len(values), width):
        block = scaled[start : start + width]
        misfit = block - fitted(scaled, start, width)[: len(block)]
        out[start : start + width] = np.linalg.norm(misfit) / math.sqrt(len(block))
    return out


def fitted(values: F64, start: int, width: int) -> F64:
    """The polynomial over one block, from the rows around it."""
    rows = neighbourhood(len(values), start, width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape = np.poly1d(np.polyfit(rows, values[rows], POWER))
    whole = start + width <= len(values)
    at = np.linspace(start, start + width, width) if whole else np.arange(start, len(values))
    return np.asarray(shape(at), np.float64)


def neighbourhood(rows: int, start: int, width: int) -> NDArray[np.int64]:
    """Rows around a block but not in it: five block lengths on both sides, shifted inwards at the ends."""
    reach = min(max(10 * width, 100), rows)
    half = reach // 2
    if start + half >= rows:
        first, last = rows - reach, rows
    elif start - half > 0 or start + width >= reach:
        first, last = max(start - half, 0), start + half
    else:
        first, last = 0, reach
    return np.concatenate([np.arange(first, start), np.arange(min(start + width, last), last)])
