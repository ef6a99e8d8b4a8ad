"""Ours against a floor, seed by seed: the pairs, an exact test of them, and what remains of it when many floors are asked at once.

A pair is what both got exactly right on the same seed's slots of one group. If neither were better, each pair could as well be the other
way round: the chance is the share of all 2^n ways to turn pairs round that favour ours at least as much as what was seen. A floor has
several lines, and whoever claims to be better than it must be better at each: its chance is the largest of theirs. Holm's correction is
over all floors and groups of one table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.relation.scenarios import GROUPS
from benchmarks.relation.score import Sheet

MOST_ENUMERATED = 18
DRAWN = 200_000
Sheets = Mapping[tuple[str, int], Sheet]


def pairs(mine: Sheet, theirs: Sheet, group: str) -> list[tuple[int, int, int, int]]:
    """(seed, slots, right by ours, right by theirs) of the seeds that have slots of the group."""
    found = []
    for seed in sorted({m.seed for m in mine.slots if m.slot.group == group}):
        one, other = (
            [m.exact for m in sheet.slots if m.seed == seed and m.slot.group == group] for sheet in (mine, theirs)
        )
        if len(one) == len(other):
            found.append((seed, len(one), sum(one), sum(other)))
    return found


def chance(away: Sequence[float]) -> float:
    """How likely a sum at least as large is if every difference could have had either sign; exact up to 18 that are not zero.

    Examples
    --------
    >>> chance([1, 2, 0, 1]), chance([1, -1]), chance([])
    (0.125, 0.75, 1.0)
    """
    sizes = np.abs(np.array([d for d in away if d], dtype=np.float64))
    if not sizes.size:
        return 1.0
    if sizes.size <= MOST_ENUMERATED:
        signs = np.array(list(product((1.0, -1.0), repeat=sizes.size)))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), (DRAWN, sizes.size))
    return float(np.mean(signs @ sizes >= sum(away) - 1e-9))


def holm(chances: Mapping[str, float]) -> dict[str, float]:
    """Chances as Holm corrects them for having asked as often as there are entries.

    Examples
    --------
    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    found: dict[str, float] = {}
    least = 0.0
    for number, (name, value) in enumerate(sorted(chances.items(), key=lambda item: (item[1], item[0]))):
        least = max(least, min(1.0, (len(chances) - number) * value))
        found[name] = round(least, 6)
    return found


def against(sheets: Sheets) -> dict[str, dict[str, Any]]:
    """``floor|group``: pairs over all sizes against the floor's hardest line, differences, chance, and that after Holm's correction."""
    lines = sorted({name for name, _ in sheets if "@" in name})
    floors = sorted({name.partition("@")[0] for name in lines})
    found: dict[str, dict[str, Any]] = {}
    for floor in floors:
        for group in GROUPS:
            rows = [_line(sheets, line, group) for line in lines if line.partition("@")[0] == floor]
            hardest = max(rows, key=lambda row: (row["p"], -row["more_right"]))
            if hardest["seeds"]:
                found[f"{floor}|{group}"] = hardest
    corrected = holm({name: row["p"] for name, row in found.items()})
    return {name: row | {"p_holm": corrected[name]} for name, row in found.items()}


def _line(sheets: Sheets, line: str, group: str) -> dict[str, Any]:
    every = [(size, *pair) for name, size in sorted(sheets) if name == line and ("ours", size) in sheets
             for pair in pairs(sheets["ours", size], sheets[line, size], group)]  # fmt: skip
    away = [ours - theirs for _, _, _, ours, theirs in every]
    return {
        "line": line, "seeds": len(every), "slots": sum(row[2] for row in every), "more_right": sum(away),
        "better": sum(d > 0 for d in away), "worse": sum(d < 0 for d in away), "p": chance(away),
        "pairs": [list(row) for row in every],
    }  # fmt: skip
