from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.ready import ask_metadata, wait_for_broker
from trainwarden.errors import UnavailableError


@contextmanager
def peer(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that answers each connection's first packet with `answer(packet)` and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer(connection.recv(4096)))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_answer_is_parsed() -> None:
    body = bytes.fromhex(
        "00001eef"  # correlation id
        "00000000"  # throttle
        "00000001" "0000006f" "0009" "3132372e302e302e31" "00002384" "ffff"  # one broker, no rack
        "0002" "6161"  # cluster id
        "0000006f"  # controller
        "00000000"  # no topics
    )  # fmt: skip
    with peer(lambda _: len(body).to_bytes(4, "big") + body) as port:
        metadata = ask_metadata("127.0.0.1", port)
    assert metadata.brokers == ((111, "127.0.0.1", 9092),)
    assert (metadata.cluster_id, metadata.controller_id) == ("aa", 111)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x04\x00\x00\x00\x01",
        b"\x00\x00\x00\x06\x00\x00\x1e\xef\x00\x00",
    ],
)
def test_something_else_on_the_port_is_no_broker(answer: bytes) -> None:
    with peer(lambda _: answer) as port, pytest.raises(ValueError):
        ask_metadata("127.0.0.1", port)


def test_a_peer_that_hangs_up_is_no_broker() -> None:
    with peer(lambda _: b"\x00\x00") as port, pytest.raises(ConnectionError):
        ask_metadata("127.0.0.1", port)


def test_waiting_ends_at_the_time_limit_on_the_given_clock() -> None:
    clock, port = SimulatedClock(), free_port()
    with pytest.raises(UnavailableError, match=f"no Kafka broker answered at 127.0.0.1:{port} within 5 s"):
        wait_for_broker("127.0.0.1", port, timeout_s=5, clock=clock)
    assert clock.monotonic_ns() >= 5 * NS_PER_S


def test_waiting_ends_at_once_when_the_process_died() -> None:
    clock = SimulatedClock()
    with pytest.raises(UnavailableError, match="it ended with code 1"):
        wait_for_broker("127.0.0.1", free_port(), timeout_s=5, died=lambda: "it ended with code 1", clock=clock)
    assert clock.monotonic_ns() == 0
