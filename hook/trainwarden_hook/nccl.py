"""NCCL's own port fail-over: the settings that switch it on, and what its log tells of it.

NCCL moves the traffic of InfiniBand and RoCE ports by itself (fail-over from 2.29.7 on, going back after a repair from 2.30.3 on) where a
process has several ports; older versions ignore the settings. Nothing here has met a device: the lines are those of the source text.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

log = logging.getLogger("trainwarden.links")
SETTINGS = {
    "NCCL_IB_RESILIENCY_PORT_FAILOVER": "1",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY": "1",
    "NCCL_DEBUG": "WARN",
}
MAX_READ_BYTES = 1 << 20
MAX_PARTIAL_BYTES = 4096
NEEDLE = b"NET/IB"
_PATTERNS = (
    ("lost", re.compile(r"The error is fatal \(No functional devices left\)")),
    ("alone", re.compile(r"no other device to fail over to")),
    ("failed", re.compile(r"Port recovery failed")),
    ("returned", re.compile(r"Port recovery succeeded")),
    ("moved", re.compile(r"marked as failed\. Initiating recovery|Replacing QP: ")),
    ("port_down", re.compile(r"Got async event ?: ?port error")),
    ("port_up", re.compile(r"Got async event ?: ?port active")),
)
_DEVICE = re.compile(r"\b(?:on device|for device|device|devIndex=) ?(\d+)|NET/IB ?: ?(mlx\w+|\w+):(\d+) ")


@dataclass(frozen=True, slots=True)
class PortEvent:
    """What a line of NCCL's log tells: ``kind`` is lost, alone, failed, returned, moved, port_down or port_up."""

    kind: str
    device: str
    line: str


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Settings to add to a training process; what the operator has set stays."""
    return {key: value for key, value in SETTINGS.items() if key not in given}


def parse_line(line: str) -> PortEvent | None:
    """The event in one line of the log; ``None`` for all others.

    Examples
    --------
    >>> parse_line("n0:7:9 [0] NCCL WARN NET/IB : mlx5_1:1 Got async event : port error").kind
    'port_down'
    """
    kind = next((kind for kind, pattern in _PATTERNS if pattern.search(line)), None)
    if kind is None or "NET/IB" not in line:
        return None
    device = _DEVICE.search(line)
    named = next((part for part in device.groups() if part), "") if device else ""
    return PortEvent(kind, named, line.strip()[:500])


class LogTail:
    """Reads what was added to the workers' logs since the last look; from the end at the first.

    Parameters
    ----------
    pattern
        Glob of the log files.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at: dict[str, int] = {path: _size(path) for path in glob.glob(pattern)}
        self._partial: dict[str, bytes] = {}

    def read(self) -> list[PortEvent]:
        """Events since the last call."""
        paths = set(glob.glob(self._pattern))
        for gone in set(self._at) - paths:
            self._at.pop(gone)
            self._partial.pop(gone, None)
        return [event for path in sorted(paths) for event in self._read_one(path)]

    def _read_one(self, path: str) -> Iterator[PortEvent]:
        at, size = self._at.get(path, 0), _size(path)
        if size < at:
            at = 0
        if size == at:
            return
        try:
            with open(path, "rb") as file:
                file.seek(max(at, size - MAX_READ_BYTES))
                data = self._partial.pop(path, b"") + file.read(MAX_READ_BYTES)
                self._at[path] = file.tell()
        except OSError as error:
            log.warning("the log %s cannot be read: %s", path, error.strerror)
            return
        whole, _, rest = data.rpartition(b"\n")
        self._partial[path] = rest[-MAX_PARTIAL_BYTES:]
        for line in whole.split(b"\n"):
            if NEEDLE in line and (event := parse_line(line.decode(errors="replace"))) is not None:
                yield event


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
