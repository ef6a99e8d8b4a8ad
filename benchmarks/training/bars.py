"""Promises and whether a run kept them, in one form for all parts."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bar:
    """One promise: the figure found, and what it must be at least or at most."""

    name: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def line(self) -> str:
        """For people."""
        sign = ">=" if self.at_least else "<="
        return f"  {'ok  ' if self.met else 'MISS'} {self.name}: {self.found:.3f} {sign} {self.limit:g}"

    def row(self) -> dict[str, Any]:
        """For a file; `read` takes it back."""
        return {
            "name": self.name, "found": self.found, "limit": self.limit, "at_least": self.at_least, "met": self.met,
        }  # fmt: skip


def rows(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """All of them."""
    return [bar.row() for bar in bars]


def read(kept: Sequence[dict[str, Any]]) -> list[Bar]:
    """Back from a file."""
    return [Bar(row["name"], row["found"], row["limit"], row["at_least"]) for row in kept]


def circumstances() -> dict[str, Any]:
    """When and where; ``load`` as it was when asked."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cores": os.cpu_count(), "python": platform.python_version(),
        "load": os.getloadavg(),
    }  # fmt: skip
