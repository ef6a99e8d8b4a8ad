"""Routes of ours are added and taken back; what another set is neither touched nor fought."""

from __future__ import annotations

import errno

import pytest
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.moving import Mover
from trainwarden_hook.netlink import NetlinkError
from trainwarden_hook.rails import Rails, parse_rails
from trainwarden_hook.routes import OWNER, Route


class FakeTable:
    """The kernel's table."""

    def __init__(self, *routes: Route, refuse: int = 0) -> None:
        self.routes = list(routes)
        self.refuse = refuse

    def all(self) -> list[Route]:
        return list(self.routes)

    def add(self, route: Route) -> bool:
        if self.refuse:
            raise NetlinkError(self.refuse, "refused")
        self.routes.append(route)
        return True

    def remove(self, route: Route) -> bool:
        self.routes = [
            r for r in self.routes if (r.destination, r.metric, r.owner) != (route.destination, route.metric, OWNER)
        ]
        return True

    def metrics(self, destination: str) -> list[int]:
        return sorted(route.metric for route in self.routes if route.destination == destination)


def rails(flat: bool = False) -> Rails:
    nodes = {
        f"n{i}": {"address": f"10.0.{1 if flat else 0}.{i}", "a": f"10.0.1.{i}", "b": f"10.0.2.{i}"} for i in (1, 2)
    }
    return parse_rails({"rails": {"a": "eth0", "b": "eth1"}, "nodes": nodes}, "n1")


def mover(table: FakeTable, flat: bool = False) -> Mover:
    return Mover(rails(flat), table, [4, 5])  # type: ignore[arg-type]


def test_a_move_there_and_back_leaves_the_ordinary_routes() -> None:
    table, peer = FakeTable(), rails().peers[0]
    moving = mover(table)
    assert moving.adopt() == {"n2": 0}
    assert table.metrics("10.0.0.2") == [110, 120]
    assert moving.move(peer, 1)
    assert table.metrics("10.0.0.2") == [51, 110, 120]
    assert mover(table).adopt() == {"n2": 1}, "the next warden finds the way round in use"
    assert moving.move(peer, 0)
    moving.clear()
    assert table.routes == []


def test_a_node_whose_address_is_on_a_rail_gets_no_route_until_it_moves() -> None:
    table = FakeTable()
    moving = mover(table, flat=True)
    moving.adopt()
    assert table.routes == []
    assert moving.move(rails(flat=True).peers[0], 1)
    assert table.metrics("10.0.1.2") == [51]


def test_a_foreign_route_that_would_win_is_named_and_another_is_left_alone() -> None:
    foreign = Route("10.0.0.2", "10.0.1.9", 4, 0, owner=3)
    with pytest.raises(UsageError, match="metric 0 and protocol 3 wins over ours"):
        mover(FakeTable(foreign)).adopt()
    mild = Route("10.0.0.2", "10.0.1.9", 4, 100, owner=3)
    elsewhere = Route("10.9.9.9", "10.0.1.9", 4, 51)
    table = FakeTable(mild, elsewhere)
    moving = mover(table)
    assert moving.adopt() == {"n2": 0}
    moving.move(rails().peers[0], 1)
    moving.clear()
    assert table.routes == [mild, elsewhere]


def test_what_the_kernel_refuses_is_told_and_no_right_at_all_is_a_sentence() -> None:
    assert not mover(FakeTable(refuse=errno.ENETUNREACH)).move(rails().peers[0], 1)
    with pytest.raises(UsageError, match="CAP_NET_ADMIN"):
        mover(FakeTable(refuse=errno.EPERM)).move(rails().peers[0], 1)


def test_an_interface_that_is_not_there_carries_nothing() -> None:
    table = FakeTable()
    moving = Mover(rails(), table, [4, 0])  # type: ignore[arg-type]
    moving.adopt()
    assert table.metrics("10.0.0.2") == [110]
    assert not moving.move(rails().peers[0], 1)
