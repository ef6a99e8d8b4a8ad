"""Connections of a group are ended, and no others: not the store's, not those made later under the same number."""

from __future__ import annotations

import socket

import pytest
from trainwarden_hook.group_sockets import GroupSockets


def pair(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(server.getsockname())
    return near, server.accept()[0]


def test_only_what_was_there_and_is_not_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peers, socket.create_server(("127.0.0.1", 0)) as store:
        monkeypatch.setenv("MASTER_PORT", str(store.getsockname()[1]))
        to_peer, peer = pair(peers)
        to_store, stored = pair(store)
        sockets = GroupSockets()
        assert sockets.take() >= 2
        later, other = pair(peers)
        sockets.shut()
        assert peer.recv(1) == b"", "the peer is thrown out"
        for near, far in ((to_store, stored), (later, other)):
            near.send(b"x")
            assert far.recv(1) == b"x"
        for one in (to_peer, peer, to_store, stored, later, other):
            one.close()
