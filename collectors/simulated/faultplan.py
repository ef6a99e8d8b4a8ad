"""From ``--faults`` to incidents: a list of named faults, or a mix drawn from the seed.

An item is ``kind[@target][:start_s[+duration_s]][xMAGNITUDE]``; what is left out is drawn. ``mix:N`` draws N incidents of all kinds, such
that at least half of the slow ones have no bad node, and every eighth comes with a second one at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collectors.simulated.faults import kind_named, kinds
from collectors.simulated.faults.base import FaultClass, FaultKind
from collectors.simulated.incidents import Incident
from collectors.simulated.layout import POD_NODES
from collectors.simulated.noise import Noise
from collectors.simulated.placement import Placement
from collectors.simulated.target import Scope, Target, Targets
from trainwarden.errors import UsageError

ITEM = re.compile(
    r"(?P<kind>[a-z_]+)(?:@(?P<target>[\w./-]+?))?(?::(?P<start>[\d.]+)(?:\+(?P<duration>[\d.]+))?)?(?:x(?P<size>[\d.]+))?"
)
MIX = re.compile(r"mix(?::(\d+))?(?:\((.+)\))?")
SETTLE_S = 60.0
SHARES = {FaultClass.FAIL_STOP: 0.25, FaultClass.FAIL_SLOW: 0.22, FaultClass.WORKLOAD: 0.23, FaultClass.WARNING: 0.15,
          FaultClass.CORRUPTION: 0.05, FaultClass.TELEMETRY: 0.10}  # fmt: skip


def plan(
    text: str, total_s: float, targets: Targets, placement: Placement, noise: Noise, without: Sequence[str] = ()
) -> list[Incident]:
    """Incidents that `text` asks for, by time.

    Parameters
    ----------
    total_s
        Length of the simulation; what does not fit is cut.
    without
        Kinds that a mix leaves out (held out from training).

    Raises
    ------
    UsageError
        An item cannot be read, names an unknown kind or target, or lies after the end.
    """
    for name in without:
        kind_named(name)
    planner = _Planner(total_s, targets, placement, noise, frozenset(without))
    found: list[Incident] = []
    for item in filter(None, (word.strip() for word in text.split(","))):
        if item != "none":
            found += planner.read(item)
    return sorted(found, key=lambda incident: (incident.start_s, incident.index))


class _Planner:
    def __init__(
        self, total_s: float, targets: Targets, placement: Placement, noise: Noise, without: frozenset[str]
    ) -> None:
        self._total_s = total_s
        self._targets = targets
        self._placement = placement
        self._noise = noise
        self._without = without
        self._count = 0

    def read(self, item: str) -> list[Incident]:
        mixed = MIX.fullmatch(item)
        if mixed:
            return self._mix(int(mixed[1] or max(1, round(self._total_s / 300))))
        found = ITEM.fullmatch(item)
        if found is None:
            raise UsageError(
                f"--faults: {item!r} found, expected kind[@target][:start_s[+duration_s]][xmagnitude], mix[:count] or none"
            )
        kind = kind_named(found["kind"])
        size = None if found["size"] is None else float(found["size"])
        start = None if found["start"] is None else float(found["start"])
        duration = None if found["duration"] is None else float(found["duration"])
        return [self._incident(kind, found["target"], start, duration, size)]

    def _incident(
        self, kind: FaultKind, name: str | None, start: float | None, duration: float | None, size: float | None
    ) -> Incident:
        stream = self._next_stream()
        target = self._targets.named(kind.scope, name) if name else self._draw(kind, stream)
        lasting = (
            duration if duration is not None else min(kind.duration_s, max(30.0, 0.8 * (self._total_s - SETTLE_S)))
        )
        latest = max(SETTLE_S, self._total_s - lasting)
        at = start if start is not None else float(stream.uniform(min(SETTLE_S, latest), latest))
        if at >= self._total_s:
            raise UsageError(
                f"--faults: {kind.name} begins at {at:g} s, the simulation ends at {self._total_s:g} s: start it earlier"
            )
        if lasting <= 0:
            raise UsageError(f"--faults: {kind.name} lasts {lasting:g} s, expected more than 0")
        return Incident(
            self._count - 1, kind, target, at, lasting, size if size is not None else drawn_magnitude(kind, stream)
        )

    def _draw(self, kind: FaultKind, stream: np.random.Generator) -> Target:
        """A target on which the kind shows: stages need a pipeline, experts a job that has them, networks more than one node."""
        for _ in range(200):
            target = self._targets.drawn(kind.scope, stream)
            if any(suits(kind, self._placement, job) for job in target.jobs):
                return target
        raise UsageError(
            f"--faults: no job here can show {kind.name}: ask for one with --jobs (stages need pipeline, experts moe, "
            "a spine more than 32 nodes)"
        )

    def _next_stream(self) -> np.random.Generator:
        self._count += 1
        return self._noise.stream("fault", self._count)

    def _mix(self, count: int) -> list[Incident]:
        stream = self._noise.stream("mix")
        classes, shares = zip(*SHARES.items(), strict=True)
        drawn = [classes[i] for i in stream.choice(len(classes), size=count, p=shares)]
        found: list[Incident] = []
        for number, cls in enumerate(_balanced(drawn)):
            kind = self._kind_of(cls, stream)
            incident = self._incident(kind, None, None, None, None)
            twin = number % 8 == 7 and bool(found)
            found.append(replace(incident, start_s=_beside(found[-1], incident, self._total_s)) if twin else incident)
        return found

    def _kind_of(self, cls: FaultClass, stream: np.random.Generator) -> FaultKind:
        fitting = [
            kind
            for kind in kinds().values()
            if kind.cls is cls
            and kind.name not in self._without
            and any(suits(kind, self._placement, g.index) for g in self._placement.grids)
        ]
        if not fitting:
            raise UsageError(f"--faults: no kind of class {cls} is left for the mix: hold out fewer")
        return fitting[int(stream.integers(len(fitting)))]


def suits(kind: FaultKind, placement: Placement, job: int) -> bool:
    """Whether a job can show a kind."""
    grid = placement.grids[job]
    needs = {"stage_imbalance": grid.pp > 1, "expert_imbalance": grid.ep > 1}
    network = kind.scope in (Scope.NIC, Scope.PAIR, Scope.LEAF, Scope.RAIL, Scope.SPINE, Scope.FABRIC)
    if kind.scope is Scope.SPINE and grid.first_node // POD_NODES == (grid.first_node + grid.nodes - 1) // POD_NODES:
        return False
    return needs.get(kind.name, True) and (grid.nodes > 1 or not network)


def drawn_magnitude(kind: FaultKind, stream: np.random.Generator) -> float:
    """Log-uniform between least and greatest, drawn towards the usual."""
    low, usual, high = kind.magnitude
    if low == high:
        return usual
    side = (low, usual) if stream.random() < 0.5 else (usual, high)
    return float(np.exp(stream.uniform(np.log(side[0]), np.log(side[1]))))


def _balanced(drawn: list[FaultClass]) -> list[FaultClass]:
    """As drawn, with slow nodes turned into workload until these are at least half of all that slows."""
    found = list(drawn)
    while found.count(FaultClass.WORKLOAD) < found.count(FaultClass.FAIL_SLOW):
        found[found.index(FaultClass.FAIL_SLOW)] = FaultClass.WORKLOAD
    return found


def _beside(first: Incident, second: Incident, total_s: float) -> float:
    return min(first.start_s + 0.3 * first.duration_s, max(0.0, total_s - second.duration_s))
