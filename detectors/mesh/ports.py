"""Carriers of rail interfaces in time: who lost it, for how long, how often."""

from __future__ import annotations

import msgspec
import numpy as np

from detectors.base import AlignedTick, FamilyMatrix
from detectors.state import Array
from trainwarden.clock import NS_PER_S

_RAIL, _UNKNOWN_ROLE = 1, 0
_KEPT_DROPS = 32


def _zeros() -> Array:
    return np.zeros(0, dtype=np.int64)


class Ports(msgspec.Struct):
    """One row for each rail interface: ticks that its carrier was there or not, and since when it is gone.

    `drops_ns` has those interfaces that lost their carrier within the window, with when.
    """

    keys: list[tuple[str, str]] = []
    up_ticks: Array = msgspec.field(default_factory=_zeros)
    down_ticks: Array = msgspec.field(default_factory=_zeros)
    down_since_ns: Array = msgspec.field(default_factory=_zeros)
    drops_ns: dict[int, list[int]] = {}

    def put(self, tick: AlignedTick, matrix: FamilyMatrix, absent: dict[str, int], window_s: float) -> None:
        """One tick's interfaces. Those of nodes that are absent are kept, others that are gone are forgotten."""
        carrier, role, changes = matrix.column("carrier"), matrix.column("role"), matrix.column("carrier_changes_per_s")
        known_role = np.where(np.isfinite(role), role, _UNKNOWN_ROLE)
        mine = np.isfinite(carrier) & ((known_role == _RAIL) | (known_role == _UNKNOWN_ROLE))
        rows = np.flatnonzero(mine)
        entities = matrix.entities if len(rows) == len(mine) else tuple(matrix.entities[i] for i in rows.tolist())
        if any(device == "lo" for _, device in entities):
            rows = np.array([i for i in rows.tolist() if matrix.entities[i][1] != "lo"], dtype=np.intp)
            entities = tuple(matrix.entities[i] for i in rows.tolist())
        index = self._rows(entities, absent)
        with np.errstate(invalid="ignore"):
            self._note(index, tick.at_ns, carrier[rows] > 0, changes[rows] > 0)
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

    def _rows(self, entities: tuple[tuple[str, str], ...], absent: dict[str, int]) -> Array:
        if len(entities) == len(self.keys) and list(entities) == self.keys:
            return np.arange(len(entities))
        seen = set(entities)
        keep = [i for i, key in enumerate(self.keys) if key in seen or key[0] in absent]
        old = {self.keys[i] for i in keep}
        new = [key for key in entities if key not in old]
        moved = {row: number for number, row in enumerate(keep)}
        self.drops_ns = {moved[row]: drops for row, drops in self.drops_ns.items() if row in moved}
        self.keys = [*(self.keys[i] for i in keep), *new]
        pad = np.zeros(len(new), dtype=np.int64)
        self.up_ticks, self.down_ticks, self.down_since_ns = (
            np.append(values[keep], pad) for values in (self.up_ticks, self.down_ticks, self.down_since_ns)
        )
        place = {key: number for number, key in enumerate(self.keys)}
        return np.array([place[key] for key in entities], dtype=np.intp)
