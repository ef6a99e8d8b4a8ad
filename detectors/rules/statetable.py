"""The table of device states, and the test of each over all rows of a family at once."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from detectors.base import F32, FamilyMatrix

TESTS = frozenset({"above", "below", "bits", "below_metric", "below_peers", "below_usual", "rise", "rows_missing"})
GATES = frozenset({"", "busy", "rail"})
_BUSY = ("busy_ratio", "gpu_util_ratio", "sm_active_ratio")
_BUSY_RATIO = 0.3
_LEAST_PEERS = 4


@dataclass(frozen=True)
class StateRule:
    """One row of the table.

    Attributes
    ----------
    metric, against
        Names of the same thing, the first that a family has is taken; `against` is what `below_metric` compares with, and where it is
        known, peers are not asked (`below_peers`).
    hold_s
        How long the state must stand before it is said. Time without it counts back.
    clear_s
        It is taken back after so long without it; infinite = sticky.
    shared
        A state that a rack has as a whole when its cooling or power fails.
    """

    state: str
    family: str
    metric: tuple[str, ...]
    test: str
    limit: float
    against: tuple[str, ...]
    gate: str
    hold_s: float
    clear_s: float
    shared: bool
    action: str
    meaning: str
    remedy: str
    source: str

    def holds(self, matrix: FamilyMatrix, usual: F32) -> NDArray[np.bool_]:
        """Which rows are in this state now; a value that is not known is in none.

        Parameters
        ----------
        usual
            What `follow` made of earlier ticks: the lowest (`rise`) or the highest (`below_usual`) value of each row.
        """
        value = first_known(matrix, self.metric)
        if value is None:
            return np.zeros(len(matrix.entities), dtype=np.bool_)
        with np.errstate(invalid="ignore"):
            found = self._test(matrix, value, usual)
            return np.asarray(found & gate_open(self.gate, matrix)) if self.gate and found.any() else found

    def follow(self, matrix: FamilyMatrix, usual: F32) -> F32:
        """What is usual after this tick: counts start again where they fall, the highest value is kept."""
        value = first_known(matrix, self.metric)
        if value is None or self.test not in ("rise", "below_usual"):
            return usual
        keep = np.fmin if self.test == "rise" else np.fmax
        return np.asarray(keep(usual, value), dtype=np.float32)

    def _test(self, matrix: FamilyMatrix, value: F32, usual: F32) -> NDArray[np.bool_]:
        if self.test == "bits":
            return _has_bits(value, int(self.limit))
        if self.test in ("above", "rise"):
            return np.asarray(value > self.limit + (usual if self.test == "rise" else 0.0))
        if self.test == "below_metric":
            most = first_known(matrix, self.against)
            return (
                np.asarray((value > 0) & (value < self.limit * most))
                if most is not None
                else np.zeros(len(value), dtype=np.bool_)
            )
        if self.test == "below_peers":
            if first_known(matrix, self.against) is not None:
                return np.zeros(len(value), dtype=np.bool_)
            return below_peers(value, self.limit, gate_open(self.gate, matrix))
        return np.asarray(value < (usual * self.limit if self.test == "below_usual" else self.limit))


def _has_bits(value: F32, bits: int) -> NDArray[np.bool_]:
    found = np.asarray(value >= (bits & -bits))
    found[found] = (value[found].astype(np.int64) & bits) > 0
    return found


def first_known(matrix: FamilyMatrix, names: tuple[str, ...]) -> F32 | None:
    """The first of these metrics that the family has."""
    return next((matrix.column(name) for name in names if name in matrix.metrics), None)


def gate_open(gate: str, matrix: FamilyMatrix) -> NDArray[np.bool_]:
    """Rows in which a rule with this gate is looked at."""
    if gate == "rail" and "role" in matrix.metrics:
        role = np.nan_to_num(matrix.column("role"))
        return np.asarray((role == 0) | (role == 1))
    busy = first_known(matrix, _BUSY) if gate == "busy" else None
    return np.ones(len(matrix.entities), dtype=np.bool_) if busy is None else np.asarray(~(busy < _BUSY_RATIO))


def below_peers(value: F32, ratio: float, counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows below `ratio` of what most rows have: the commonest value, if at least four and two thirds of the rows have it."""
    known = value[counted & np.isfinite(value) & (value > 0)]
    values, counts = np.unique(known, return_counts=True)
    if not known.size or counts.max() < max(_LEAST_PEERS, 2 / 3 * known.size):
        return np.zeros(len(value), dtype=np.bool_)
    return np.asarray((value > 0) & (value < ratio * values[int(np.argmax(counts))]))


@cache
def state_rules() -> tuple[StateRule, ...]:
    """The shipped table.

    Raises
    ------
    ValueError
        A row has an unknown test or gate; the message names row and key.
    """
    text = resources.files("detectors.rules").joinpath("states.csv").read_text(encoding="utf-8")
    return tuple(parse_row(row, number) for number, row in enumerate(csv.DictReader(text.splitlines()), start=2))


def parse_row(row: dict[str, str], number: int) -> StateRule:
    """A rule from one line of the table."""
    for key, known in (("test", TESTS), ("gate", GATES)):
        if row[key] not in known:
            raise ValueError(
                f"states.csv line {number} ({row['state']}): {key} is {row[key]!r}, expected one of {sorted(known)}"
            )
    names = {key: tuple(row[key].split("|")) if row[key] else () for key in ("metric", "against")}
    clear_s = float("inf") if row["clear_s"] == "sticky" else float(row["clear_s"])
    return StateRule(row["state"], row["family"], names["metric"], row["test"], float(row["limit"]), names["against"], row["gate"],
                     float(row["hold_s"]), clear_s, row["shared"] == "yes", row["action"], row["meaning"], row["remedy"],
                     row["source"])  # fmt: skip
