"""Asking a network driver by ioctl, as the tool `ethtool` does, without starting it: driver, statistics, link, module memory."""

from __future__ import annotations

import fcntl
import socket
import struct
from array import array
from collections.abc import Callable
from typing import NamedTuple

SIOCETHTOOL = 0x8946
GDRVINFO, GSTRINGS, GSTATS = 0x03, 0x1B, 0x1D
GMODULEINFO, GMODULEEEPROM, GLINKSETTINGS, GFECPARAM = 0x42, 0x43, 0x4C, 0x50
SET_OF_STATISTICS = 1
NAME_BYTES = 32
STATISTICS_MAX = 8192
# the kernel writes as many statistics as there are by now, whatever we made room for: channels may have been added since we asked
SPARE = 2048
MODULE_BYTES_MAX = 16384
SPEED_UNKNOWN_MBPS = 0xFFFFFFFF

Ask = Callable[[str, bytearray], None]
"""Put a request (its number in the first four bytes) to an interface's driver; the answer replaces it. Raises `OSError`."""


class Driver(NamedTuple):
    """Who drives an interface."""

    name: str
    version: str
    firmware: str
    bus: str
    statistics: int


class LinkSettings(NamedTuple):
    """What the link agreed on; None where the driver does not know."""

    speed_mbps: int | None
    full_duplex: bool | None
    negotiates: bool


class Kernel:
    """Asks the real kernel."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def __call__(self, interface: str, request: bytearray) -> None:
        memory = array("B", request)
        fcntl.ioctl(self._socket, SIOCETHTOOL, struct.pack("16sP16x", interface.encode()[:15], memory.buffer_info()[0]))
        request[:] = memory.tobytes()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def driver(ask: Ask, interface: str) -> Driver:
    """Name, version, firmware and address of a driver, and how many statistics it has."""
    request = bytearray(196)
    struct.pack_into("=I", request, 0, GDRVINFO)
    ask(interface, request)
    texts = [text_of(bytes(request[at : at + 32])) for at in (4, 36, 68, 100)]
    (count,) = struct.unpack_from("=I", request, 180)
    return Driver(texts[0], texts[1], texts[2], texts[3], min(count, STATISTICS_MAX))


def names(ask: Ask, interface: str, count: int) -> list[str]:
    """Names of the statistics, without the blanks some drivers pad them with."""
    request = bytearray(12 + NAME_BYTES * (count + SPARE))
    struct.pack_into("=III", request, 0, GSTRINGS, SET_OF_STATISTICS, count)
    ask(interface, request)
    given = min(struct.unpack_from("=I", request, 8)[0], count)
    return [text_of(bytes(request[at : at + NAME_BYTES])) for at in range(12, 12 + NAME_BYTES * given, NAME_BYTES)]


def statistics(ask: Ask, interface: str, count: int) -> array[int]:
    """Values of the statistics; fewer than `count` when the driver has fewer by now."""
    request = bytearray(8 + 8 * (count + SPARE))
    struct.pack_into("=II", request, 0, GSTATS, count)
    ask(interface, request)
    given = min(struct.unpack_from("=I", request, 4)[0], count)
    return array("Q", bytes(request[8 : 8 + 8 * given]))


def link_settings(ask: Ask, interface: str) -> LinkSettings:
    """Speed, duplex and negotiation. The length of the masks behind them does not matter for that."""
    request = bytearray(48 + 12 * 127)
    struct.pack_into("=I", request, 0, GLINKSETTINGS)
    ask(interface, request)
    speed, duplex = struct.unpack_from("=IB", request, 4)
    if speed == 0:  # the kernel only told how long the masks are: ask again with that length
        words = -struct.unpack_from("=b", request, 15)[0]
        request = bytearray(48 + 12 * 127)
        struct.pack_into("=I", request, 0, GLINKSETTINGS)
        struct.pack_into("=b", request, 15, min(max(0, words), 127))
        ask(interface, request)
        speed, duplex = struct.unpack_from("=IB", request, 4)
    known = speed not in (0, SPEED_UNKNOWN_MBPS)
    return LinkSettings(speed if known else None, duplex == 1 if duplex in (0, 1) else None, request[11] == 1)


def active_fec(ask: Ask, interface: str) -> int:
    """Bits of the error correction in use: 1 none, 2 auto, 4 off, 8 Reed-Solomon, 16 Base-R, 32 low latency Reed-Solomon."""
    request = bytearray(16)
    struct.pack_into("=I", request, 0, GFECPARAM)
    ask(interface, request)
    return int(struct.unpack_from("=I", request, 4)[0])


def module_memory(ask: Ask, interface: str) -> bytes:
    """What can be read of a plugged module's memory, pages one after the other."""
    request = bytearray(48)
    struct.pack_into("=I", request, 0, GMODULEINFO)
    ask(interface, request)
    length = min(struct.unpack_from("=I", request, 8)[0], MODULE_BYTES_MAX)
    request = bytearray(16 + length)
    struct.pack_into("=IIII", request, 0, GMODULEEEPROM, 0, 0, length)
    ask(interface, request)
    return bytes(request[16:])


def text_of(field: bytes) -> str:
    """Text up to the first zero byte; bytes that are no UTF-8 are replaced."""
    return field.partition(b"\0")[0].decode("utf-8", "replace").strip()
