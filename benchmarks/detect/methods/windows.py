"""Windows of consecutive rows as feature vectors, and scores of windows back to rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.detect.methods.base import F64


def embed(rows: F64, width: int) -> F64:
    """Every window of `width` rows as one vector, [T - width + 1, width * F]."""
    return np.ascontiguousarray(sliding_window_view(rows, width, axis=0).reshape(len(rows) - width + 1, -1))


def centred(scores: F64, width: int) -> F64:
    """Window scores to row scores: a window's score belongs to its middle row (not online)."""
    return np.pad(scores, (math.ceil((width - 1) / 2), (width - 1) // 2), mode="edge")


def continued(history: F64, rows: F64, width: int) -> F64:
    """Windows that end at each of `rows`, the first ones reaching back into `history`; one window a row."""
    before = history[-(width - 1) :] if width > 1 else history[:0]
    short = width - 1 - len(before)
    padded = np.concatenate([np.repeat(rows[:1] if not len(before) else before[:1], short, axis=0), before, rows])
    return embed(padded, width)


def standardised(train: F64, *others: F64) -> list[F64]:
    """All arrays less the mean of `train`, over its standard deviation (constant columns: 1)."""
    spread = train.std(axis=0)
    spread[spread == 0] = 1.0
    return [(rows - train.mean(axis=0)) / spread for rows in (train, *others)]
