"""Keeping all threads of the agent on one processor: they work one after the other, and each finds there what the one before it used."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterable

from trainwarden.clock import NS_PER_S

logger = logging.getLogger(__name__)

LOOK_EVERY_NS = 10 * NS_PER_S
GATHER_EVERY_NS = 60 * NS_PER_S
LET_GO_NS = 600 * NS_PER_S

Place = Callable[[int, Iterable[int]], None]


def tasks() -> list[int]:
    """Every thread of this process but the first."""
    own = os.getpid()
    return [task for task in map(int, os.listdir("/proc/self/task")) if task != own]


def here() -> int:
    """The processor that the caller runs on; -1 where the C library does not tell."""
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        return -1


class OneProcessor:
    """Gathers the other threads where the first one runs.

    Handing work from thread to thread across processors wakes one that slept, with cold caches: on an idle machine that is a good
    part of what the agent costs. The first thread stays free, so the kernel takes it elsewhere when that processor is busy, and the
    others follow within seconds. When work comes late all the same, everybody is let go for ten minutes. The GPU child is not kept.

    Parameters
    ----------
    allowed
        Processors that the agent may use; with one there is nothing to do.
    """

    def __init__(
        self,
        allowed: Iterable[int],
        tasks: Callable[[], list[int]] = tasks,
        here: Callable[[], int] = here,
        place: Place = os.sched_setaffinity,
    ) -> None:
        self._allowed = frozenset(allowed)
        self._tasks, self._here, self._place = tasks, here, place
        self._kept_at = -1
        self._look_ns = 0
        self._gather_ns = 0

    def keep(self, now_ns: int, late: bool) -> None:
        """Once a tick, by the first thread. `late` tells that work was not done in time."""
        if late and self._kept_at >= 0:
            logger.info("processor %d is too busy for the collector: its threads go where they like", self._kept_at)
            self._kept_at, self._look_ns = -1, now_ns + LET_GO_NS
            self._put(self._allowed)
        if now_ns < self._look_ns or len(self._allowed) < 2:
            return
        self._look_ns = now_ns + LOOK_EVERY_NS
        at = self._here()
        if at in self._allowed and (at != self._kept_at or now_ns >= self._gather_ns):
            self._kept_at, self._gather_ns = at, now_ns + GATHER_EVERY_NS
            self._put({at})

    def _put(self, processors: Iterable[int]) -> None:
        for task in self._tasks():
            try:
                self._place(task, processors)
            except OSError:
                continue  # it has just ended, or somebody else rules where it runs


def affinity() -> set[int]:
    """Processors that the first thread may use, which is never kept."""
    return os.sched_getaffinity(os.getpid())
