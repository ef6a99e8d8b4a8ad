"""Finished steps become datagrams on a thread of their own.

Formatting and a system call cost a cold training thread about 130 us a step; a queue costs it ten.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from trainwarden_hook.rows import Row
from trainwarden_hook.wire import Sender, encode

MAX_PENDING = 8
MAX_QUEUED = 4096
POLL_S = 0.05
LAST_WORDS_S = 1.0
log = logging.getLogger("trainwarden.hook")


class Outbox:
    """Keeps the order of what is put in; nothing put in waits, and nothing here raises into training.

    A step whose numbers are still on their way from a device is held until they are here, and so is
    what was put in after it; when more than eight wait, the oldest goes without them. Where the
    thread cannot keep up (or cannot be started) what is too much is left out, and told as dropped.

    Parameters
    ----------
    sender
        Where the datagrams go; one without a collector makes all of this silent.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._new_thread()
        os.register_at_fork(after_in_child=_weakly(self._new_thread))
        atexit.register(_weakly(self.flush))

    def _new_thread(self) -> None:
        """A forked child has none of the parent's threads, and must not send what the parent will."""
        self._queue: SimpleQueue[Row | bytes | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left_out = self._told = 0

    def put(self, item: Row | bytes) -> None:
        """Send this, after all that came before."""
        if self._sender.silent:
            return
        if (self._thread is None and not self._start()) or self._queue.qsize() >= MAX_QUEUED:
            self._left_out += 1
            return
        self._queue.put(item)

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="trainwarden-outbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("steps are not reported until a thread can be started: %s", error)
            return False
        self._thread = thread
        return True

    def send(self, kind: str, fields: Mapping[str, object]) -> None:
        """Send a datagram, after all that came before."""
        if not self._sender.silent:
            self.put(encode(kind, fields))

    def flush(self, timeout_s: float = LAST_WORDS_S) -> bool:
        """Send what is left, complete or not; ``False`` when that took too long."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(timeout_s)

    def _run(self) -> None:
        waiting: deque[Row | bytes] = deque()
        while True:
            try:
                item = self._queue.get(timeout=POLL_S if waiting else None)
            except Empty:
                self._send_ready(waiting, MAX_PENDING)
                continue
            if isinstance(item, threading.Event):
                self._send_ready(waiting, 0)
                item.set()
            else:
                waiting.append(item)
                self._send_ready(waiting, MAX_PENDING)

    def _send_ready(self, waiting: deque[Row | bytes], may_wait: int) -> None:
        while waiting and (len(waiting) > may_wait or _is_ready(waiting[0])):
            item = waiting.popleft()
            self._told, left_out = self._left_out, self._left_out - self._told
            self._sender.note_dropped(left_out)
            try:
                self._sender.send_body(item if isinstance(item, bytes) else item.body())
            except Exception:
                log.exception("a step could not be reported; training goes on")


def _is_ready(item: Row | bytes) -> bool:
    return isinstance(item, bytes) or item.ready()


def _weakly(method: Callable[[], object]) -> Callable[[], None]:
    """Neither a fork nor the end of the process keeps an outbox alive that nobody uses."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
