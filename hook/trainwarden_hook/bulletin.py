"""A notice that one rank puts up and all others read at their step boundaries, through the job's own store.

Read and written in a thread of its own: a store whose host is frozen costs a step boundary a bounded time, never the job.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

log = logging.getLogger("trainwarden.hook")
T = TypeVar("T")
STORE_TIMEOUT_S = 2.0
BOUNDARY_LIMIT_S = 1.0


class Board(Protocol):
    """What is needed of a store."""

    def put(self, key: str, text: str) -> None:
        """Make ``text`` readable by all."""

    def look(self, key: str) -> str | None:
        """The text, or ``None`` while there is none."""


class StoreBoard:
    """The workers' store of the present world (``MASTER_ADDR``, ``MASTER_PORT``), under keys of our own.

    Raises
    ------
    RuntimeError
        There is no such store, or it does not answer.
    """

    def __init__(self, generation: int) -> None:
        import torch.distributed as dist

        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise RuntimeError("MASTER_ADDR and MASTER_PORT are not set: the ranks have no common store")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        self._store = dist.PrefixStore(f"trainwarden/shares/{generation}", store)

    def put(self, key: str, text: str) -> None:
        """See `Board`."""
        self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """See `Board`."""
        return self._store.get(key).decode() if self._store.check([key]) else None


class Errands:
    """Runs one call at a time in a daemon thread, and does not wait for it for ever."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], list[Any], threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T], limit_s: float = BOUNDARY_LIMIT_S) -> T:
        """What ``call`` returns.

        Raises
        ------
        TimeoutError
            It has not returned by then; whether it has had an effect is not known.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        found: list[Any] = []
        done = threading.Event()
        self._calls.put((call, found, done))
        if not done.wait(limit_s):
            raise TimeoutError(f"the store did not answer in {limit_s:g} s")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]  # type: ignore[no-any-return]

    def _work(self) -> None:
        while True:
            call, found, done = self._calls.get()
            try:
                found.append(call())
            except Exception as error:
                found.append(error)
            done.set()
