"""Pages of a plugged module's memory by netlink: the older ioctl knows nothing of modules for 400 Gbit/s (CMIS)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator

from collectors.network.optics import CMIS, CMIS_LANES_AT

NETLINK_GENERIC = 16
CONTROL, GET_FAMILY, NAME_OF_FAMILY, ID_OF_FAMILY = 0x10, 3, 2, 1
MODULE_EEPROM_GET = 31
HEADER, OFFSET, LENGTH, PAGE, BANK, I2C_ADDRESS, DATA = 1, 2, 3, 4, 5, 6, 7
DEVICE_NAME = 2
NESTED, TYPE_BITS = 0x8000, 0x3FFF
ERROR_MESSAGE = 2
REQUEST = 1
EEPROM_ADDRESS = 0x50
HALF_PAGE = 128
LANES_PAGE = 0x11
TIMEOUT_S = 5.0

ReadPage = Callable[[str, int, int], bytes]
"""128 bytes of an interface's module: (interface, page, offset). Raises `OSError`."""


def attribute(kind: int, payload: bytes) -> bytes:
    """One netlink attribute, padded to four bytes.

    Examples
    --------
    >>> attribute(2, b"eth0\\0").hex()
    '090002006574683000000000'
    """
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def attributes(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, payload) of the attributes in a message; ends at the first that does not fit."""
    at = 0
    while at + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, at)
        if length < 4 or at + length > len(payload):
            return
        yield kind & TYPE_BITS, payload[at + 4 : at + length]
        at += (length + 3) & ~3


def message(family: int, command: int, sequence: int, body: bytes) -> bytes:
    """A generic netlink request."""
    return struct.pack("=IHHIIBBH", 20 + len(body), family, REQUEST, sequence, 0, command, 1, 0) + body


def answer(reply: bytes) -> dict[int, bytes]:
    """Attributes of a reply; raises the `OSError` that it carries."""
    if len(reply) < 20:
        raise OSError(5, "netlink answer is too short")
    length, kind = struct.unpack_from("=IH", reply)
    if kind == ERROR_MESSAGE:
        number = -struct.unpack_from("=i", reply, 16)[0]
        raise OSError(number, os.strerror(number))
    return dict(attributes(reply[20 : min(length, len(reply))]))


class Netlink:
    """Asks the real kernel."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._family = 0
        self._sequence = 0

    def __call__(self, interface: str, page: int, offset: int) -> bytes:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_GENERIC)
            self._socket.settimeout(TIMEOUT_S)
            found = self._ask(CONTROL, GET_FAMILY, attribute(NAME_OF_FAMILY, b"ethtool\0"))
            (self._family,) = struct.unpack_from("=H", found.get(ID_OF_FAMILY, b"\0\0"))
        header = attribute(HEADER | NESTED, attribute(DEVICE_NAME, interface.encode()[:15] + b"\0"))
        numbers = ((OFFSET, struct.pack("=I", offset)), (LENGTH, struct.pack("=I", HALF_PAGE)), (PAGE, bytes([page])), (BANK, b"\0"),
                   (I2C_ADDRESS, bytes([EEPROM_ADDRESS])))  # fmt: skip
        found = self._ask(self._family, MODULE_EEPROM_GET, header + b"".join(attribute(k, v) for k, v in numbers))
        return found.get(DATA, b"")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, family: int, command: int, body: bytes) -> dict[int, bytes]:
        assert self._socket is not None
        self._sequence += 1
        self._socket.send(message(family, command, self._sequence, body))
        while True:
            reply = self._socket.recv(65536)
            # an answer that came after its question had timed out belongs to nobody
            if len(reply) >= 12 and struct.unpack_from("=I", reply, 8)[0] == self._sequence:
                return answer(reply)


def memory_by_pages(read: ReadPage, interface: str) -> bytes:
    """What `optics.decode` needs of a module, each page in its place and zeros between."""
    lower = read(interface, 0, 0)[:HALF_PAGE]
    if not lower or lower[0] not in CMIS or (len(lower) > 2 and lower[2] & 0x80):  # flat memory: there is only one page
        return lower
    lanes = read(interface, LANES_PAGE, HALF_PAGE)[:HALF_PAGE]
    return lower.ljust(CMIS_LANES_AT + HALF_PAGE, b"\0") + lanes.ljust(HALF_PAGE, b"\0")
