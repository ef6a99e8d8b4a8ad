"""Addresses of ports as nodes announce them, which port of a peer stands opposite which of ours, and which GID a port speaks from."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ETHERNET, INFINIBAND = "eth", "ib"
PORTS_MAX = 16
_NUMBERS = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{1,4})\.([0-9a-f]{1,6})\.([0-9a-f]{1,8})\.(eth|ib)")
_NAME = re.compile(r"[\w.:-]{1,60}/\d{1,3}")
_MAPPED = re.compile(r"0000:0000:0000:0000:0000:ffff:")
_LINK_LOCAL = "fe80:"


class Address(NamedTuple):
    """Where a datagram goes: what an address handle is made of, and the queue pair with its key."""

    gid: bytes
    lid: int
    qpn: int
    qkey: int
    layer: str

    def text(self) -> str:
        """As it stands in announcements."""
        return f"{self.gid.hex()}.{self.lid:x}.{self.qpn:x}.{self.qkey:x}.{self.layer}"


def address_of(text: str) -> Address | None:
    """The address in a text; None when it is none.

    Examples
    --------
    >>> address_of("fe800000000000000002c903000a1b2c.1c.24a.7f3a9c01.ib").lid
    28
    """
    found = _NUMBERS.fullmatch(text)
    if found is None:
        return None
    gid, lid, qpn, qkey, layer = found.groups()
    return Address(bytes.fromhex(gid), int(lid, 16), int(qpn, 16), int(qkey, 16), layer)


def announcement(ports: Mapping[str, Address]) -> str:
    """All ports of a node as one attribute."""
    return " ".join(f"{name}={address.text()}" for name, address in sorted(ports.items())[:PORTS_MAX])


def announced(text: str) -> dict[str, Address]:
    """Ports by name; words that are no port are left out.

    Examples
    --------
    >>> sorted(announced("mlx5_0/1=fe800000000000000002c903000a1b2c.1c.24a.7f3a9c01.ib nonsense"))
    ['mlx5_0/1']
    """
    found: dict[str, Address] = {}
    for word in text.split(" ", PORTS_MAX)[:PORTS_MAX]:
        name, _, rest = word.partition("=")
        address = address_of(rest)
        if address is not None and _NAME.fullmatch(name):
            found[name] = address
    return found


def opposite(own: Mapping[str, str], theirs: Mapping[str, Address]) -> dict[str, str]:
    """Which of their ports each of ours asks: that of the same name, else that of the same place; never one of another kind of network.

    Parameters
    ----------
    own
        Kind of network (`ETHERNET`, `INFINIBAND`) of our ports by name.

    Examples
    --------
    >>> a = address_of("00" * 16 + ".1.2.3.ib")
    >>> opposite({"mlx5_0/1": "ib", "mlx5_1/1": "ib"}, {"mlx5_1/1": a, "mlx5_2/1": a})
    {'mlx5_0/1': 'mlx5_1/1', 'mlx5_1/1': 'mlx5_1/1'}
    """
    found: dict[str, str] = {}
    for layer in (ETHERNET, INFINIBAND):
        ours = sorted(name for name, kind in own.items() if kind == layer)
        others = sorted(name for name, address in theirs.items() if address.layer == layer)
        for place, name in enumerate(ours):
            if others:
                found[name] = name if name in others else others[place % len(others)]
    return dict(sorted(found.items()))


class GidEntry(NamedTuple):
    """A line of a port's GID table in /sys."""

    place: int
    gid: str
    kind: str


def gid_index(layer: str, table: Sequence[GidEntry]) -> int:
    """Which GID to speak from: over Ethernet RoCE v2 with an IPv4 address, else RoCE v2 that routes, else any RoCE v2; 0 on InfiniBand.

    Examples
    --------
    >>> link, mapped = "fe80:0000:0000:0000:0202:c9ff:fe0a:1b2c", "0000:0000:0000:0000:0000:ffff:0a00:0001"
    >>> gid_index("eth", [GidEntry(0, link, "IB/RoCE v1"), GidEntry(1, link, "RoCE v2"), GidEntry(3, mapped, "RoCE v2")])
    3
    """
    if layer != ETHERNET:
        return 0
    second = [entry for entry in table if entry.kind == "RoCE v2" and entry.gid.strip("0:")]
    best = sorted(second, key=lambda e: (not _MAPPED.match(e.gid), e.gid.startswith(_LINK_LOCAL), e.place))
    return best[0].place if best else 0


def sender_of(header: bytes, slid: int, has_header: bool) -> str:
    """Who sent a datagram, to count his by: the source in the header in front of it, where RoCE v2 over IPv4 puts an IPv4 header last.

    Examples
    --------
    >>> sender_of(bytes(40), 28, False)
    'lid 28'
    >>> sender_of(bytes(20) + bytes([0x45]) + bytes(11) + bytes([10, 0, 0, 7]) + bytes(4), 0, True)
    '10.0.0.7'
    """
    if not has_header or len(header) < 40:
        return f"lid {slid}"
    if header[0] >> 4 != 6 and header[20] >> 4 == 4:
        return socket.inet_ntoa(header[32:36])
    return header[8:24].hex()
