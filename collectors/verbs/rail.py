"""A thread for each port: opens it, asks when it is due, answers when something came, looks now and then whether its address holds."""

from __future__ import annotations

import errno
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence

from collectors.verbs.addresses import Address
from collectors.verbs.library import Verbs
from collectors.verbs.port import Port, Wanted
from collectors.verbs.probing import Pings

HUNG_NS = 2 * 10**9
RETRY_S = 15.0
LOOK_S = 30.0
REASONS = {errno.EACCES: "permission", errno.EPERM: "permission", errno.ENETDOWN: ""}
"""A port that is down is told of by the sources `rdma` and `nic`: here it is quiet."""


class Rail(threading.Thread):
    """A port and its pings. `state` is empty when all is well, else the reason of a gap."""

    def __init__(self, verbs: Verbs, wanted: Wanted, pings: Pings, turn: int, turns: int) -> None:
        super().__init__(name=f"rail-{wanted.name}", daemon=True)
        self.wanted, self.pings = wanted, pings
        self.address: Address | None = None
        self.targets: Sequence[tuple[str, Address]] = ()
        self.period_s = 1.0
        self._verbs = verbs
        self._turn, self._turns = turn, turns
        self._port: Port | None = None
        self._problem = "starting"
        self._busy_since_ns = 0
        self._retry_s = 0.0
        self._look_s = 0.0
        self._ask_s = 0.0
        self._ending = False
        self._waker, self._wake = os.pipe2(os.O_CLOEXEC)

    @property
    def state(self) -> str:
        """The reason of a gap; empty when there is none."""
        busy_ns = self._busy_since_ns
        return "hung" if busy_ns and time.monotonic_ns() - busy_ns > HUNG_NS else self._problem

    def end(self) -> None:
        """Close the port and end, when what runs has come back. To be called once."""
        self._ending = True
        os.write(self._wake, b"x")

    def run(self) -> None:
        while not self._ending:
            self._wait()
            self._guarded(self._work)
        self._guarded(self._close)

    def _wait(self) -> None:
        """Until something comes, or it is our turn."""
        now_s, until_s = time.monotonic(), self._retry_s
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        if self._port is not None:
            poll.register(self._port.fd, select.POLLIN)
            until_s = self._ask_s
        poll.poll(max(0.0, until_s - now_s) * 1000 + 1)

    def _work(self) -> None:
        now_s = time.monotonic()
        if self._ending:
            return
        if self._port is None:
            if now_s >= self._retry_s:
                self._open(now_s)
            return
        self._port.listen()
        self.pings.serve(self._port)
        if now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self.address = self._port.address = self._port.look()
        if now_s >= self._ask_s:
            self._ask_s = self._next_turn_s(now_s)
            self.pings.ask(self._port, self.targets)

    def _next_turn_s(self, now_s: float) -> float:
        """Rails take turns: each asks all its peers at once, as many periods apart as there are rails."""
        cycle_s = self.period_s * self._turns
        return now_s + ((self._turn * self.period_s - now_s) % cycle_s or cycle_s)

    def _open(self, now_s: float) -> None:
        self._retry_s, self._look_s, self._ask_s = now_s + RETRY_S, now_s + LOOK_S, self._next_turn_s(now_s)
        self._port = Port(self._verbs, self.wanted)
        self.address, self._problem = self._port.address, ""

    def _guarded(self, work: Callable[[], None]) -> None:
        self._busy_since_ns = time.monotonic_ns()
        try:
            work()
        except OSError as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - the thread has to outlive whatever a driver provokes
            sys.stderr.write(f"trainwarden rdma helper: {self.wanted.name}: {type(error).__name__}: {error}\n")
            self._failed(OSError(errno.EIO, str(error)))
        finally:
            self._busy_since_ns = 0

    def _failed(self, error: OSError) -> None:
        """Close the port; it is opened anew later."""
        number = error.errno or errno.EIO
        problem = REASONS.get(number, errno.errorcode.get(number, "EIO").lower())
        if problem != self._problem:
            sys.stderr.write(f"trainwarden rdma helper: {self.wanted.name}: {error.strerror or os.strerror(number)}\n")
        self.address, self._problem = None, problem
        self._retry_s = time.monotonic() + RETRY_S
        self._close()

    def _close(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.close()
