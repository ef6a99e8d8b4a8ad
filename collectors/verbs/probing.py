"""Pings of one port: what was sent and not answered yet, round trips and losses, and the answers to others.

Request and answer are the datagrams of `collectors.echo`, equally long. A request names the key that its sender listens to, in the place
where an answer tells when the request came.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from collectors import echo
from collectors.verbs.addresses import Address
from collectors.verbs.library import NoWayError

PENDING_MAX = 4096


class Wire(Protocol):
    """A port, as far as it concerns pings."""

    address: Address

    def arrivals(self) -> Sequence[Any]:
        """What came: `payload`, `sender`."""
        ...

    def release(self, arrival: Any) -> None:
        """Make room for another one."""
        ...

    def send(self, to: Address, payload: bytes) -> None:
        """Send a datagram."""
        ...

    def answer(self, arrival: Any, qkey: int, payload: bytes) -> None:
        """Send a datagram back."""
        ...


@dataclass
class Tally:
    """Pings of one path since the last report."""

    trips_ms: list[float] = field(default_factory=list)
    lost: int = 0

    def row(self) -> list[float | None]:
        """Median and longest round trip, pings decided, pings lost."""
        trips = self.trips_ms
        return (
            [statistics.median(trips), max(trips), len(trips) + self.lost, self.lost]
            if trips
            else [None, None, self.lost, self.lost]
        )


class Pings:
    """Asks and answers over one port after another: a port that was closed and opened anew is the same rail.

    `report` is called by another thread than the rest, and while that hangs.
    """

    def __init__(self, timeout_s: float, answers_per_s: float, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._admission = echo.Admission(answers_per_s)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._pending: dict[bytes, tuple[str, int]] = {}
        self._tallies: dict[str, Tally] = {}
        self._refused: dict[str, int] = {}

    def ask(self, port: Wire, targets: Sequence[tuple[str, Address]]) -> None:
        """A ping to each (path, address); where no way leads to, it is lost.

        Raises `OSError` when the port takes no more: that ping was neither sent nor lost.
        """
        for path, address in targets:
            nonce = os.urandom(echo.NONCE_BYTES)
            with self._lock:
                if len(self._pending) < PENDING_MAX:
                    self._pending[nonce] = path, self._clock_ns()
            try:
                port.send(address, echo.FRAME.pack(echo.MAGIC, echo.REQUEST, nonce, port.address.qkey, 0))
            except NoWayError:
                continue
            except OSError:
                with self._lock:
                    self._pending.pop(nonce, None)
                raise

    def serve(self, port: Wire) -> None:
        """Take in all that came: count answers, answer requests."""
        while arrivals := port.arrivals():
            came_ns = self._clock_ns()
            for arrival in arrivals:
                self._take(port, arrival, came_ns)
                port.release(arrival)

    def report(self) -> tuple[dict[str, list[float | None]], dict[str, int]]:
        """Rows of the paths on which a ping was answered or given up since the last call, and what was not answered, by reason."""
        with self._lock:
            self._give_up()
            tallies, self._tallies = self._tallies, {}
            refused, self._refused = self._refused, {}
        return {path: tally.row() for path, tally in tallies.items()}, refused

    def _take(self, port: Wire, arrival: Any, came_ns: int) -> None:
        parsed = echo.parse(arrival.payload)
        if parsed is None:
            self._refuse("malformed")
        elif parsed.kind == echo.REPLY:
            self._answered(parsed, came_ns)
        elif not 0 < parsed.came_ns <= 0xFFFFFFFF:
            self._refuse("malformed")
        elif not self._admission.admit(arrival.sender, came_ns / 1e9):
            self._refuse("rate")
        else:
            self._answer(port, arrival, parsed, came_ns)

    def _answer(self, port: Wire, arrival: Any, request: echo.Echo, came_ns: int) -> None:
        try:
            port.answer(arrival, request.came_ns, echo.reply(request.nonce, came_ns, self._clock_ns()))
        except NoWayError:
            self._refuse("unreachable")

    def _answered(self, answer: echo.Echo, came_ns: int) -> None:
        with self._lock:
            path, sent_ns = self._pending.pop(answer.nonce, ("", 0))
            if not path:
                return
            held_ns = max(0, answer.left_ns - answer.came_ns)
            trip_ns = max(0, came_ns - sent_ns - held_ns)
            tally = self._tallies.setdefault(path, Tally())
            if trip_ns > self._timeout_ns:
                tally.lost += 1
            else:
                tally.trips_ms.append(trip_ns / 1e6)

    def _give_up(self) -> None:
        limit_ns = self._clock_ns() - self._timeout_ns
        for nonce in [nonce for nonce, (_, sent_ns) in self._pending.items() if sent_ns <= limit_ns]:
            path, _ = self._pending.pop(nonce)
            self._tallies.setdefault(path, Tally()).lost += 1

    def _refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] = self._refused.get(reason, 0) + 1
