"""Real distributions as quantile functions (see `marginals/SOURCE.md`)."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

import numpy as np

from collectors.simulated.noise import F64


@cache
def table() -> dict[str, F64]:
    """Columns by name; ``quantile`` is the grid of all others."""
    text = files("collectors.simulated").joinpath("marginals/acme_quantiles.csv").read_text(encoding="ascii")
    rows = list(csv.DictReader(text.splitlines()))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def quantile(name: str, probability: F64) -> F64:
    """Values of the real distribution `name` at `probability` (any shape).

    Examples
    --------
    >>> float(quantile("gpu_power_w", np.array(0.9)).round())
    404.0
    """
    columns = table()
    return np.interp(probability, columns["quantile"], columns[name])
