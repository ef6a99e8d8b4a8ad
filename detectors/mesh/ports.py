"""Carriers of rail interfaces in time: who lost it, for how long, how often."""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.base import AlignedTick, FamilyMatrix
from detectors.mesh.rows import Rows
from detectors.state import Array
from trainwarden.clock import NS_PER_S

_RAIL, _UNKNOWN_ROLE = 1, 0
_KEPT_DROPS = 32


def _zeros() -> Array:
    return np.zeros(0, dtype=np.int64)


class Ports(msgspec.Struct):
    """One row for each interface: ticks that its carrier was there or not, and since when it is gone.

    `drops_ns` has those interfaces that lost their carrier within the window, with when. `loop` are the loopback ones; they and those
    that are not rails are not followed.
    """

    keys: tuple[tuple[str, str], ...] = ()
    loop: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    up_ticks: Array = msgspec.field(default_factory=_zeros)
    down_ticks: Array = msgspec.field(default_factory=_zeros)
    down_since_ns: Array = msgspec.field(default_factory=_zeros)
    drops_ns: dict[int, list[int]] = {}

    def put(
        self, tick: AlignedTick, matrix: FamilyMatrix, absent: dict[str, int], window_s: float, rows: Rows | None = None
    ) -> None:
        """One tick's interfaces. Those of nodes that are absent are kept, others that are gone are forgotten."""
        carrier, role, changes = matrix.column("carrier"), matrix.column("role"), matrix.column("carrier_changes_per_s")
        index = self._rows(matrix.entities, absent, rows or Rows())
        with np.errstate(invalid="ignore"):
            mine = (
                np.isfinite(carrier)
                & ((role == _RAIL) | (role == _UNKNOWN_ROLE) | ~np.isfinite(role))
                & ~self.loop[index]
            )
            self._note(index[mine], tick.at_ns, carrier[mine] > 0, changes[mine] > 0)
        horizon_ns = tick.at_ns - int(window_s * NS_PER_S)
        kept = {row: [at for at in drops if at >= horizon_ns] for row, drops in self.drops_ns.items()}
        self.drops_ns = {row: drops for row, drops in kept.items() if drops}

    def _note(self, index: Array, at_ns: int, up: Array, changed: Array) -> None:
        was_up = self.up_ticks[index] >= 2
        for row in index[was_up & (changed | ~up)].tolist():
            drops = self.drops_ns.get(row, [])
            if not drops or at_ns - drops[-1] > 2 * NS_PER_S:
                self.drops_ns[row] = [*drops[1 - _KEPT_DROPS :], at_ns]
        down = ~up & (was_up | (self.down_ticks[index] > 0))
        first = index[down & (self.down_ticks[index] == 0)]
        self.down_since_ns[first] = at_ns
        self.down_ticks[index] = np.where(down, self.down_ticks[index] + 1, np.where(up, 0, self.down_ticks[index]))
        self.up_ticks[index] = np.where(up, self.up_ticks[index] + 1, np.where(down, 0, self.up_ticks[index]))

    def _rows(self, entities: tuple[tuple[str, str], ...], absent: dict[str, int], rows: Rows) -> Array:
        index = rows.of(entities, self.keys)
        if index is None or not self._are_absent(index, absent):
            self._settle(entities, absent)
            index = rows.of(entities, self.keys)
        assert index is not None  # those that were missing were added
        return index

    def _are_absent(self, index: Array, absent: dict[str, int]) -> bool:
        """Whether all that are not in this tick are of nodes that are absent."""
        beside = np.ones(len(self.keys), dtype=np.bool_)
        beside[index] = False
        return all(self.keys[row][0] in absent for row in np.flatnonzero(beside).tolist())

    def _settle(self, entities: tuple[tuple[str, str], ...], absent: dict[str, int]) -> None:
        """Forget those that are gone, make room for those that are new."""
        seen = set(entities)
        keep = [i for i, key in enumerate(self.keys) if key in seen or key[0] in absent]
        old = {self.keys[i] for i in keep}
        new = [key for key in entities if key not in old]
        moved = {row: number for number, row in enumerate(keep)}
        self.drops_ns = {moved[row]: drops for row, drops in self.drops_ns.items() if row in moved}
        self.keys = (*(self.keys[i] for i in keep), *new)
        self.loop = np.array([device == "lo" for _, device in self.keys], dtype=np.bool_)
        pad = np.zeros(len(new), dtype=np.int64)
        self.up_ticks, self.down_ticks, self.down_since_ns = (
            np.append(values[keep], pad) for values in (self.up_ticks, self.down_ticks, self.down_since_ns)
        )
