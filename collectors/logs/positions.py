"""Positions of many files, kept over restarts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from collectors.tail import Position

logger = logging.getLogger(__name__)


class Positions:
    """Where reading stopped, by name, in one file that is replaced as a whole.

    Attributes
    ----------
    saved_ns
        When the owner last thought of saving, by its own clock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = _load(path)
        self.saved_ns = 0

    def of(self, name: str) -> Position | None:
        """Where an earlier run stopped."""
        return self._saved.get(name)

    def save(self, positions: Mapping[str, Position | None]) -> str:
        """Keep the positions; a reason code when they cannot be stored, else an empty string."""
        now = {name: position for name, position in positions.items() if position is not None}
        if now == self._saved:
            return ""
        scratch = self._path.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(now))
            os.replace(scratch, self._path)
        except OSError as error:
            logger.warning("log positions %s not stored: %s", self._path, error.strerror)
            return "positions_unsaved"
        self._saved = now
        return ""


def _load(path: Path) -> dict[str, Position]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Position])
    except (OSError, msgspec.DecodeError):
        return {}
