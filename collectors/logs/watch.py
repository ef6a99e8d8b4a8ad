"""Sleeping until a file may have something to say, instead of looking at it all the time (inotify, poll)."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import time
from collections.abc import Iterable

MODIFIED = 0x2
ATTRIBUTES, MOVED_SELF, DELETED_SELF = 0x4, 0x800, 0x400
CREATED, MOVED_HERE = 0x100, 0x80
OF_FILE = MODIFIED | ATTRIBUTES | MOVED_SELF | DELETED_SELF
OF_FOLDER = CREATED | MOVED_HERE
EVENT_HEAD_BYTES = 16
RETRY_S = 10.0
"""A folder that is not there is looked for so often."""
RESTLESS_LOOKS = 8
"""After a rotation a writer may still hold the old file: so many looks follow at the usual pace, whatever the kernel says."""


class Watch:
    """Wakes who waits when one of the files was written to, or another one took its name.

    The kernel sees only what is written on this machine: what another node writes to a network file system is found at the next look.
    Not thread-safe, but for `wake`.

    Attributes
    ----------
    blind
        The kernel has no watch left to give: every wait lasts `least_s`.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = list(paths)
        self.blind = False
        self._inotify = -1
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._pause = select.poll()
        for poll in (self._poll, self._pause):
            poll.register(self._wakeup, select.POLLIN)
        self._rings: set[int] = set()
        self._restless = 0
        self._homeless = False
        self._watched_s = 0.0
        self._looked_s = 0.0
        self._rewatch()

    def follow(self, descriptor: int) -> None:
        """Wake up for an open descriptor too, such as that of the kernel log."""
        if descriptor not in self._rings:
            self._rings.add(descriptor)
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, least_s: float, most_s: float) -> None:
        """Sleep until something happened, but until `least_s` after the last return, and for no longer than `most_s` after it."""
        if self._restless or self.blind:
            self._restless = max(0, self._restless - 1)
        else:
            self._block(self._looked_s + most_s - time.monotonic())
        if self._homeless and time.monotonic() - self._watched_s >= RETRY_S:
            self._rewatch()
        pause_s = self._looked_s + least_s - time.monotonic()
        if pause_s > 0:
            self._pause.poll(pause_s * 1000)
        self._looked_s = time.monotonic()

    def wake(self) -> None:
        """Let `wait` return, now and from now on; from any thread."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Give the descriptors back. Nobody may be waiting."""
        for descriptor in (self._wakeup, self._inotify):
            if descriptor >= 0:
                os.close(descriptor)
        self._wakeup = self._inotify = -1

    def _block(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if descriptor == self._inotify and self._renamed():
                self._restless = RESTLESS_LOOKS
                self._rewatch()

    def _renamed(self) -> bool:
        """Take the news away; whether any of it is more than a file that was written to."""
        try:
            news = os.read(self._inotify, 65536)
        except BlockingIOError:
            return False
        at, more = 0, False
        while at + EVENT_HEAD_BYTES <= len(news):
            more = more or int.from_bytes(news[at + 4 : at + 8], "little") != MODIFIED
            at += EVENT_HEAD_BYTES + int.from_bytes(news[at + 12 : at + 16], "little")
        return more

    def _rewatch(self) -> None:
        """Watch what bears the names now; a fresh descriptor, so that files that were left are forgotten."""
        if self._inotify >= 0:
            self._poll.unregister(self._inotify)
            os.close(self._inotify)
        library = ctypes.CDLL(None, use_errno=True)
        self._inotify = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self.blind, self._homeless, self._watched_s = self._inotify < 0, False, time.monotonic()
        if self.blind:
            return
        self._poll.register(self._inotify, select.POLLIN)
        for path in self._paths:
            for place, news in ((path, OF_FILE), (os.path.dirname(path) or ".", OF_FOLDER)):
                refused = library.inotify_add_watch(self._inotify, os.fsencode(place), news) < 0
                self.blind = self.blind or (refused and ctypes.get_errno() == errno.ENOSPC)
                self._homeless = self._homeless or (refused and news == OF_FOLDER)
