"""The action service as a process of its own that dies on purpose. Its bus is in memory: the incident of the file stands for the
compacted topic that a real start reads again.

usage: service_process.py CONFIG INCIDENT [DIE_AFTER_ROWS [STARTED_SO_MANY_SECONDS_LATER]]
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from actions.ledger import Ledger, Row
from actions.service import ActionService, make_parts
from trainwarden.clock import NS_PER_S, SystemClock
from trainwarden.config import load
from trainwarden.topics import INCIDENTS


def die_after(rows: int) -> None:
    """SIGKILL to ourselves the moment that the ledger has taken its n-th row, before anything else happens."""
    add, add_plan = Ledger.add, Ledger.add_plan
    written = 0

    def counted(self: Ledger, row: Row) -> Row:
        nonlocal written
        result = add(self, row)
        written += 1
        if written >= rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def counted_plan(self: Ledger, *arguments: object) -> list[Row]:
        nonlocal written
        result = add_plan(self, *arguments)  # type: ignore[arg-type]
        written += 1
        if written >= rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Ledger.add, Ledger.add_plan = counted, counted_plan  # type: ignore[method-assign, assignment]


class LaterClock(SystemClock):
    """The wall clock as it will be so many seconds later."""

    def __init__(self, later_s: float) -> None:
        super().__init__()
        self._later_ns = int(later_s * NS_PER_S)

    def now_ns(self) -> int:
        return super().now_ns() + self._later_ns


def main(config_path: str, incident_path: str, die_after_rows: int, later_s: float) -> None:
    logging.basicConfig(level=logging.INFO, format="%(process)d %(name)s %(message)s")
    if die_after_rows:
        die_after(die_after_rows)
    parts = make_parts(load(Path(config_path)), LaterClock(later_s))
    parts.bus.publisher().publish(INCIDENTS.name, b"i1", Path(incident_path).read_bytes())
    service = ActionService(parts, None, "process", lease_s=2.0, catch_up_s=0.05)
    signal.signal(signal.SIGTERM, lambda *_: service.ask_stop())
    service.start()
    service.wait()
    service.stop()


if __name__ == "__main__":
    numbers = [*sys.argv[3:], "0", "0"]
    main(sys.argv[1], sys.argv[2], int(numbers[0]), float(numbers[1]))
