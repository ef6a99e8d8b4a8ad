"""VUS-PR against its definition written out, against known cases, and against what TSB-AD published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.detect import data
from benchmarks.detect.evaluate import buffer_width
from benchmarks.detect.methods.base import F64
from benchmarks.detect.methods.pca_tsb import PcaTsb
from benchmarks.detect.metrics.vus import merge, period, vus_pr
from benchmarks.detect.published import TOLERANCE, values


def slow_vus_pr(scores: F64, spans: data.Spans, width: int, thresholds: int) -> float:
    """The definition, one threshold, buffer width, span and row at a time."""
    rows = len(scores)
    inside = {row for start, end in spans for row in range(start, end + 1)}
    lines = [sorted(scores, reverse=True)[at] for at in np.linspace(0, rows - 1, thresholds).astype(int)]
    areas = []
    for buffer in range(width + 1):
        soft = dict.fromkeys(inside, 1.0)
        for start, end in spans:
            for step in range(1, buffer // 2 + 1):
                for row in (start - step, end + step):
                    if 0 <= row < rows and row not in inside:
                        soft[row] = min(1.0, soft.get(row, 0.0) + (1 - step / buffer) ** 0.5)
        area, last_recall = 0.0, 0.0
        groups = merge(spans, buffer // 2, rows)
        for line in lines:
            alarms = {row for row in range(rows) if scores[row] >= line}
            hit = sum(soft.get(row, 0.0) for row in alarms)
            edge = sum(value for row, value in soft.items() if row in alarms and row not in inside)
            touched = sum(any(row in alarms for row in range(start, end + 1)) for start, end in groups) / len(groups)
            recall = min(hit / (len(inside) + edge / 2), 1.0) * touched
            area += (recall - last_recall) * hit / len(alarms)
            last_recall = recall
        areas.append(area)
    return sum(areas) / len(areas)


@given(
    st.lists(st.integers(0, 9), min_size=30, max_size=80),
    st.lists(st.tuples(st.integers(0, 29), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_equals_the_definition(levels: list[int], pieces: list[tuple[int, int]], width: int) -> None:
    scores = np.array(levels, np.float64)
    label = np.zeros(len(scores), bool)
    for start, length in pieces:
        label[start : start + length] = True
    spans = data.spans_of(label)
    assert vus_pr(scores, spans, width, thresholds=20) == pytest.approx(slow_vus_pr(scores, spans, width, 20))


def test_one_span_found_first_is_perfect_without_a_buffer() -> None:
    scores = np.zeros(100)
    scores[40:50] = 1.0
    assert vus_pr(scores, ((40, 49),), 0) == pytest.approx(1.0)


def test_half_a_span_found_first_by_hand() -> None:
    # 4 rows, the two labelled rank 1st and 3rd: thresholds at ranks 1..4 give precision 1, 1/2, 2/3, 1/2 and recall 1/2, 1/2, 1, 1
    assert vus_pr(np.array([4.0, 3.0, 2.0, 1.0]), ((0, 0), (2, 2)), 0, 4) == pytest.approx(0.5 * 0.5 * 1 + 0.75 * 2 / 3)


def test_random_scores_stay_near_the_anomaly_ratio() -> None:
    rng = np.random.default_rng(3)
    spans = tuple((start, start + 19) for start in range(100, 20_000, 1000))
    assert 0.02 < vus_pr(rng.random(20_000), spans, 20) < 0.05


def test_only_the_order_of_scores_counts() -> None:
    scores = np.random.default_rng(4).random(500)
    assert vus_pr(scores, ((100, 120),), 30) == pytest.approx(vus_pr(np.exp(9 * scores), ((100, 120),), 30))


def test_a_buffer_forgives_a_small_lag() -> None:
    late = np.zeros(400)
    late[105:125] = 1.0
    assert vus_pr(late, ((100, 119),), 40) > vus_pr(late, ((100, 119),), 0)


def test_nothing_labelled_has_no_surface() -> None:
    assert np.isnan(vus_pr(np.arange(10.0), (), 5))


def test_spans_whose_buffers_meet_become_one() -> None:
    assert merge(((5, 6), (10, 11), (30, 31)), 2, 32) == [(3, 13), (28, 31)]


def test_period_is_the_lag_of_the_highest_peak() -> None:
    wave = np.sin(2 * np.pi * np.arange(5000) / 48) + np.random.default_rng(0).normal(0, 0.1, 5000)
    assert period(wave) == 48


def test_period_of_a_constant_or_a_very_short_season_is_the_fallback() -> None:
    assert period(np.ones(1000)) == 125
    assert period(np.tile([0.0, 1.0], 500)) == 125


@pytest.mark.parametrize("machine", ["machine-2-7", "machine-2-8"])
def test_pca_gives_what_tsb_ad_published(machine: str) -> None:
    labelled = data.load("smd", machine)
    ours = vus_pr(PcaTsb().score(labelled.series.test), labelled.labels.spans, buffer_width(labelled))
    assert ours == pytest.approx(values("smd")[machine]["PCA"], abs=TOLERANCE)
