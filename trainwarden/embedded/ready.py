"""Ask a broker whether it answers: one Kafka metadata request, written by hand.

A TCP connection proves nothing (a broker listens before it can serve), and the Kafka client belongs to the bus alone.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from trainwarden.clock import NS_PER_S, Clock, SystemClock
from trainwarden.errors import UnavailableError

_METADATA_API_KEY = 3
_METADATA_VERSION = 4
_CORRELATION_ID = 7919
_MAX_ANSWER_BYTES = 1 << 20
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class BrokerMetadata:
    """What a broker says of itself: its cluster's brokers as (id, host, port) and the controller's id."""

    cluster_id: str | None
    controller_id: int
    brokers: tuple[tuple[int, str, int], ...]


def ask_metadata(host: str, port: int, timeout_s: float = 2.0) -> BrokerMetadata:
    """Send one Kafka metadata request for no topics.

    Raises
    ------
    OSError
        Nobody answers in time, or the connection breaks.
    ValueError
        Something answers that does not speak Kafka.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(_request())
        size_bytes = int.from_bytes(_read_exactly(connection, 4), "big")
        if not 4 <= size_bytes <= _MAX_ANSWER_BYTES:
            raise ValueError(f"{host}:{port} does not speak the Kafka protocol (answer of {size_bytes} bytes)")
        return _parse(_read_exactly(connection, size_bytes))


def wait_for_broker(
    host: str,
    port: int,
    *,
    timeout_s: float,
    died: Callable[[], str | None] = lambda: None,
    clock: Clock | None = None,
) -> BrokerMetadata:
    """Wait until a broker answers a metadata request and names itself and a controller.

    Parameters
    ----------
    timeout_s
        How long to wait in all.
    died
        Asked between attempts; a sentence ends the wait at once (the process is gone).

    Raises
    ------
    UnavailableError
        The broker's process died, or nobody answered in time.
    """
    clock = clock or SystemClock()
    deadline_ns = clock.monotonic_ns() + int(timeout_s * NS_PER_S)
    last = "no answer"
    while clock.monotonic_ns() < deadline_ns:
        reason = died()
        if reason is not None:
            raise UnavailableError(reason)
        try:
            metadata = ask_metadata(host, port)
        except (OSError, ValueError) as error:
            last = str(error)
        else:
            if metadata.brokers and metadata.controller_id >= 0:
                return metadata
            last = "the broker answers but knows no controller yet"
        clock.sleep(_POLL_S)
    raise UnavailableError(
        f"no Kafka broker answered at {host}:{port} within {timeout_s:g} s ({last}): look into its log, or give it longer"
    )


def _request() -> bytes:
    client = b"trainwarden"
    head = struct.pack(">hhih", _METADATA_API_KEY, _METADATA_VERSION, _CORRELATION_ID, len(client)) + client
    body = head + struct.pack(">i?", 0, False)
    return struct.pack(">i", len(body)) + body


def _read_exactly(connection: socket.socket, size_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < size_bytes:
        part = connection.recv(size_bytes - len(parts))
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts += part
    return bytes(parts)


class _Reader:
    """Cursor over the big-endian fields of a Kafka answer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def int32(self) -> int:
        return int(self._unpack(">i"))

    def string(self) -> str | None:
        length = int(self._unpack(">h"))
        if length < 0:
            return None
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _unpack(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return int(value)


def _parse(answer: bytes) -> BrokerMetadata:
    try:
        reader = _Reader(answer)
        if reader.int32() != _CORRELATION_ID:
            raise ValueError("the answer belongs to another request")
        reader.int32()  # throttle time
        brokers = tuple(_broker(reader) for _ in range(reader.int32()))
        return BrokerMetadata(reader.string(), reader.int32(), brokers)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not an answer of a Kafka broker: {error}") from error


def _broker(reader: _Reader) -> tuple[int, str, int]:
    node_id, host, port = reader.int32(), reader.string() or "", reader.int32()
    reader.string()  # rack
    return node_id, host, port
