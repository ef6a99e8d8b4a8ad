"""When a restart would not help: exit codes that say so, and failures in a row without a new step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from trainwarden_hook.addresses import first_line

log = logging.getLogger("trainwarden.launcher")
CONNECT_TIMEOUT_S = 2.0
LOOK_S = 2.0


class GivenUp(Exception):
    """The job has ended for good; the text says why."""


class Judge:
    """Counts failures of the local workers.

    Parameters
    ----------
    codes
        Exit codes after which nothing is restarted.
    limit
        Failures in a row without a step beyond the highest known.
    """

    def __init__(self, codes: frozenset[int], limit: int) -> None:
        self._codes = codes
        self._limit = limit
        self._highest = -1
        self._strikes = 0

    def failed(self, exit_codes: dict[int, int], reached: int) -> str:
        """Why not to restart after this failure, else empty.

        Parameters
        ----------
        exit_codes
            By rank, of the workers that failed.
        reached
            Highest step that any local rank has begun, -1 when none said so.
        """
        final = [(rank, code) for rank, code in sorted(exit_codes.items()) if code in self._codes]
        if final:
            return f"rank {final[0][0]} ended with exit code {final[0][1]}, which means that a restart would not help"
        self._strikes = 0 if reached > self._highest else self._strikes + 1
        self._highest = max(reached, self._highest)
        if reached >= 0 and self._strikes >= self._limit:
            return f"{self._strikes} failures in a row without a step beyond {self._highest}"
        return ""


class Notice:
    """What one launcher has found out is told to all others through the rendezvous store."""

    def __init__(self, rdzv_id: str) -> None:
        self._key = f"trainwarden/{rdzv_id}/given-up"
        self._looked_at = 0.0
        self._store: dist.TCPStore | None = None

    def tell(self, endpoint: tuple[str, int], why: str) -> None:
        """Put it up; a store that is gone is logged."""
        try:
            self._open(endpoint).set(self._key, why)
        except (RuntimeError, dist.DistError) as error:
            log.warning("the other nodes could not be told that the job has ended: %s", first_line(error))

    def take_down(self, endpoint: tuple[str, int]) -> None:
        """What an earlier run of the job has left there is not about this one."""
        try:
            self._open(endpoint).delete_key(self._key)
        except (RuntimeError, dist.DistError) as error:
            log.debug("no notice was taken down: %s", error)

    def look(self, endpoint: tuple[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """Look, unless the last look was a moment ago.

        Raises
        ------
        GivenUp
            Another node says so.
        """
        now = clock()
        if now - self._looked_at < LOOK_S or not endpoint[1]:
            return
        self._looked_at = now
        try:
            store = self._open(endpoint)
            found = store.get(self._key).decode() if store.check([self._key]) else ""
        except (RuntimeError, dist.DistError):
            # without the store nothing can be learnt here, and whoever needs it says so
            self._store = None
            return
        if found:
            raise GivenUp(found)

    def _open(self, endpoint: tuple[str, int]) -> dist.TCPStore:
        if self._store is None:
            host, port = endpoint
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_TIMEOUT_S))
        return self._store
