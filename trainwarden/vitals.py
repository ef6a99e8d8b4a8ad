"""Trainwarden's own health as verdicts: who watches must say when it does not.

A part of the pipeline (worker, store writer) hands in its vital signs; each that stays beyond its limit is said once, said again while it
lasts, and taken back when it has been well for a while. On-call hears of it as of any other incident; nothing is ever done to a node.

What cannot be said so is a worker that is gone, since it is the worker that makes incidents: for that `/healthz`, the status page and
``compose/prometheus/alerts.yml`` look from outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trainwarden.clock import NS_PER_S
from trainwarden.policy import Policy
from trainwarden.records import Entity, EntityKind, Evidence, Incident, IncidentStatus, Verdict, stable_id

DETECTOR = "own_health"
KINDS = ("pipeline_late", "records_refused", "detector_off")
KEPT = 40
RESTATE_S = 60.0
LONG_AGO_NS = 1


@dataclass(frozen=True)
class Vital:
    """One vital sign.

    Attributes
    ----------
    kind
        What it would be called: one of `KINDS`.
    part
        Whose it is: `worker`, `store`, or one piece of these.
    value, limit, unit
        Well is at or below the limit.
    text
        The sentence that on-call reads when it is beyond.
    persist_s, calm_s
        How long it has to be beyond before it is said, and within before it is taken back.
    """

    kind: str
    part: str
    value: float
    limit: float
    unit: str
    text: str
    persist_s: float = 10.0
    calm_s: float = 30.0

    @property
    def beyond(self) -> bool:
        """Whether it is not well."""
        return self.value > self.limit


@dataclass
class _Course:
    """How one vital sign went: since when it has been as it is, and whether it was said."""

    beyond: bool
    since_ns: int
    onset_ns: int = 0
    said_ns: int = 0
    at_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    values: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))


class Vitals:
    """Follows vital signs from look to look.

    Examples
    --------
    >>> vitals = Vitals("lab")
    >>> late = Vital("pipeline_late", "worker", 42.0, 10.0, "s", "the worker is 42 s behind", persist_s=5.0)
    >>> [len(vitals.look(second * NS_PER_S, [late])) for second in (1, 5, 6, 7)]
    [0, 0, 1, 0]
    """

    def __init__(self, cluster: str, policy: Policy | None = None) -> None:
        self._cluster = cluster
        self._policy = policy or Policy()
        self._courses: dict[tuple[str, str], _Course] = {}

    def adopt(self, incidents: Iterable[Incident], mine: Callable[[str], bool]) -> None:
        """Take over what one before us said and did not take back: every revision of its incidents, in any order. `mine` says which parts
        are ours: of others we know nothing, and would call them well.
        """
        newest: dict[str, Incident] = {}
        for incident in incidents:
            known = newest.get(incident.incident_id)
            if incident.kind in KINDS and (known is None or known.revision < incident.revision):
                newest[incident.incident_id] = incident
        for incident in newest.values():
            if incident.status in (IncidentStatus.OPEN, IncidentStatus.ACTING):
                since_ns = incident.timeline.first_signal_at_ns or incident.observed_at_ns
                for culprit in incident.culprits:
                    if mine(culprit.name):
                        self.suspect(incident.kind, culprit.name, since_ns)

    def suspect(self, kind: str, part: str, since_ns: int) -> None:
        """One before us said so and did not take it back: that is done once the sign has been well for a while."""
        course = self._courses.setdefault((kind, part), _Course(True, since_ns))
        if not course.said_ns:
            course.onset_ns, course.said_ns = since_ns, LONG_AGO_NS

    def look(self, now_ns: int, vitals: Iterable[Vital]) -> list[Verdict]:
        """What there is to say now. What was said of a sign that is no longer handed in is taken back."""
        seen = {(vital.kind, vital.part): vital for vital in vitals}
        gone = {key: course for key, course in self._courses.items() if key not in seen}
        said = [self._follow(now_ns, key, vital) for key, vital in seen.items()]
        for key, course in gone.items():
            del self._courses[key]
            if course.said_ns:
                said.append(self._take_back(now_ns, Vital(*key, 0.0, 0.0, "", ""), course))
        return [verdict for verdict in said if verdict is not None]

    def _follow(self, now_ns: int, key: tuple[str, str], vital: Vital) -> Verdict | None:
        course = self._courses.setdefault(key, _Course(vital.beyond, now_ns))
        course.since_ns, course.said_ns = (
            min(course.since_ns, now_ns),
            min(course.said_ns, now_ns),
        )  # the clock was set back
        course.at_ns.append(now_ns)
        course.values.append(round(vital.value, 3))
        if vital.beyond != course.beyond:
            course.beyond, course.since_ns = vital.beyond, now_ns
        lasted_s = (now_ns - course.since_ns) / NS_PER_S
        if vital.beyond:
            return self._accuse(now_ns, vital, course) if lasted_s >= vital.persist_s else None
        return self._take_back(now_ns, vital, course) if course.said_ns and lasted_s >= vital.calm_s else None

    def _accuse(self, now_ns: int, vital: Vital, course: _Course) -> Verdict | None:
        if course.said_ns and now_ns - course.said_ns < RESTATE_S * NS_PER_S:
            return None
        course.onset_ns = course.onset_ns or course.since_ns
        course.said_ns = now_ns
        return self._verdict(now_ns, vital, course, vital.text)

    def _take_back(self, now_ns: int, vital: Vital, course: _Course) -> Verdict:
        made = self._verdict(now_ns, vital, course, f"{vital.part} is well again", clears=True)
        course.said_ns = course.onset_ns = 0
        return made

    def _verdict(self, now_ns: int, vital: Vital, course: _Course, text: str, *, clears: bool = False) -> Verdict:
        entity = Entity(EntityKind.TELEMETRY, vital.part)
        onset_ns = course.onset_ns
        return Verdict(
            cluster=self._cluster, observed_at_ns=now_ns, detector=DETECTOR, kind=vital.kind, entity=entity,
            verdict_id=stable_id(DETECTOR, vital.kind, entity, clears, onset_ns, now_ns), score=vital.value, value=vital.value,
            high=vital.limit, confidence=0.95, onset_at_ns=onset_ns, window_start_ns=onset_ns, window_end_ns=now_ns, text=text,
            reach=self._policy.kind(vital.kind).reach, evidence=(_evidence(vital, course),), clears=clears,
        )  # fmt: skip


def _evidence(vital: Vital, course: _Course) -> Evidence:
    return Evidence(
        f"{vital.part} {vital.kind}", vital.unit, tuple(course.at_ns), tuple(course.values), float("nan"), vital.limit
    )
