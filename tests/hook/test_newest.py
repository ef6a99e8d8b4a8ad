"""Two worlds of one job cannot both go on: who finds a newer one than its own leaves it."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from trainwarden_hook.elastic import Newest


def test_the_newest_is_known_to_all_and_nobody_else() -> None:
    store = HashStore()
    first, second = Newest(store, "j"), Newest(store, "j")
    assert first.generation() == 0
    first.announce(3, speaks=True)
    second.announce(9, speaks=False)
    assert (first.generation(), second.generation(), Newest(store, "other").generation()) == (3, 3, 0)
    second.announce(4, speaks=True)
    assert first.generation() > 3, "the world of generation 3 is called off"


def test_a_store_that_is_gone_calls_nobody_off() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    newest = Newest(PrefixStore("x", TCPStore("127.0.0.1", server.port, is_master=False)), "j")
    newest.announce(5, speaks=True)
    assert newest.generation() == 5
    del server
    assert newest.generation() == 0
    newest.announce(6, speaks=True)
