"""What every detector under test looks like, ours and the peers' alike.

A method is a file in this folder with one subclass of `Method`. Foreign packages are imported inside `fit` or `score`, never at the
top, so that a missing one is reported as such and the rest still runs.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Family = Literal["uni", "multi", "any"]


class Method(ABC):
    """One detector: learns from unlabelled rows, then scores the rows that follow them.

    The runner makes a new object, calls `fit` once and `score` once. Rows are equally spaced samples, columns are metrics; there are
    no NaN. `score` gets the rows that directly follow the last row given to `fit`, so what `fit` saw last is the history of the
    first row to score. Labels never reach a method.

    To set the label-free line the runner also fits a second object on the first part of the training rows and scores their end, so
    scores must mean the same from fit to fit: no ranking within the rows given to `score`.
    """

    name: ClassVar[str]
    """Short and unique; how the tables and `--methods` call it."""
    family: ClassVar[Family]
    """`uni`: one column (NAB). `multi`: many columns (SMD, ASD). `any`: both."""
    paper: ClassVar[str]
    """Where the method is from: paper, package, or one phrase for a plain formula."""
    ours: ClassVar[bool] = False
    online: ClassVar[bool] = False
    """True when score[t] depends on rows up to t only; checked by a test that cuts the rows."""
    seeded: ClassVar[bool] = False
    """True when the seed matters: such a method is run once a seed, the others once."""
    calibrated: ClassVar[bool] = False
    """True when one value of the score means the same on every series (a tail probability, a robust z)."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages (import names) that must be there."""
    depends: ClassVar[tuple[str, ...]] = ()
    """Our own modules whose source is part of this method's version, such as `detectors.series`."""
    most_rows: ClassVar[int | None] = None
    """Most training rows it can take in reasonable time; of more, every n-th is given to it, and the output says so."""
    step_s: float = 60.0
    """Seconds between two rows; the runner sets it before `fit`."""

    @classmethod
    def prepare(cls) -> None:
        """Import (and compile) what the method needs; not counted as its time, but as its memory."""
        for package in cls.needs:
            foreign(package)

    @abstractmethod
    def fit(self, train: F64, seed: int) -> None:
        """Learn from rows `train` [T, F], which may hold anomalies nobody labelled."""

    @abstractmethod
    def score(self, test: F64) -> F64:
        """Score of each row of `test` [T, F]: higher is more anomalous, finite, length T."""


def foreign(module: str) -> Any:
    """Import a package that only the benchmark's environment has."""
    return importlib.import_module(module)
