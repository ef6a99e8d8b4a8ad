"""A command of ours on a wall clock that can be stepped: ``python -m tests.faults.stepped FILE COMMAND...``.

FILE holds the seconds by which the clock is off, read ten times a second; without it the clock is right. Monotonic time is not touched, as
when somebody sets the clock of a machine.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

LOOK_S = 0.1


class Wrong:
    """By how much the clock is off, kept up to date by a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.off_s = 0
        threading.Thread(target=self._follow, name="stepped", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_S):
            text = self._path.read_text() if self._path.exists() else ""
            self.off_s = int(text or 0)


def main() -> None:
    wrong, time_s, time_ns = Wrong(Path(sys.argv[1])), time.time, time.time_ns
    time.time = lambda: time_s() + wrong.off_s
    time.time_ns = lambda: time_ns() + wrong.off_s * 10**9
    from trainwarden.cli import main as command

    command(sys.argv[2:])


if __name__ == "__main__":
    main()
