"""Faults with a place and a time: what they do to drivers, columns, jobs and logs at each moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collectors.simulated.drivers import Drivers
from collectors.simulated.faults.base import Drive, FaultKind, Say, Show, Stop, amount_of
from collectors.simulated.noise import Bools, Ints
from collectors.simulated.past import Halt
from collectors.simulated.placement import Grid
from collectors.simulated.spec import GPUS
from collectors.simulated.target import Scope, Target

OUTSIDE = frozenset({Scope.NIC, Scope.PAIR, Scope.LEAF, Scope.RAIL, Scope.SPINE, Scope.FABRIC})
"""What only jobs of several nodes need."""


@dataclass(frozen=True)
class Incident:
    """One fault. Times in seconds since the simulation began."""

    index: int
    kind: FaultKind
    target: Target
    start_s: float
    duration_s: float
    magnitude: float

    @property
    def end_s(self) -> float:
        """When it is over (repaired, replaced, gone)."""
        return self.start_s + self.duration_s

    @property
    def fails_s(self) -> float:
        """When processes stop, or a trend ends in its failure."""
        return self.start_s + self.kind.stop_at * self.duration_s

    def strength(self, at_s: float) -> float:
        """0 to 1, by the kind's course; 0 outside its time."""
        inside = self.start_s <= at_s < self.end_s
        return self.kind.course.at(at_s - self.start_s, self.duration_s) if inside else 0.0

    @property
    def shows(self) -> Iterator[Show]:
        """Columns that it changes directly."""
        return (effect for effect in self.kind.effects if isinstance(effect, Show))

    def strike(self, drivers: Drivers, at_s: float) -> None:
        """Move the drivers."""
        strength = self.strength(at_s)
        for effect in self.kind.effects:
            if isinstance(effect, Drive) and strength > 0.0:
                drivers.strike(effect.driver, self.target, self._value(drivers, effect, strength))
        if self.kind.stop is Stop.VANISH and self.fails_s <= at_s < self.end_s:
            drivers.strike("silent", self.target, 1.0)
            drivers.strike("vanished", self.target, 1.0)

    def _value(self, drivers: Drivers, effect: Drive, strength: float) -> float:
        full = amount_of(effect.amount, self.magnitude)
        neutral = drivers.neutral(effect.driver)
        return full if strength == 1.0 else neutral + (full - neutral) * strength

    def says(self, from_s: float, to_s: float) -> Iterator[tuple[float, Say]]:
        """Log lines due in [from_s, to_s), with their moments."""
        for say in self.kind.says:
            first = self.fails_s if say.after_s < 0 else self.start_s + say.after_s
            if say.every_s <= 0:
                moments: Iterable[float] = (first,)
            else:
                count = max(0, int(np.ceil((from_s - first) / say.every_s)))
                moments = (first + (count + i) * say.every_s for i in range(int((to_s - from_s) / say.every_s) + 2))
            yield from ((at, say) for at in moments if from_s <= at < to_s and at < self.end_s)


def halts(incidents: Sequence[Incident], grid: Grid) -> list[Halt]:
    """When these faults stop the job on `grid`, and whom they strike."""
    return [
        Halt(i.fails_s, i.end_s, i.kind.stop, i.kind.exit_code, culprits(i, grid))
        for i in incidents
        if i.kind.stop and grid.index in i.target.jobs and (grid.nodes > 1 or not _only_network(i))
    ]


def blocks(incidents: Sequence[Incident], grid: Grid) -> list[tuple[float, float]]:
    """When the job's network is cut by faults that stop nobody for good."""
    found: list[tuple[float, float]] = []
    for incident in incidents:
        cuts = any(isinstance(e, Drive) and e.driver == "down" for e in incident.kind.effects)
        if cuts and not incident.kind.stop and grid.index in incident.target.jobs and grid.nodes > 1:
            found += _cuts(incident)
    return found


def culprits(incident: Incident, grid: Grid) -> Bools:
    """Which ranks of a job it strikes."""
    nodes, gpus = incident.target.gpus
    inside = (nodes >= grid.first_node) & (nodes < grid.first_node + grid.nodes)
    struck = np.zeros(grid.world, dtype=bool)
    struck[(nodes[inside] - grid.first_node) * GPUS + gpus[inside]] = True
    return struck


def _only_network(incident: Incident) -> bool:
    return incident.kind.stop is Stop.NETWORK and incident.target.scope in OUTSIDE


def _cuts(incident: Incident) -> list[tuple[float, float]]:
    course = incident.kind.course
    if course.shape != "pulses":
        return [(incident.start_s, incident.end_s)]
    count = int(np.ceil(incident.duration_s / course.period_s))
    starts = [incident.start_s + i * course.period_s for i in range(count)]
    return [(at, min(at + course.on_s, incident.end_s)) for at in starts]


Rows = tuple[Ints, Ints | int]
"""Index of (node, device) pairs."""


def places(show: Show, target: Target) -> tuple[str, str, Rows]:
    """(family, column, index of the struck rows) of a direct effect."""
    family, _, column = show.column.partition(".")
    rows: dict[str, Rows] = {
        "gpu": target.gpus, "process": target.gpus, "nic": target.ports, "port": target.ports,
        "host": (target.nodes, 0), "board": (target.nodes, 0), "mesh": target.probes,
    }  # fmt: skip
    return family, column, rows[family]
