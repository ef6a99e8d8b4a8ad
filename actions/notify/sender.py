"""One HTTP POST to a checked address."""

from __future__ import annotations

import http.client
import socket
import ssl
from typing import Protocol

from actions.notify.base import Call, DeliverySettings, Reply
from actions.notify.guard import Resolve, Target, check_target, resolve_name

KEPT_REPLY_BYTES = 4096


class Sender(Protocol):
    """What delivers a call; tests put their own in."""

    def send(self, call: Call, settings: DeliverySettings) -> Reply:
        """Send and return the reply.

        Raises
        ------
        Refused
            The address may not be spoken to.
        OSError, http.client.HTTPException
            Anything on the way: worth another try.
        """
        ...


class HttpSender:
    """Sends over HTTP/1.1, to the address that was checked, and follows nothing."""

    def __init__(self, resolve: Resolve = resolve_name, context: ssl.SSLContext | None = None) -> None:
        self._resolve = resolve
        self._context = context

    def send(self, call: Call, settings: DeliverySettings) -> Reply:
        target = check_target(call.url, settings.allow_private, settings.allow_http, self._resolve)
        connection = self._connection(target, settings.timeout_s)
        try:
            connection.request("POST", target.path, call.body, dict(call.headers))
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, headers, response.read(KEPT_REPLY_BYTES))
        finally:
            connection.close()

    def _connection(self, target: Target, timeout_s: float) -> http.client.HTTPConnection:
        if target.scheme == "http":
            return _PinnedHttp(target, timeout_s)
        return _PinnedHttps(target, timeout_s, self._context or ssl.create_default_context())


class _PinnedHttp(http.client.HTTPConnection):
    """Speaks to the target's host name at the target's checked address."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self._target = target

    def connect(self) -> None:
        self.sock = socket.create_connection((self._target.address, self._target.port), self.timeout)


class _PinnedHttps(http.client.HTTPSConnection):
    """The same under TLS; the certificate is checked against the host name."""

    def __init__(self, target: Target, timeout_s: float, context: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s, context=context)
        self._target = target
        self._tls = context

    def connect(self) -> None:
        raw = socket.create_connection((self._target.address, self._target.port), self.timeout)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self._target.host)
