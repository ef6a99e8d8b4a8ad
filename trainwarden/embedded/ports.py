"""Loopback ports for the embedded parts."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from pathlib import Path

from trainwarden.errors import UnavailableError

LOOPBACK = "127.0.0.1"
LOWEST = 21_200
"""Above the ports of the demonstrations' seats."""
USUAL_LOWEST_HANDED_OUT = 32_768
TRIES = 100


def free_port(host: str = LOOPBACK) -> int:
    """Return a TCP port that nobody listens on just now.

    The port is not reserved: whoever binds it next owns it, so callers check their child's exit as well. It lies below those that the
    kernel hands to connections going out: none of these takes it meanwhile, nor while a server that is started again on it is down, and
    nobody who knocks there in that time is connected to itself.
    """
    lowest_handed_out = _lowest_handed_out()
    for _ in range(TRIES):
        port = LOWEST + secrets.randbelow(max(1, lowest_handed_out - LOWEST))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lowest_handed_out() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL_LOWEST_HANDED_OUT


def require_free_port(host: str, port: int, part: str) -> None:
    """Raise before a child process is started that could only die with a stack trace.

    Parameters
    ----------
    host, port
        The address that the part is to listen on.
    part
        Who wants it, for the message (for example "the Tansu broker").

    Raises
    ------
    UnavailableError
        The port is in use, may not be bound by this user, or the host is no address of this machine.
    """
    with socket.socket() as probe:
        # A port in TIME_WAIT can be bound by the brokers, which set the same option.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UnavailableError(bind_failure(host, port, part, error)) from error


def bind_failure(host: str, port: int, part: str, error: Exception) -> str:
    """One sentence for a port that cannot be bound."""
    reason = {
        errno.EADDRINUSE: "is in use by another process",
        errno.EACCES: "may not be bound by this user",
        errno.EADDRNOTAVAIL: "is on no interface of this machine",
    }.get(getattr(error, "errno", 0) or 0, f"cannot be bound ({error})")
    return f"port {port} on {host} {reason}, {part} needs it free: stop the other process or choose another port"
