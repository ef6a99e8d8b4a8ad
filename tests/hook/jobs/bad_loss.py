"""Like tiny.py, but the gradients of rank 1 turn NaN at a given step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

source = (Path(__file__).parent / "tiny.py").read_text()
at = int(os.environ["TRAINWARDEN_TEST_NAN_AT"])
clean = torch.Tensor.backward


def backward(self: torch.Tensor, *args: object, **kwargs: object) -> None:
    step = sys.modules["__main__"].__dict__.get("_step", 0)
    if step == at and os.environ["RANK"] == "1" and os.environ["TRAINWARDEN_GENERATION"] == "1":
        self = self * float("nan")
    sys.modules["__main__"].__dict__["_step"] = step + 1
    clean(self, *args, **kwargs)  # type: ignore[no-untyped-call]


torch.Tensor.backward = backward  # type: ignore[method-assign]
exec(compile(source, "tiny.py", "exec"))
