"""Keeps client libraries from flooding the log while a broker is away: each of their messages at most once in a while."""

from __future__ import annotations

import logging
import time

EVERY_S = 10.0
LIBRARIES = ("aiokafka", "faust", "mode", "asyncio", "kafka")


class Quiet(logging.Filter):
    """Lets one record per logger and message template through every `EVERY_S`; the next one tells how many were held back."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg)[:60])
        now = time.monotonic()
        told_at, held = self._last.get(key, (-self._every_s, 0))
        if now - told_at < self._every_s:
            self._last[key] = (told_at, held + 1)
            return False
        self._last[key] = (now, 0)
        record.exc_info = None
        if held:
            record.msg = f"{record.msg} (and {held} more like it)"
        return True


def quieten() -> None:
    """Warnings of the libraries only, and each not too often. Filters sit on handlers: loggers do not inherit them."""
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mode.timers").setLevel(logging.ERROR)  # a late timer on a busy machine is no news
    quiet = Quiet()
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: record.name.partition(".")[0] not in LIBRARIES or quiet.filter(record))
