"""The score of the Numenta Anomaly Benchmark, standard profile (Lavin and Ahmad, 2015): early alarms earn more, every false row costs.

The published leader board picks the one threshold over the whole corpus that makes this score best, with the labels: an optimum, not
something an operator can have. `score_at` gives the same score for alarms that were raised without labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.data import Spans
from benchmarks.detect.methods.base import F64

FALSE_ALARM_COST = 0.11
FAR_BEHIND = 3.0


@dataclass(frozen=True)
class NabFile:
    """One file after its probation: what an alarm on each row is worth, and which window the row is in (-1: none)."""

    worth: F64
    window: NDArray[np.int64]
    windows: int


@dataclass(frozen=True)
class NabScore:
    """Normalised score (0: silent, 100: perfect) and the threshold that gave it."""

    score: float
    threshold: float


def sigmoid_worth(position: F64) -> F64:
    """NAB's scaled sigmoid: near 1 at the left edge of a window (-1), 0 at its right edge, -1 far behind it."""
    worth = 2 / (1 + np.exp(5 * np.minimum(position, FAR_BEHIND))) - 1
    return np.where(position > FAR_BEHIND, -1.0, worth)


def nab_file(rows: int, spans: Spans) -> NabFile:
    """Worth of an alarm on each row."""
    at = np.arange(rows)
    worth, window = np.full(rows, -FALSE_ALARM_COST), np.full(rows, -1)
    best = float(sigmoid_worth(np.array([-1.0]))[0])
    for number, (start, end) in enumerate(spans):
        width = end - start + 1
        behind = at > end
        worth[behind] = FALSE_ALARM_COST * sigmoid_worth((at[behind] - end) / (width - 1))
        inside = (at >= start) & (at <= end)
        worth[inside] = sigmoid_worth(-(end - at[inside] + 1) / width) / best
        window[inside] = number
    return NabFile(worth, window, len(spans))


def best_score(files: list[NabFile], scores: list[F64]) -> NabScore:
    """Best normalised score over all thresholds common to the files: uses the labels, as the published leader board does."""
    gains = np.concatenate([gain(file, score) for file, score in zip(files, scores, strict=True)])
    flat = np.concatenate(scores)
    order = np.argsort(-flat, kind="stable")
    totals, lines = np.cumsum(gains[order]), flat[order]
    last_of_tie = np.append(lines[1:] != lines[:-1], True)
    totals, lines = totals[last_of_tie], lines[last_of_tie]
    top = int(np.argmax(totals))
    if totals[top] <= 0:
        return NabScore(0.0, float("inf"))
    return NabScore(normalised(files, float(totals[top])), float(lines[top]))


def gain(file: NabFile, scores: F64) -> F64:
    """What each row adds to the raw score when the threshold sinks to it, over a detector that stays silent."""
    out = np.where(file.window < 0, file.worth, 0.0)
    for number in range(file.windows):
        rows = np.flatnonzero(file.window == number)
        rows = rows[np.argsort(-scores[rows], kind="stable")]
        reached = np.maximum.accumulate(np.concatenate(([-1.0], file.worth[rows])))
        out[rows] = np.diff(reached)
    return np.asarray(out, np.float64)


def score_at(files: list[NabFile], alarms: list[NDArray[np.bool_]]) -> float:
    """Normalised score of given alarms."""
    return normalised(files, sum(gain_at(file, alarm) for file, alarm in zip(files, alarms, strict=True)))


def gain_at(file: NabFile, alarms: NDArray[np.bool_]) -> float:
    """Raw score of given alarms on one file, over a detector that stays silent."""
    total = float(file.worth[alarms & (file.window < 0)].sum())
    for number in range(file.windows):
        hits = file.worth[alarms & (file.window == number)]
        total += float(hits.max()) + 1.0 if len(hits) else 0.0
    return total


def normalised(files: list[NabFile], over_silence: float) -> float:
    """0 for silence, 100 for an alarm at the start of every window and no other."""
    return scaled(over_silence, sum(file.windows for file in files))


def scaled(over_silence: float, windows: int) -> float:
    """Raw score over silence on NAB's scale of 100."""
    return 100.0 * over_silence / (2.0 * windows) if windows else float("nan")
