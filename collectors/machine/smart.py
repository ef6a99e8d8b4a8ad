"""Health of NVMe disks: the log page 2 of the specification, asked by ioctl (needs CAP_SYS_ADMIN and the device file)."""

from __future__ import annotations

import fcntl
import os
import struct
from array import array
from collections.abc import Callable

from collectors.base import Row

NVME_IOCTL_ADMIN_CMD = 0xC0484E41
GET_LOG_PAGE, HEALTH_LOG, ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
LOG_BYTES = 512
KELVIN = 273.15

AskDisk = Callable[[str], bytes]
"""The health log of ``/dev/nvme0``. Raises `OSError`."""


def health_log(device: str) -> bytes:
    """Ask the controller; may take long on a dying disk."""
    memory = array("B", bytes(LOG_BYTES))
    dwords = LOG_BYTES // 4 - 1
    # opcode, flags, reserved, namespace, cdw2, cdw3, metadata, address, metadata length, length, cdw10..15, timeout, result
    command = struct.pack("=BBHIIIQQIIIIIIIIII", GET_LOG_PAGE, 0, 0, ALL_NAMESPACES, 0, 0, 0, memory.buffer_info()[0], 0, LOG_BYTES,
                          HEALTH_LOG | dwords << 16, 0, 0, 0, 0, 0, 2000, 0)  # fmt: skip
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, NVME_IOCTL_ADMIN_CMD, command)
    finally:
        os.close(descriptor)
    return memory.tobytes()


def decode_health(log: bytes) -> Row:
    """Columns of a disk; empty when the log is too short."""
    if len(log) < 176:
        return {}
    warning, kelvin, spare, threshold, used = struct.unpack_from("<BHBBB", log, 0)
    media_errors = int.from_bytes(log[160:176], "little")
    row = {
        "critical_warning": float(warning), "spare_ratio": spare / 100, "spare_threshold_ratio": threshold / 100,
        "used_ratio": used / 100, "media_errors_count": float(media_errors),
    }  # fmt: skip
    return {**row, "temp_c": kelvin - KELVIN} if kelvin else row
