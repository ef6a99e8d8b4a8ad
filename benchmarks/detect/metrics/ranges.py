"""Range-based precision and recall (Tatbul et al., NeurIPS 2018), with the parameters of TSB-AD.

Existence weight 0.2 for recall and 0 for precision, flat bias, 1/x for x pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.data import Spans, spans_of

EXISTENCE_WEIGHT = 0.2


@dataclass(frozen=True)
class RangeScore:
    """Range-based precision, recall and their harmonic mean, each 0..1."""

    precision: float
    recall: float
    f1: float


def range_score(alarms: NDArray[np.bool_], spans: Spans) -> RangeScore:
    """Precision, recall and F1 of runs of alarms against labelled spans."""
    runs = spans_of(alarms)
    recall = reward(spans, runs, EXISTENCE_WEIGHT)
    precision = reward(runs, spans, 0.0)
    both = precision + recall
    return RangeScore(precision, recall, 2 * precision * recall / both if both else 0.0)


def reward(wanted: Spans, given: Spans, existence_weight: float) -> float:
    """Mean over `wanted` of how well `given` covers it: a part for being touched, a part for the share covered over the pieces."""
    if not wanted:
        return 0.0
    total = 0.0
    for start, end in wanted:
        pieces = [min(end, last) - max(start, first) + 1 for first, last in given if first <= end and last >= start]
        if pieces:
            covered_ratio = sum(pieces) / (end - start + 1) / len(pieces)
            total += existence_weight + (1 - existence_weight) * covered_ratio
    return total / len(wanted)
