"""JSON lines over a unix stream socket: the control links warden-launcher and launcher-trainer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from trainwarden_hook.wire import unix_address

MAX_LINE_BYTES = 1 << 20
ACCEPT_AGAIN_S = 0.2
log = logging.getLogger("trainwarden.links")
Message = dict[str, Any]


class Link:
    """One end of a stream; ``send`` may be called from any thread, ``read`` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """Write one message; ``False`` when the peer is gone."""
        body = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(body)
        except OSError:
            return False
        return True

    def read(self) -> Message | None:
        """Wait for the next message; ``None`` when the peer is gone or speaks nonsense."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES)
            message = json.loads(line) if line else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Wake the reader of both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._socket.close()


def connect(path: str, timeout_s: float = 2.0) -> Link:
    """Open a link to the socket at ``path``.

    Raises
    ------
    OSError
        Nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(unix_address(path))
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return Link(connection)


class Listener:
    """Accepts links at ``path`` and runs ``serve(link)`` for each in its own daemon thread."""

    def __init__(self, path: str, serve: Callable[[Link], None]) -> None:
        self.path = path
        self._serve = serve
        self._closed = threading.Event()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(unix_address(path))
        os.chmod(path, 0o600)
        self._socket.listen(128)
        threading.Thread(target=self._accept, name="trainwarden-accept", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                # For example no descriptor is left: whoever connects later must still be let in.
                if not self._closed.wait(ACCEPT_AGAIN_S):
                    log.warning("nobody could be let in at %s: %s", self.path, error)
                continue
            link = Link(connection)
            threading.Thread(target=self._serve, args=(link,), name="trainwarden-link", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and remove the socket file."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
