"""What the collectors say of the processes of a job's ranks, over the last ticks: all ranks at once."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array
from trainwarden.clock import NS_PER_S

STATE_DISK, STATE_STOPPED, STATE_ZOMBIE, STATE_NONE = 3, 4, 5, 0
UNKNOWN_STATE = -1
KEPT = 16
_CPU_SAMPLES = 3
_WRITES_BYTES_PER_S, _WRITES_FACTOR, _WRITES_GAIN = 1e6, 4.0, 0.05
"""A process writes visibly at this rate, and at so many times what it writes while its job moves (mean with this gain)."""
_WINDOW_NS = 5 * NS_PER_S
"""What a process reads and writes is asked for every five seconds and repeated between: an answer is of the time since the last one."""

Ints = NDArray[np.int64]


class Processes(msgspec.Struct):
    """One column per rank; rings of the last `KEPT` samples, newest at ``(seen - 1) % KEPT``.

    `seen` counts a rank's samples since its process came to its node, the `*_run` arrays how many of the newest ones in a row are stopped,
    gone (none or zombie), or waiting in the kernel. `phase` is a number of `table.PHASES`, 0 where nobody says. `usual_writes` is what a
    rank writes to disks while its job moves, `writes` its newest answer (NaN: not known), which came at `asked_ns`, `wrote_ns` when the
    newest time began in which it wrote visibly.
    """

    nodes: list[str] = []
    seen: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    at_ns: Array = msgspec.field(default_factory=lambda: np.zeros((KEPT, 0), dtype=np.int64))
    states: Array = msgspec.field(default_factory=lambda: np.zeros((KEPT, 0), dtype=np.int8))
    cpu_cores: Array = msgspec.field(default_factory=lambda: np.zeros((KEPT, 0), dtype=np.float32))
    phase: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stopped_run: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    gone_run: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    disk_run: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    writes: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    usual_writes: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    wrote_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    asked_ns: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def settle(self, ranks: Ints, nodes: list[str]) -> None:
        """Make room for `ranks`; a rank whose process is on another node than before starts anew."""
        size = int(ranks.max()) + 1 if ranks.size else 0
        if size > len(self.nodes):
            self._grow(size - len(self.nodes))
        if [self.nodes[rank] for rank in ranks.tolist()] == nodes:
            return
        for rank, node in zip(ranks.tolist(), nodes, strict=True):
            if self.nodes[rank] != node:
                self.nodes[rank] = node
                for known in (self.seen, self.phase, self.stopped_run, self.gone_run, self.disk_run, self.wrote_ns):
                    known[rank] = 0
                self.writes[rank], self.usual_writes[rank] = np.nan, 0.0

    def note(self, ranks: Ints, at_ns: int, states: Array, cpu_cores: Array, phases: Array) -> None:
        """One tick; `ranks` were settled before. NaN is unknown."""
        whole = np.where(np.isfinite(states), states, UNKNOWN_STATE).astype(np.int8)
        place = self.seen[ranks] % KEPT
        self.at_ns[place, ranks], self.states[place, ranks], self.cpu_cores[place, ranks] = at_ns, whole, cpu_cores
        self.seen[ranks] += 1
        self.phase[ranks] = np.where(np.isfinite(phases), np.nan_to_num(phases), self.phase[ranks]).astype(np.int64)
        for run, wanted in (
            (self.stopped_run, whole == STATE_STOPPED),
            (self.gone_run, (whole == STATE_NONE) | (whole == STATE_ZOMBIE)),
            (self.disk_run, whole == STATE_DISK),
        ):
            run[ranks] = np.where(wanted, np.minimum(run[ranks] + 1, KEPT), 0)

    def note_writes(self, ranks: Ints, at_ns: int, bytes_per_s: Array, moving: bool) -> None:
        """What the ranks write to disks, as of one tick; NaN is unknown. `moving` tells whether the job makes steps."""
        old = at_ns - self.asked_ns[ranks] > _WINDOW_NS + NS_PER_S
        fresh = np.isfinite(bytes_per_s) & ((bytes_per_s != self.writes[ranks]) | old)
        self.writes[ranks] = bytes_per_s
        if not fresh.any():
            return
        self.asked_ns[ranks[fresh]] = at_ns
        mine, now = ranks[fresh], bytes_per_s[fresh].astype(np.float64)
        visible = now > np.maximum(_WRITES_BYTES_PER_S, _WRITES_FACTOR * self.usual_writes[mine])
        self.wrote_ns[mine[visible]] = at_ns - _WINDOW_NS
        if moving:
            gain = np.where(self.usual_writes[mine] > 0, _WRITES_GAIN, 1.0)
            self.usual_writes[mine] += gain * (now - self.usual_writes[mine])

    def writing_since(self, at_ns: int) -> Ints:
        """Ranks that have written visibly since `at_ns`."""
        return np.flatnonzero((self.wrote_ns > 0) & (self.wrote_ns >= at_ns))

    @property
    def ranks(self) -> Ints:
        """Ranks heard of."""
        return np.flatnonzero(self.seen)

    def since_ns(self, rank: int, run: int) -> int:
        """When the newest `run` samples of a rank began; 0 for none."""
        return int(self.at_ns[(self.seen[rank] - run) % KEPT, rank]) if run else 0

    def recent_cpu(self) -> Array:
        """Mean processor use of each rank's newest three samples; NaN when too few are known."""
        if not len(self.nodes):
            return np.zeros(0)
        columns = np.arange(len(self.nodes))
        newest = [self.cpu_cores[(self.seen - 1 - back) % KEPT, columns] for back in range(_CPU_SAMPLES)]
        return np.where(self.seen >= _CPU_SAMPLES, np.mean(np.stack(newest), axis=0), np.nan)

    def odd(self) -> tuple[int | None, str]:
        """The one rank whose process is unlike the others': in the kernel without processor time, or idle (or busy) alone; and why."""
        heard, use = self.ranks, self.recent_cpu()
        waiting = heard[(self.disk_run[heard] >= 5) & (use[heard] < 0.02)]
        if len(waiting) == 1:
            return int(waiting[0]), "waits in the kernel (process state D)"
        values = use[heard]
        if len(values) < 3 or not np.isfinite(values).all():
            return None, ""
        away = np.abs(values - np.median(values))
        odd = int(np.argmax(away))
        if away[odd] > 0.5 and np.delete(away, odd).max() < 0.2:
            return int(heard[odd]), f"uses {values[odd]:.1f} cores"
        return None, ""

    def history(self, rank: int) -> tuple[list[int], list[float], list[float]]:
        """(times, states, processor use) of a rank, oldest first; empty when it was never heard of."""
        count = min(int(self.seen[rank]), KEPT) if 0 <= rank < len(self.nodes) else 0
        places = [(int(self.seen[rank]) - back) % KEPT for back in range(count, 0, -1)]
        column = [
            (int(self.at_ns[p, rank]), float(self.states[p, rank]), float(self.cpu_cores[p, rank])) for p in places
        ]
        return [c[0] for c in column], [c[1] for c in column], [c[2] for c in column]

    def _grow(self, by: int) -> None:
        self.nodes = [*self.nodes, *[""] * by]
        for name in ("seen", "phase", "stopped_run", "gone_run", "disk_run", "wrote_ns", "asked_ns"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(by, dtype=np.int64)]))
        self.writes = np.concatenate([self.writes, np.full(by, np.nan)])
        self.usual_writes = np.concatenate([self.usual_writes, np.zeros(by)])
        for name in ("at_ns", "states", "cpu_cores"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((KEPT, by), dtype=old.dtype)], axis=1))
