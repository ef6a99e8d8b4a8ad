"""The warden's HTTP page: what is no request of ours gets a sentence and breaks nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from trainwarden_hook.warden_http import Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), lambda body, signature: (200, {"bytes": len(body)}), dict)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize("length", ["²", "x", "-1", "9" * 5000, "999999999"])
def test_a_length_that_is_none_is_refused_with_a_sentence(server: Server, length: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), 5.0) as client:
        client.sendall(f"POST /v1/command HTTP/1.1\r\nHost: n\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"expected at most" in answer
