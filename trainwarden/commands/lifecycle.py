"""What the long-running commands share: logging, and a stop event set by SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import FrameType


def configure_logging(level: str = "INFO") -> None:
    """One line per event on stderr, UTC times."""
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
                        datefmt="%H:%M:%S")  # fmt: skip
    logging.getLogger("kafka").setLevel("CRITICAL")
    logging.getLogger("aiokafka").setLevel("ERROR")


def stop_event() -> threading.Event:
    """An event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set():
            raise SystemExit(128 + number)
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop
