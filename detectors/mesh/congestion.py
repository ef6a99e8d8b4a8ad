"""Whether probes are raised everywhere, or only through one shared part."""

from __future__ import annotations

import numpy as np

from detectors.mesh.parts import LEAF, RAIL, SWITCH, Parts
from detectors.state import Array

_LEAST_WITNESSES = 3


def raised_everywhere(parts: Parts, raised: Array, known: Array, share: float) -> bool:
    """Whether at least `share` of the known probes is raised, and also of those that do not pass any one leaf, switch or rail.

    Where all nodes hang at one leaf, that leaf and the fabric are the same to the probes.
    """
    told = known | raised
    if not told.any() or raised[told].mean() < share:
        return False
    kinds = parts.kinds
    shared = np.flatnonzero((kinds == LEAF) | (kinds == RAIL) | (kinds == SWITCH))
    beside = int(told.sum()) - parts.counts(told)[shared]
    high = int(raised.sum()) - parts.counts(raised)[shared]
    return not bool(((beside >= _LEAST_WITNESSES) & (high / np.maximum(beside, 1) < share)).any())
