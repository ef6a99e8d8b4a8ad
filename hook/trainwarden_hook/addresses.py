"""Addresses given by people: parsing, and the one-sentence errors that they get."""

from __future__ import annotations

import errno
import socket


class UsageError(Exception):
    """A mistake in how a command was called; its text is one sentence for the user, exit code 2."""


def parse_endpoint(text: str, flag: str) -> tuple[str, int]:
    """``host:port`` as a pair.

    Raises
    ------
    UsageError
        There is no port, or it is no number from 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"{flag} is {text!r}, expected HOST:PORT such as 127.0.0.1:29400")
    return host.strip("[]"), int(port)


def probe_port(host: str, port: int) -> None:
    """Check that ``host:port`` can be bound.

    Raises
    ------
    UsageError
        It is in use, or not ours to bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise UsageError(bind_sentence(host, port, error)) from error


def bind_sentence(host: str, port: int, error: OSError) -> str:
    """Why an address could not be bound, in one sentence."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another process; stop it or choose another port"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"no permission to listen on {host}:{port}; choose a port above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def address_towards(host: str, port: int) -> str:
    """The local address that packets to ``host`` leave from (no packet is sent)."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.connect(target)
            return str(trial.getsockname()[0])
    except OSError:
        return socket.gethostname()


def first_line(error: BaseException) -> str:
    """What an exception says, without the stack that torch appends; its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
