"""The warden's HTTP page: what is no request of ours gets a sentence and breaks nothing."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator

import pytest
from trainwarden_hook.warden_http import Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), lambda body, signature: (200, {"bytes": len(body)}), dict)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.end()
    thread.join(60)
    made.server_close()
    assert not thread.is_alive(), "nobody asked, so it was asleep when it was to end"


@pytest.mark.parametrize("length", ["²", "x", "-1", "9" * 5000, "999999999"])
def test_a_length_that_is_none_is_refused_with_a_sentence(server: Server, length: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), 5.0) as client:
        client.sendall(f"POST /v1/command HTTP/1.1\r\nHost: n\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"expected at most" in answer


def test_one_request_after_the_other_is_answered(server: Server) -> None:
    for _ in range(3):
        client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        client.request("GET", "/v1/status")
        assert client.getresponse().read() == b"{}"
        client.close()
