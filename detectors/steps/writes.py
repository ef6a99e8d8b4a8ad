"""What the ranks of a job write to disks: of their processes, and of their machines where a process does not let itself be asked."""

from __future__ import annotations

import numpy as np

from detectors.base import AlignedTick, FamilyMatrix
from detectors.state import Array
from detectors.steps.processes import Ints

_OF_PROCESS, _OF_MACHINE = "write_bytes_per_s", "disk_write_bytes_per_s"
_NOT_OURS_BYTES_PER_S = 7e6
"""A machine writes for others too: so much is left out of what is said of its ranks."""

Entities = tuple[tuple[str, str], ...]


class Writes:
    """Bytes per second of some ranks at a tick. Which machine is whose is worked out again only when nodes or ranks change."""

    def __init__(self) -> None:
        self._known: tuple[Entities, dict[str, int]] = ((), {})
        self._machines: dict[str, tuple[Entities, list[str], Ints]] = {}

    def of(self, job: str, matrix: FamilyMatrix, rows: Ints, nodes: list[str], tick: AlignedTick) -> Array:
        """Of the processes in `rows`, which run on `nodes`; NaN where nobody knows."""
        own = matrix.column(_OF_PROCESS)[rows]
        host = tick.family("host")
        if host is None or _OF_MACHINE not in host.metrics or np.isfinite(own).all():
            return own
        machines = self._rows(job, host.entities, nodes)
        whole = np.where(machines >= 0, host.column(_OF_MACHINE)[machines], np.nan)
        return np.where(np.isfinite(own), own, np.maximum(whole - _NOT_OURS_BYTES_PER_S, 0.0))

    def _rows(self, job: str, entities: Entities, nodes: list[str]) -> Ints:
        if self._known[0] is not entities:
            self._known = (entities, {node: row for row, (node, _) in enumerate(entities)})
            self._machines = {}
        found = self._machines.get(job)
        if found is None or found[1] is not nodes:
            place = self._known[1]
            found = (entities, nodes, np.array([place.get(node, -1) for node in nodes], dtype=np.int64))
            self._machines[job] = found
        return found[2]
