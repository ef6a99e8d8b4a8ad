"""Random number states as part of a checkpoint."""

from __future__ import annotations

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """States of torch (CPU and, once used, CUDA), Python and, if imported, numpy."""
    import torch

    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state(legacy=True)
    return states


def bring_back(states: dict[str, Any]) -> None:
    """Set the states that `capture` took."""
    import torch

    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def derive(step: int, rank: int) -> None:
    """A state of its own for a rank that took another rank's save."""
    import torch

    seed = (step * 1_000_003 + rank * 7_919 + 1) % (1 << 31)
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
