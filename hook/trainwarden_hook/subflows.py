"""Parts of MPTCP connections (subflows), one by one: which there are, and how one is ended at once.

Deleting an endpoint would end its parts too, but of all peers, after some 20 ms, and what tells the far end may be lost on the way. Here
each side ends its own parts; what was under way on them the kernel sends again over the part that is left.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from trainwarden_hook.netlink import NLM_F_DUMP, Channel, NetlinkError, attributes

NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 4, 20, 21
REQUEST = struct.Struct("=BBBxI48s")
ANSWER = struct.Struct("=BBBB48sIIIII")
SOCKET = struct.Struct("!HH16s16s")
TCP_ESTABLISHED, WITH_INFO = 1, 2
INET_DIAG_ULP_INFO, ULP_MPTCP, SUBFLOW_TOKEN = 19, 3, 2


@dataclass(frozen=True, slots=True)
class Subflow:
    """One established part; ``token`` is the same for all parts of a connection, ``key`` names it to the kernel."""

    family: int
    local: str
    remote: str
    token: int
    key: bytes


class Subflows:
    """The established parts in this network namespace."""

    def __init__(self) -> None:
        self._channel = Channel(NETLINK_SOCK_DIAG)

    def close(self) -> None:
        """Give the socket back."""
        self._channel.close()

    def all(self) -> list[Subflow]:
        """Every part, of both address families."""
        found: list[Subflow] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            request = REQUEST.pack(family, socket.IPPROTO_TCP, WITH_INFO, 1 << TCP_ESTABLISHED, bytes(48))
            answers = self._channel.ask(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, request)
            found += [part for _, payload in answers if (part := _parse(payload)) is not None]
        return found

    def end(self, part: Subflow) -> bool:
        """End one part without a word to the program; ``False`` when it was gone.

        Raises
        ------
        NetlinkError
            The kernel refused: no permission, or built without INET_DIAG_DESTROY.
        """
        request = REQUEST.pack(part.family, socket.IPPROTO_TCP, 0, 1 << TCP_ESTABLISHED, part.key)
        try:
            self._channel.ask(SOCK_DESTROY, 0, request)
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True


def to_cut(parts: Iterable[Subflow], pairs: Iterable[tuple[str, str]]) -> list[Subflow]:
    """Parts between one of the ``pairs`` (local, remote) whose connection has another part to go on with."""
    parts, pairs = list(parts), set(pairs)
    hit = [part for part in parts if (part.local, part.remote) in pairs]
    left = {part.token for part in parts if (part.local, part.remote) not in pairs}
    return [part for part in hit if part.token in left]


def _parse(payload: bytes) -> Subflow | None:
    family, _, _, _, key, *_ = ANSWER.unpack_from(payload)
    inner = attributes(payload[ANSWER.size :]).get(INET_DIAG_ULP_INFO)
    told = attributes(attributes(inner).get(ULP_MPTCP, b"")) if inner is not None else {}
    if SUBFLOW_TOKEN not in told:
        return None
    _, _, local, remote = SOCKET.unpack_from(key)
    (token,) = struct.unpack("=I", told[SUBFLOW_TOKEN])
    return Subflow(family, _text(family, local), _text(family, remote), token, key)


def _text(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntoa(address[:4])
    whole = ipaddress.IPv6Address(address)
    return str(whole.ipv4_mapped or whole)
