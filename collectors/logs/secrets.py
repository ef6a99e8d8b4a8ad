"""Masking what looks like a secret. The shapes are data (`secrets.toml`)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHAPES = Path(__file__).with_name("secrets.toml")


@dataclass(frozen=True)
class Shape:
    """One kind of secret; `keep` in the expression stays."""

    gate: str
    regex: re.Pattern[str]
    mask: str

    def hide(self, line: str) -> str:
        """The line without secrets of this shape."""
        return self.regex.sub(self._masked, line)

    def _masked(self, found: re.Match[str]) -> str:
        return (found.groupdict().get("keep") or "") + self.mask


@cache
def shapes() -> tuple[Shape, ...]:
    """The shipped table."""
    entries = tomllib.loads(SHAPES.read_text(encoding="utf-8"))["shape"]
    return tuple(Shape(e["gate"], re.compile(e["regex"]), f"<{e['name']}>" if e["name"] else "***") for e in entries)


def redact(line: str) -> str:
    """The line without what looks like a secret.

    Examples
    --------
    >>> redact("connect https://me:pw@host token=abc")
    'connect https://***@host token=***'
    """
    lowered = line.lower()
    for shape in shapes():
        if shape.gate in lowered:
            line = shape.hide(line)
    return line
