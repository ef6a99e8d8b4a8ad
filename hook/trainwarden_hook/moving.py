"""Puts the traffic to a peer on a rail, by routes of our own: one with a low metric over the rail wanted, before the others."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable

from trainwarden_hook.addresses import UsageError
from trainwarden_hook.netlink import NetlinkError
from trainwarden_hook.rails import Peer, Rails
from trainwarden_hook.routes import BASE_METRIC, ESCAPE_METRIC, Route, RouteTable

log = logging.getLogger("trainwarden.links")
RAIL_METRIC_STEP = 10


class Mover:
    """Sets and removes routes; keeps no state but the kernel's.

    Parameters
    ----------
    indexes
        Interface index per rail, 0 while there is none; changed by the caller as links come and go.
    """

    def __init__(self, rails: Rails, table: RouteTable, indexes: list[int]) -> None:
        self._rails = rails
        self._table = table
        self._indexes = indexes

    def adopt(self) -> dict[str, int]:
        """Rail in use per peer by routes that an earlier warden left; 0 where there are none. Ordinary routes are laid.

        Raises
        ------
        UsageError
            A route of another owner would win over ours.
        """
        found = self._table.all()
        in_use = {peer.name: self._adopt_one(peer, found) for peer in self._rails.peers}
        for rail in range(len(self._indexes)):
            self.lay(rail)
        return in_use

    def _adopt_one(self, peer: Peer, found: list[Route]) -> int:
        to_peer = [route for route in found if route.destination == peer.address]
        for route in to_peer:
            if not route.ours and route.metric <= ESCAPE_METRIC + len(self._rails.names):
                raise UsageError(
                    f"links: a route to {peer.address} ({peer.name}) with metric {route.metric} and protocol {route.owner} "
                    f"wins over ours; give it a metric above {ESCAPE_METRIC + len(self._rails.names)} or remove it"
                )
        ours = [route for route in to_peer if route.ours and route.metric < BASE_METRIC]
        for route in ours:
            rail = route.metric - ESCAPE_METRIC
            if 0 < rail < len(self._indexes) and self._indexes[rail] == route.interface:
                return rail
        return 0

    def lay(self, rail: int) -> None:
        """Ordinary routes to all peers over a rail: after the start, and after the kernel dropped them with the link."""
        if self._indexes[rail]:
            for peer in self._rails.peers:
                if peer.address not in peer.on:
                    self._set(self._base(peer, rail))

    def move(self, peer: Peer, rail: int) -> bool:
        """Traffic to ``peer`` over ``rail``; ``False`` when the kernel would not."""
        done = rail == 0 or (self._indexes[rail] > 0 and self._set(self._escape(peer, rail)))
        if done:
            for other in range(1, len(self._indexes)):
                if other != rail and self._indexes[other]:
                    self._unset(self._escape(peer, other))
        return done

    def ask_again(self, peer: Peer, rail: int) -> None:
        """Who the peer is on a rail that has just come up and brings nothing yet."""
        if self._indexes[rail]:
            self._table.forget_neighbour(peer.on[rail], self._indexes[rail])

    def clear(self) -> None:
        """Take all of ours away."""
        for route in self._table.all():
            if route.ours and any(route.destination == peer.address for peer in self._rails.peers):
                self._unset(route)

    def _base(self, peer: Peer, rail: int) -> Route:
        return self._route(peer, rail, BASE_METRIC + RAIL_METRIC_STEP * rail)

    def _escape(self, peer: Peer, rail: int) -> Route:
        return self._route(peer, rail, ESCAPE_METRIC + rail)

    def _route(self, peer: Peer, rail: int, metric: int) -> Route:
        return Route(peer.address, peer.on[rail], self._indexes[rail], metric, self._rails.own.address)

    def _set(self, route: Route) -> bool:
        try:
            self._table.add(route)
        except NetlinkError as error:
            if error.errno == errno.EPERM:
                raise UsageError(
                    "links: routes may not be set; run the warden as root or with CAP_NET_ADMIN"
                ) from error
            log.warning("no route to %s by %s: %s", route.destination, route.gateway, error.strerror)
            return False
        return True

    def _unset(self, route: Route) -> None:
        try:
            self._table.remove(route)
        except NetlinkError as error:
            log.warning("the route to %s by %s stays: %s", route.destination, route.gateway, error.strerror)


def strict_filters(interfaces: Iterable[str], root: str = "/proc/sys/net/ipv4/conf") -> list[str]:
    """Interfaces on which the kernel drops what comes by another rail than it would leave (rp_filter = 1)."""
    return [name for name in interfaces if max(_filter(root, "all"), _filter(root, name)) == 1]


def _filter(root: str, name: str) -> int:
    try:
        with open(f"{root}/{name}/rp_filter", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
