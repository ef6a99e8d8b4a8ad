"""Routes to peers that carry our mark. What another set is never touched: we add better ones and take only ours back."""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass

from trainwarden_hook.netlink import (
    NLM_F_CREATE,
    NLM_F_DUMP,
    NLM_F_EXCL,
    Channel,
    NetlinkError,
    attribute,
    attributes,
    nested,
)

OWNER = 116
"""Number in the protocol field of our routes (``ip route show proto 116``); no routing daemon uses it."""
BASE_METRIC, ESCAPE_METRIC = 110, 50
ROUTE = struct.Struct("=BBBBBBBBI")
NEIGHBOUR = struct.Struct("=BxxxiHBB")
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE, RTM_DELNEIGH = 24, 25, 26, 29
NDA_DST = 1
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC, RTA_METRICS, RTA_TABLE = 1, 4, 5, 6, 7, 8, 15
RTAX_RTO_MIN = 13
RT_TABLE_MAIN, RTN_UNICAST, HOST_BITS = 254, 1, 32
GONE = frozenset({errno.ESRCH, errno.ENODEV, errno.ENOENT})


@dataclass(frozen=True, slots=True)
class Route:
    """A route to one address in the main table; `owner` is the protocol field, `interface` an index."""

    destination: str
    gateway: str
    interface: int
    metric: int
    source: str = ""
    owner: int = OWNER

    @property
    def ours(self) -> bool:
        """Whether it carries our mark."""
        return self.owner == OWNER


class RouteTable:
    """The main table of this network namespace.

    Parameters
    ----------
    rto_min_ms
        Shortest retransmission time-out of TCP over our routes; 0 leaves the kernel's 200 ms.
    """

    def __init__(self, rto_min_ms: int = 0) -> None:
        self._channel = Channel()
        self._rto_min_ms = rto_min_ms

    def close(self) -> None:
        """Give the socket back; routes stay."""
        self._channel.close()

    def add(self, route: Route) -> bool:
        """Set a route of ours; ``False`` when it was there.

        Raises
        ------
        NetlinkError
            The kernel refused it: no permission, no such gateway, interface down.
        """
        try:
            self._channel.ask(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, self._encode(route))
        except NetlinkError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def remove(self, route: Route) -> bool:
        """Take a route of ours away; ``False`` when it was gone. One of another owner cannot be meant: our mark is in the request.

        Raises
        ------
        NetlinkError
            The kernel refused.
        """
        try:
            self._channel.ask(RTM_DELROUTE, 0, _core(route))
        except NetlinkError as error:
            if error.errno not in GONE:
                raise
            return False
        return True

    def forget_neighbour(self, address: str, interface: int) -> None:
        """Let the kernel ask anew who has ``address``: a question that got lost while a port came up is repeated after a second only."""
        payload = NEIGHBOUR.pack(socket.AF_INET, interface, 0, 0, 0) + attribute(NDA_DST, socket.inet_aton(address))
        try:
            self._channel.ask(RTM_DELNEIGH, 0, payload)
        except NetlinkError as error:
            if error.errno not in GONE:
                raise

    def all(self) -> list[Route]:
        """Routes to single addresses, whoever set them."""
        payload = ROUTE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)
        answers = self._channel.ask(RTM_GETROUTE, NLM_F_DUMP, payload)
        told = (_decode(payload) for _, payload in answers)
        return [route for route in told if route is not None]

    def _encode(self, route: Route) -> bytes:
        parts = [_core(route)]
        if route.source:
            parts.append(attribute(RTA_PREFSRC, socket.inet_aton(route.source)))
        if self._rto_min_ms:
            parts.append(nested(RTA_METRICS, attribute(RTAX_RTO_MIN, struct.pack("=I", self._rto_min_ms))))
        return b"".join(parts)


def _core(route: Route) -> bytes:
    """What names a route; its settings may be another version's, so they are no part of it."""
    return (
        ROUTE.pack(socket.AF_INET, HOST_BITS, 0, 0, RT_TABLE_MAIN, OWNER, 0, RTN_UNICAST, 0)
        + attribute(RTA_DST, socket.inet_aton(route.destination))
        + attribute(RTA_GATEWAY, socket.inet_aton(route.gateway))
        + attribute(RTA_OIF, struct.pack("=I", route.interface))
        + attribute(RTA_PRIORITY, struct.pack("=I", route.metric))
    )


def _decode(payload: bytes) -> Route | None:
    family, bits, _, _, table, owner, _, kind, _ = ROUTE.unpack_from(payload)
    found = attributes(payload[ROUTE.size :])
    if (family, bits, table, kind) != (socket.AF_INET, HOST_BITS, RT_TABLE_MAIN, RTN_UNICAST) or RTA_DST not in found:
        return None
    return Route(
        socket.inet_ntoa(found[RTA_DST]),
        socket.inet_ntoa(found[RTA_GATEWAY]) if RTA_GATEWAY in found else "",
        _number(found.get(RTA_OIF)),
        _number(found.get(RTA_PRIORITY)),
        socket.inet_ntoa(found[RTA_PREFSRC]) if RTA_PREFSRC in found else "",
        owner,
    )


def _number(payload: bytes | None) -> int:
    return int(struct.unpack("=I", payload)[0]) if payload is not None else 0
