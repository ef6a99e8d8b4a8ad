"""The warden's HTTP face: ``POST /v1/command`` and ``GET /v1/status``."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainwarden_hook.addresses import UsageError, bind_sentence

MAX_BODY_BYTES = 1 << 20
MAX_LENGTH_DIGITS = 9
READ_TIMEOUT_S = 10.0
log = logging.getLogger("trainwarden.warden")


class Server(ThreadingHTTPServer):
    """One thread per request; a slow save does not hold up a kill."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        command: Callable[[bytes, str], tuple[int, dict[str, Any]]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self.command = command
        self.status = status
        self._ended = False
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise UsageError(bind_sentence(*address, error)) from error

    def serve(self) -> None:
        """Answer until `end`; asleep while nobody asks, which `serve_forever` is for half a second at most."""
        while not self._ended:
            self.handle_request()

    def end(self) -> None:
        """Let `serve` return."""
        self._ended = True
        self.socket.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without the reverse DNS look-up of the base class."""
        self.socket.setsockopt(1, 2, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = READ_TIMEOUT_S
    server: Server

    def do_GET(self) -> None:
        if self.path != "/v1/status":
            self._send(404, {"reason": f"there is no {self.path}, only /v1/status and /v1/command"})
            return
        self._send(200, self.server.status())

    def do_POST(self) -> None:
        if self.path != "/v1/command":
            self._send(404, {"reason": f"there is no {self.path}, only /v1/status and /v1/command"})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._send(400, {"reason": f"Content-Length is {length!r}, expected at most {MAX_BODY_BYTES}"})
            return
        body = self.rfile.read(int(length))
        self._send(*self.server.command(body, self.headers.get("X-Trainwarden-Signature", "")))

    def _send(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body, sort_keys=True).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
