"""Ours against floors: pairs by seed, a chance that is exact, and what asking often costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.relation.paired import against, chance, holm
from benchmarks.relation.scenarios import Slot
from benchmarks.relation.score import Marked, Sheet

SLOT = Slot(0, "node", ("weak_node",), 1.1, 200.0, 320.0, (("node", "n00001"),))


def sheet(name: str, right: list[bool]) -> Sheet:
    """One slot per seed."""
    return Sheet(name, [Marked(seed, 128, SLOT, int(ok), 0, 0, ok) for seed, ok in enumerate(right)])


@pytest.mark.parametrize(
    ("away", "expected"), [([1] * 6, 1 / 64), ([1] * 6 + [0] * 9, 1 / 64), ([2, 1, -1], 3 / 8), ([-1, -1], 1.0)]
)
def test_the_chance_is_the_share_of_signs_that_favour_ours_as_much(away: list[int], expected: float) -> None:
    assert chance(away) == pytest.approx(expected)


def test_many_pairs_are_drawn_and_come_close() -> None:
    away = np.random.default_rng(3).normal(0.4, 1.0, 24)
    normal = 0.5 * math.erfc(float(away.sum() / np.sqrt(2.0 * np.square(away).sum())))
    assert chance(away.tolist()) == pytest.approx(normal, abs=0.01)
    assert chance([1.0] * 24) < 1e-4


def test_holm_keeps_the_order_and_never_lowers_a_chance() -> None:
    asked = {"a": 0.001, "b": 0.02, "c": 0.02, "d": 0.9}
    found = holm(asked)
    assert found == {"a": 0.004, "b": 0.06, "c": 0.06, "d": 0.9}


def test_a_floor_counts_at_the_line_at_which_it_is_hardest_to_beat() -> None:
    sheets = {
        ("ours", 128): sheet("ours", [True] * 8),
        ("mad@0", 128): sheet("mad@0", [False] * 8),
        ("mad@0.001", 128): sheet("mad@0.001", [True] * 7 + [False]),
        ("ours_without_edges", 128): sheet("x", [False] * 8),
    }
    found = against(sheets)
    assert set(found) == {"mad|node"}, "ablations are no floors, and groups without slots are not asked"
    row = found["mad|node"]
    assert (row["line"], row["seeds"], row["better"], row["worse"]) == ("mad@0.001", 8, 1, 0)
    assert row["p"] == row["p_holm"] == 0.5
    assert row["pairs"][0] == [128, 0, 1, 1, 1]
