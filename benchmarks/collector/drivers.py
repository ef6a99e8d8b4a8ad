"""A network driver that answers `ethtool` with recorded statistics. Light, because the measured agent itself loads it."""

from __future__ import annotations

import struct
from pathlib import Path

GDRVINFO, GSTRINGS, GSTATS = 0x03, 0x1B, 0x1D
RECORDED = Path(__file__).parents[2] / "tests/fixtures/rocm-nic/ethtool_S_enp68s0.txt"


class RecordedDriver:
    """Answers to ethtool with the names and values of a captured port; what else is asked is not supported."""

    def __init__(self) -> None:
        lines = RECORDED.read_text(encoding="utf-8").splitlines()[1:]
        pairs = [line.split(":") for line in lines if ":" in line]
        self._names = b"".join(struct.pack("=32s", name.strip().encode()) for name, _ in pairs)
        self._values = struct.pack(f"={len(pairs)}Q", *(int(value) for _, value in pairs))
        self._count = len(pairs)

    def __call__(self, interface: str, request: bytearray) -> None:
        del interface
        (command,) = struct.unpack_from("=I", request)
        if command == GDRVINFO:
            request[4:9] = b"ionic"
            struct.pack_into("=I", request, 180, self._count)
        elif command == GSTRINGS:
            request[12 : 12 + len(self._names)] = self._names
        elif command == GSTATS:
            request[8 : 8 + len(self._values)] = self._values
        else:
            raise OSError(95, "Operation not supported")
