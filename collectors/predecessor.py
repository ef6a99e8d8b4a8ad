"""Which collector ran on this node before: who starts again names it, and is believed at once (`streams.voices`).

Nobody else knows its boot id, but for those who may read the raw topics. Without that proof a node changes hands only after a silence.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "boot"
ID_BYTES = 16


class Predecessor:
    """Boot id of the collector before this one; our own takes its place with the first tick, since a run that never spoke is nobody's
    predecessor.

    Parameters
    ----------
    directory
        The spool's, which one agent owns. It must exist.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._path = directory / NAME
        self._own = boot_id
        self._kept = False
        self.boot_id = self._read()

    def spoken(self) -> str:
        """To be asked for each tick: the predecessor's boot id, empty when there was none."""
        if not self._kept:
            self._kept = True
            self._keep()
        return self.boot_id

    def _read(self) -> str:
        try:
            text = self._path.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            logger.warning("%s cannot be read: the node is silent for a while now: %s", self._path, error)
            return ""
        return text if len(text) == ID_BYTES and text.isalnum() else ""

    def _keep(self) -> None:
        """Written over in place: a disk that is full takes that, too."""
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, self._own.encode(), 0)
            finally:
                os.close(file)
        except OSError as error:
            logger.warning(
                "%s cannot be written: after the next start the node is silent for a while: %s", self._path, error
            )
