"""A real writer in a process of its own, to be killed."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from streams.store.service import run
from trainwarden.config import from_table


def main() -> None:
    """Arguments: bus address, store address, and (embedded mode) the store's directory."""
    logging.basicConfig(level="INFO")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    store = {
        "url": sys.argv[2],
        "batch_ms": 200,
        **({"directory": str(Path(sys.argv[3]).absolute())} if sys.argv[3:] else {}),
    }
    run(from_table({"cluster": "c", "kafka": {"url": sys.argv[1]}, "store": store}), stop)


if __name__ == "__main__":
    main()
