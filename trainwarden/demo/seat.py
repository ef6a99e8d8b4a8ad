"""Room for several demonstrations on one machine: each takes a seat, and ports, subnets and names follow from its number.

A seat is held by an abstract unix socket, which the kernel takes away with the process in whatever way it ends. The lowest free seat
is taken, so that what a killed demonstration left in the kernel (namespaces, control groups, shared memory) is found and removed by the
next one.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from trainwarden.errors import UnavailableError

SEATS = 200
FIRST_PORT = 18_000
PORTS_PER_SEAT = 16
"""All of them lie below 32768: above it a port may at any moment become the near end of somebody's connection."""


@dataclass
class Seat:
    """A seat that is taken; `leave` gives it back."""

    number: int
    ports: tuple[int, ...]
    _holder: socket.socket = field(repr=False)

    def leave(self) -> None:
        """Let another demonstration have it."""
        self._holder.close()


def take_seat(ports: int) -> Seat:
    """The lowest seat that nobody holds and of whose ports so many are free.

    Raises
    ------
    UnavailableError
        All seats are taken, or their ports are.
    """
    for number in range(SEATS):
        holder = _hold(number)
        if holder is None:
            continue
        first = FIRST_PORT + number * PORTS_PER_SEAT
        free = tuple(port for port in range(first, first + PORTS_PER_SEAT) if _is_free(port))
        if len(free) >= ports:
            return Seat(number, free[:ports], holder)
        holder.close()
    raise UnavailableError(
        f"no {ports} free ports for a demonstration between {FIRST_PORT} and {FIRST_PORT + SEATS * PORTS_PER_SEAT}: "
        "end other demonstrations"
    )


def _hold(number: int) -> socket.socket | None:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0trainwarden-demo-{number}")
    except OSError:
        holder.close()
        return None
    return holder


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
