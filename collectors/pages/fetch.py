"""Fetching one page over HTTP: a deadline over the whole of it, a size limit, one connection kept, no way to another host."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from collectors.pages.text import MAX_PAGE_BYTES, PageError
from trainwarden.errors import ConfigError

CHUNK_BYTES = 65536
MAX_HOPS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
# http.client reports a connection that the other end closed in several ways, depending on when it notices
HUNG_UP = (http.client.RemoteDisconnected, http.client.CannotSendRequest, ConnectionResetError, BrokenPipeError)
HEADERS = {
    "Accept": "text/plain;version=0.0.4",
    "Accept-Encoding": "identity",
    "User-Agent": "trainwarden-collector",
}


@dataclass(frozen=True)
class Address:
    """Where a page is."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def place(self) -> tuple[str, str, int]:
        """All but the path: what a redirect may not leave."""
        return (self.scheme, self.host, self.port)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}{self.target}"


def parse_address(url: str, key: str) -> Address:
    """An address of ``http://`` or ``https://``.

    Raises
    ------
    ConfigError
        It is none; the sentence names `key`.
    """
    try:
        return _address(urlsplit(url))
    except ValueError as error:
        raise ConfigError(f"{key}: {url!r} is no address such as http://127.0.0.1:9400/metrics: {error}") from None


def _address(parts: SplitResult) -> Address:
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it needs http:// or https:// and a host")
    if parts.username or parts.password:
        raise ValueError("it must not carry a password")
    if any(ord(char) <= 32 or ord(char) > 126 for char in parts.path + parts.query):
        raise ValueError("its path has characters that must be written as %xx")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), target)


class PageClient:
    """Gets one page again and again. Used by one thread; `abort` may come from another one."""

    def __init__(
        self, address: Address, deadline_s: float, max_bytes: int = MAX_PAGE_BYTES,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._address = address
        self._deadline_s = deadline_s
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def get(self) -> bytes:
        """The page's body.

        Raises
        ------
        PageError
            ``refused``, ``unreachable``, ``timeout``, ``http_<status>``, ``redirect``, ``too_large``, ``truncated``, ``protocol``.
        """
        end_s = self._now_s() + self._deadline_s
        try:
            return self._follow(end_s)
        except TimeoutError:
            self.close()
            raise self._error("timeout", f"gave no whole answer within {self._deadline_s:g} s") from None
        except ConnectionRefusedError:
            self.close()
            raise self._error("refused", "refuses connections") from None
        except http.client.IncompleteRead:
            self.close()
            raise self._error("truncated", "hung up in the middle of the page") from None
        except http.client.HTTPException as error:
            self.close()
            raise self._error("protocol", f"does not speak HTTP ({type(error).__name__})") from None
        except OSError as error:
            self.close()
            raise self._error("unreachable", f"cannot be reached ({error.strerror or error})") from None

    def close(self) -> None:
        """Let the connection go."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Wake a `get` that waits longer than it should."""
        waiting = self._socket
        if waiting is not None:
            try:
                waiting.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it went by itself meanwhile

    def _follow(self, end_s: float) -> bytes:
        target = self._address.target
        for _ in range(MAX_HOPS):
            response = self._ask(target, end_s)
            if response.status not in REDIRECTS:
                return self._body(response, end_s)
            target = self._next(target, response)
            self.close()
        raise self._error("redirect", f"redirects more than {MAX_HOPS} times")

    def _next(self, target: str, response: http.client.HTTPResponse) -> str:
        here = f"{self._address.scheme}://{self._address.host}:{self._address.port}{target}"
        location = urljoin(here, response.getheader("Location") or "")
        try:
            there = _address(urlsplit(location))
        except ValueError:
            there = None
        if there is None or there.place != self._address.place:
            self.close()
            raise self._error("redirect", f"redirects to {location[:100]!r}: only this host is asked")
        return there.target

    def _ask(self, target: str, end_s: float) -> http.client.HTTPResponse:
        if self._connection is not None:
            try:
                return self._send(self._connection, target, end_s)
            except HUNG_UP:
                self.close()  # a kept connection may have been closed by the other end: that is no failure yet
        return self._send(self._connect(end_s), target, end_s)

    def _connect(self, end_s: float) -> http.client.HTTPConnection:
        # the module for https brings megabytes along: only who needs it pays for it
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(self._address.host, self._address.port, timeout=self._left_s(end_s))
        self._connection.connect()
        return self._connection

    def _send(self, connection: http.client.HTTPConnection, target: str, end_s: float) -> http.client.HTTPResponse:
        self._socket = connection.sock
        self._hurry(end_s)
        connection.request("GET", target, headers=HEADERS)
        return connection.getresponse()

    def _body(self, response: http.client.HTTPResponse, end_s: float) -> bytes:
        if response.status != 200:
            self.close()
            raise self._error(f"http_{response.status}", f"answers with status {response.status}")
        if (response.length or 0) > self._max_bytes:
            self.close()
            raise self._error("too_large", f"has {response.length} bytes, at most {self._max_bytes} are read")
        body = self._read(response, end_s)
        if response.length:
            raise http.client.IncompleteRead(b"")
        response.close()  # the answer, not the connection
        if response.will_close:
            self.close()
        return body

    def _read(self, response: http.client.HTTPResponse, end_s: float) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while chunk := response.read1(CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_bytes:
                self.close()
                raise self._error("too_large", f"has more than {self._max_bytes} bytes")
            self._hurry(end_s)
        return b"".join(chunks)

    def _hurry(self, end_s: float) -> None:
        if self._socket is not None:
            self._socket.settimeout(self._left_s(end_s))

    def _left_s(self, end_s: float) -> float:
        left_s = end_s - self._now_s()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _error(self, reason: str, what: str) -> PageError:
        return PageError(reason, f"{self._address} {what}")
