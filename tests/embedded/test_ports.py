from __future__ import annotations

import socket
from pathlib import Path

import pytest

from trainwarden.embedded import ports
from trainwarden.embedded.ports import free_port, require_free_port
from trainwarden.errors import UnavailableError


def test_a_free_port_can_be_bound() -> None:
    require_free_port("127.0.0.1", free_port(), "a test")


def test_a_free_port_is_none_that_connections_are_given() -> None:
    handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < handed_out for _ in range(20))


def test_where_all_of_those_are_taken_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "TRIES", 0)
    require_free_port("127.0.0.1", free_port(), "a test")


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UnavailableError) as caught:
            require_free_port("127.0.0.1", port, "the broker")
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 is in use by another process, the broker needs it free: "
        "stop the other process or choose another port"
    )


@pytest.mark.parametrize(
    ("host", "port", "says"), [("192.0.2.1", 0, "no interface"), ("127.0.0.1", 70000, "cannot be bound")]
)
def test_addresses_that_cannot_be_bound_are_explained(host: str, port: int, says: str) -> None:
    with pytest.raises(UnavailableError, match=says):
        require_free_port(host, port, "the broker")
