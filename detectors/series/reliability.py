"""How often a foretelling came true: a logistic law of what was seen, with its weights in a table beside it.

A trend that has just been found may still stall; one that has come far, or that was foretold before and goes on, seldom does. The weights
come from simulated fleets in which a third of all trends stalls before its limit; a real fleet whose trends stall more or less often needs
its own: fit them to what its verdicts came to. ``python -m benchmarks.foretell --fit`` writes the table.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

TABLE = "reliability.csv"
_SOON = 0.01
_SUREST = 0.98
"""Nobody is surer than the fits could show: they saw a few hundred foretellings."""


@dataclass(frozen=True)
class Signs:
    """What tells whether a trend will go on to its limit.

    Attributes
    ----------
    done
        Share of the way from its usual level (or rate) to the limit that it has come, 0 to 1.
    time_share
        (Time to the limit) / (horizon).
    again
        Whether the same series was foretold before and that was taken back, within a day.
    """

    done: float
    time_share: float
    again: bool

    def terms(self) -> dict[str, float]:
        """The terms of the law, by their names in the table."""
        again = float(self.again)
        soon = math.log(self.time_share + _SOON)
        return {"one": 1.0, "done": self.done, "log_time": soon, "again": again, "again_done": again * self.done}


@cache
def weights() -> Mapping[str, float]:
    """Weight of each term.

    Raises
    ------
    ValueError
        The table does not have exactly the terms of `Signs.terms`.
    """
    with (resources.files("detectors.series") / TABLE).open(encoding="utf-8") as lines:
        rows = list(csv.reader(line for line in lines if not line.startswith("#")))[1:]
    found = {name: float(value) for name, value in rows}
    expected = set(Signs(0.0, 0.0, False).terms())
    if set(found) != expected:
        raise ValueError(f"{TABLE} has the terms {sorted(found)}, expected {sorted(expected)}: fit it anew")
    return found


def probability(signs: Signs) -> float:
    """Probability that the limit is reached within the horizon.

    Examples
    --------
    >>> probability(Signs(0.2, 0.5, False)) < probability(Signs(1.0, 0.0, True))
    True
    """
    logit = sum(weights()[name] * value for name, value in signs.terms().items())
    return min(max(1.0 / (1.0 + math.exp(-logit)), 1.0 - _SUREST), _SUREST)
