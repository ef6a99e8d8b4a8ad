"""Incidents of one recording against what was really done to the job.

An incident belongs to a fault when it lies in the fault's time and accuses one of its nodes (or nobody, for a fault of a shared part).
A label of a kind that the table below does not hold is judged by node and time alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streams.causes import node_of
from streams.recordings.real_faults import Label
from trainwarden.clock import NS_PER_S
from trainwarden.policy import reach_at_least
from trainwarden.records import Incident, Reach, Verb

RIGHT_KINDS: dict[str, frozenset[str]] = {
    "sigstop": frozenset({"rank_frozen"}),
    "kill9": frozenset({"rank_killed"}),
    "cpu_throttle": frozenset({"compute_slow"}),
    "cpu_hog": frozenset({"compute_slow"}),
    "net_rate_limit": frozenset({"link_slow"}),
    "net_delay": frozenset({"link_slow"}),
    "net_loss": frozenset({"link_slow"}),
    "link_down": frozenset({"link_down", "link_slow"}),
    "link_flap": frozenset({"link_down", "link_slow"}),
    "slow_loader": frozenset({"data_slow"}),
    "slow_loader_intermittent": frozenset({"data_slow"}),
    "disk_full": frozenset({"save_failed"}),
    "nan_grad": frozenset({"non_finite"}),
    "sdc_bitflip": frozenset({"silent_corruption"}),
    "fabric_slow": frozenset({"fabric_slow", "job_slow"}),
    "slow_compute": frozenset({"compute_slow"}),
    "slow_save": frozenset({"checkpoint_stall"}),
}
"""What each injected fault must be called."""
HARD_NEGATIVES = frozenset({"cpu_throttle_mild", "pauses", "all_slow"})
"""Faults too mild to matter, or of nobody in particular: naming the node (or the job) is right, saying nothing is right; isolating it, or
accusing another, is wrong."""
EARLY_NS = 2 * NS_PER_S
GRACE_NS = 15 * NS_PER_S
DRASTIC = frozenset({Verb.ISOLATE.value, Verb.RESTART.value})


@dataclass(frozen=True)
class Found:
    """A fault that was named: the seconds from its start to the verdict, negative when its incident was open already."""

    kind: str
    delay_s: float
    incident_id: str
    said: str


@dataclass(frozen=True)
class Said:
    """An incident in short. `fits` tells whether it belongs to a fault of the labels."""

    kind: str
    node: str
    at_ns: int
    told: bool
    acts: bool
    fits: bool


@dataclass
class Score:
    """One run.

    Attributes
    ----------
    found, missed, skipped
        Faults named, faults not named, and faults whose kinds no detector that is switched on can say.
    false_actions
        Incidents that would have hurt a node which had nothing, or had too little.
    false_incidents
        Incidents told to on-call that belong to no fault. They make a run wrong when they accuse a node, or when the run is clean.
    node_days
        Nodes times days of the recording.
    """

    run: str
    found: list[Found] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    false_actions: list[str] = field(default_factory=list)
    false_incidents: list[str] = field(default_factory=list)
    incidents: list[Said] = field(default_factory=list)
    clean: bool = False
    accused_wrongly: bool = False
    first_accused_right: int = 0
    node_days: float = 0.0

    @property
    def right(self) -> bool:
        return not (self.missed or self.false_actions or self.accused_wrongly or (self.clean and self.false_incidents))

    @property
    def told(self) -> int:
        """Incidents that on-call would have been told."""
        return sum(said.told for said in self.incidents)

    def line(self) -> str:
        """One line for a person."""
        parts = [
            f"{f.kind} named after {f.delay_s:.1f} s" if f.delay_s > 0 else f"{f.kind} again, still open"
            for f in self.found
        ]
        parts += [f"{kind} MISSED" for kind in self.missed]
        parts += [f"would have acted: {what}" for what in self.false_actions]
        parts += [f"no fault behind: {what}" for what in self.false_incidents]
        parts += [f"{kind}: no detector for it" for kind in self.skipped]
        said = ", ".join(f"{s.kind} {s.node or 'nobody'}{' act' if s.acts else ''}" for s in self.incidents)
        tail = f"  [{said}]" if said else ""
        verdict = "right" if self.right else "WRONG"
        return f"{self.run:26} {verdict}  {'; '.join(parts) or 'nothing to find, no action'}{tail}"


def score(
    run: str, incidents: Sequence[Incident], labels: Sequence[Label], able: frozenset[str], node_days: float = 0.0
) -> Score:
    """Compare the incidents of one run with its labels; `able` are the kinds that some detector can say.

    Parameters
    ----------
    incidents
        The newest revision of each, in order of opening.
    """
    result = Score(run, incidents=[_said(i, labels) for i in incidents], clean=not labels, node_days=node_days)
    for label in labels:
        # what is said of another fault at the same time is not a wrong word about this one
        about = [i for i in incidents if _fits(i, label) or not any(_fits(i, other) for other in labels)]
        _judge(result, label, about, able)
    result.false_actions = [_name(i) for i in incidents if drastic(i) and not any(_deserved(i, x) for x in labels)]
    stray = [i for i in incidents if _is_told(i) and not any(_excused(i, label) for label in labels)]
    result.false_incidents = [_name(i) for i in stray if _name(i) not in result.false_actions]
    result.accused_wrongly = any(accused(i) for i in stray)
    return result


def accused(incident: Incident) -> str:
    """The node that an incident accuses; empty for nobody."""
    return node_of(incident.culprits[0]) if incident.culprits else ""


def drastic(incident: Incident) -> bool:
    """Whether the incident would have led to isolating or restarting a node."""
    return (
        reach_at_least(incident.reach, Reach.ACT) and bool(DRASTIC & set(incident.remedy)) and bool(incident.culprits)
    )


def _judge(result: Score, label: Label, incidents: Sequence[Incident], able: frozenset[str]) -> None:
    if label.kind in HARD_NEGATIVES:
        return
    kinds = RIGHT_KINDS.get(label.kind)
    near = [i for i in incidents if _is_told(i) and _in_time(i, label)]
    match = next((i for i in near if (kinds is None or i.kind in kinds) and _fits(i, label)), None)
    if near and _fits(near[0], label):
        result.first_accused_right += 1
    if match is not None:
        delay_s = (match.timeline.verdict_at_ns - label.start_ns) / NS_PER_S
        result.found.append(Found(label.kind, delay_s, match.incident_id, match.kind))
    else:
        (result.missed if kinds is None or kinds & able else result.skipped).append(label.kind)


def _said(incident: Incident, labels: Sequence[Label]) -> Said:
    fits = any(_fits(incident, label) for label in labels)
    at_ns = incident.timeline.verdict_at_ns
    return Said(incident.kind, accused(incident), at_ns, _is_told(incident), drastic(incident), fits)


def _name(incident: Incident) -> str:
    return f"{incident.kind} on {accused(incident) or 'nobody'}"


def _is_told(incident: Incident) -> bool:
    return reach_at_least(incident.reach, Reach.NOTIFY)


def _fits(incident: Incident, label: Label) -> bool:
    return _excused(incident, label) and (accused(incident) in label.nodes if label.nodes else not accused(incident))


def _deserved(incident: Incident, label: Label) -> bool:
    return label.kind not in HARD_NEGATIVES and _excused(incident, label)


def _in_time(incident: Incident, label: Label) -> bool:
    times = incident.timeline
    began, ended = times.verdict_at_ns, times.closed_at_ns or 2**63
    return (
        began <= label.end_ns + GRACE_NS
        and ended >= label.start_ns - EARLY_NS
        and began >= label.start_ns - EARLY_NS - _open_ns(incident)
    )


def _excused(incident: Incident, label: Label) -> bool:
    """Whether the incident is about this fault: its time, and one of its nodes or nobody."""
    nobody = not accused(incident)
    return (
        _in_time(incident, label)
        and (not label.nodes or nobody or accused(incident) in label.nodes)
        and (bool(label.nodes) or nobody)
    )


def _open_ns(incident: Incident) -> int:
    """A fault that returns while its incident is open was named before it returned."""
    return max(0, (incident.timeline.closed_at_ns or incident.observed_at_ns) - incident.timeline.verdict_at_ns)
