"""One incident while it lives: its findings, its moments, and the record it is published as."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from streams import report
from streams.causes import PROMOTER, RECOVERED, SHARED_ENTITIES, Finding, choose, culprit_of, explains, rank_causes
from trainwarden.clock import NS_PER_S
from trainwarden.policy import Family, FaultKind, Policy, highest_reach, reach_at_least
from trainwarden.records import (
    Entity,
    EntityKind,
    Evidence,
    Incident,
    IncidentStatus,
    Reach,
    Timeline,
    Verdict,
    stable_id,
)

MAX_FINDINGS = 64
MAX_VERDICT_IDS = 50
MAX_EVIDENCE = 6
MAX_ACTIONS = 20
LATEST_DUE_NS = 10 * NS_PER_S
"""No first publication waits longer."""
_MOMENTS = (
    "opened_at_ns", "first_signal_at_ns", "verdict_at_ns", "decided_at_ns", "acted_at_ns", "recovered_at_ns", "closed_at_ns",
    "support_at_ns",
)  # fmt: skip
LIVE = frozenset({IncidentStatus.OPEN, IncidentStatus.ACTING, IncidentStatus.RECOVERED})


@dataclass
class Case:
    """Mutable state of one incident.

    Attributes
    ----------
    due_at_ns
        First publication; until then the culprit may still change freely.
    dirty
        Something a reader should know changed since the last revision.
    confirmed
        The fault has stood for as long as its kind asks before it may lead to an action.
    paid_by
        Family of detectors whose purse paid for opening this incident; empty when it was free (see `streams.budget`).
    came_along
        It was free because its job had an incident at that moment.
    recurrence_of
        Number of earlier closed incidents of the same job, kind and culprit, by (kind, culprit); set by the correlator.
    """

    incident_id: str
    cluster: str
    job: str
    attempt: int
    opened_at_ns: int
    due_at_ns: int
    last_step: int = -1
    findings: list[Finding] = field(default_factory=list)
    verdict_ids: list[str] = field(default_factory=list)
    status: IncidentStatus = IncidentStatus.OPEN
    dedup_key: str = ""
    revision: int = 0
    recurrence: int = 0
    verified: bool = False
    close_reason: str = ""
    superseded_by: str = ""
    actions: list[str] = field(default_factory=list)
    first_signal_at_ns: int = 0
    verdict_at_ns: int = 0
    decided_at_ns: int = 0
    acted_at_ns: int = 0
    recovered_at_ns: int = 0
    closed_at_ns: int = 0
    support_at_ns: int = 0
    dirty: bool = True
    confirmed: bool = False
    paid_by: str = ""
    came_along: bool = False
    _lead: Finding | None = None

    @property
    def live(self) -> bool:
        return self.status in LIVE

    def mentions(self, verdict: Verdict) -> bool:
        """Whether the same was said before."""
        return self._finding(verdict.kind, culprit_of(verdict.entity)) is not None

    def _finding(self, kind: str, culprit: str) -> Finding | None:
        return next((f for f in self.findings if f.verdict.kind == kind and f.culprit == culprit), None)

    def lead(self, policy: Policy) -> Finding:
        """The finding that names the culprit now."""
        if self._lead is None:
            self._lead = choose(self.findings, policy)
        return self._lead

    def clear(self, kind: str, culprit: str, at_ns: int, detector: str) -> None:
        """A detector took an opinion back. A successor reads the last minute again: what is newer than the taking back still holds."""
        for finding in self.findings:
            if finding.verdict.kind == kind and finding.culprit == culprit and finding.verdict.observed_at_ns <= at_ns:
                reach = finding.verdict.reach
                finding.take_back(detector)
                self.dirty |= finding.verdict.reach is not reach
                self._lead = None

    def absorb(self, other: Case) -> None:
        """Take the findings of another case over: the two turned out to be one."""
        self.findings.extend(other.findings[: MAX_FINDINGS - len(self.findings)])
        self.verdict_ids.extend(other.verdict_ids[: MAX_VERDICT_IDS - len(self.verdict_ids)])
        self.first_signal_at_ns = min(self.first_signal_at_ns or other.first_signal_at_ns, other.first_signal_at_ns)
        self.dirty, self._lead = True, None

    def take(self, verdict: Verdict, now_ns: int, policy: Policy) -> None:
        """Add an opinion; a change of culprit or a first mention makes a revision worth publishing."""
        before = self.lead(policy) if self.findings else None
        finding = self._finding(verdict.kind, culprit_of(verdict.entity))
        if finding is not None:
            bearing = finding.bearing
            finding.repeat(verdict, now_ns)
            if finding.bearing != bearing:
                self._lead = None
        elif len(self.findings) < MAX_FINDINGS:
            finding = Finding(verdict, now_ns, now_ns, verdict.onset_at_ns, detectors={verdict.detector: verdict.reach})
            self.findings.append(finding)
            self.dirty, self._lead = True, None
        if len(self.verdict_ids) < MAX_VERDICT_IDS:
            self.verdict_ids.append(verdict.verdict_id)
        signal_ns = min(verdict.window_end_ns or now_ns, now_ns)
        self.first_signal_at_ns = min(self.first_signal_at_ns or signal_ns, signal_ns)
        after = self.lead(policy)
        if finding is not None and finding.culprit == after.culprit:
            self.support_at_ns = now_ns
        if before is not after:
            self._follow_lead(before, after)

    def _follow_lead(self, before: Finding | None, after: Finding) -> None:
        """Another finding leads. The verdict is dated by the first opinion strong enough to be told that names this culprit."""
        self.dirty = True
        weak = before is None or not reach_at_least(before.verdict.reach, Reach.NOTIFY)
        if weak or before is None or before.culprit != after.culprit:
            self.verdict_at_ns = after.first_at_ns

    def confirm(self, policy: Policy, now_ns: int) -> None:
        """A fault that stands for long enough is worth a revision: from now on it may lead to an action."""
        lead = self.lead(policy)
        stood_ns = now_ns - lead.onset_at_ns
        if not self.confirmed and not lead.cleared and stood_ns >= policy.kind(lead.verdict.kind).confirm_s * NS_PER_S:
            self.confirmed = True
            self.dirty = True

    def set_back(self, now_ns: int) -> None:
        """The clock was set back: what is dated later than now is as good as now, or nothing would happen to it before that time."""
        for name in _MOMENTS:
            setattr(self, name, min(getattr(self, name), now_ns))
        self.due_at_ns = min(self.due_at_ns, now_ns + LATEST_DUE_NS)
        for finding in self.findings:
            finding.set_back(now_ns)
        self._lead = None

    def record(self, policy: Policy, now_ns: int) -> Incident:
        """The next revision."""
        lead = self.lead(policy)
        kind = policy.kind(lead.verdict.kind)
        if not self.dedup_key:
            self.dedup_key = stable_id(self.cluster, self.job, lead.verdict.kind, lead.culprit)
        self.revision += 1
        self.dirty = False
        remedy = kind.remedy_on_recurrence if self.recurrence else kind.remedy
        confidence, reach, victims = self._confidence(lead), self.reach(lead, policy), self.victims(lead, policy)
        verbs = tuple(verb.value for verb in remedy)
        text = report.paragraph(
            lead,
            self.findings,
            policy,
            job=self.job,
            attempt=self.attempt,
            last_step=self.last_step,
            victims=victims,
            confidence=confidence,
            reach=reach,
            remedy=verbs,
            recurrence=self.recurrence,
            actions=self.actions,
        )
        return Incident(
            cluster=self.cluster,
            observed_at_ns=now_ns,
            seq=self.revision,
            incident_id=self.incident_id,
            dedup_key=self.dedup_key,
            revision=self.revision,
            status=self.status,
            job=self.job,
            attempt=self.attempt,
            kind=kind.name,
            severity=kind.severity,
            title=report.title(lead),
            culprits=self._culprits(lead),
            culprit_rank=lead.verdict.rank,
            victims=victims,
            causes=rank_causes(self.findings, policy),
            confidence=confidence,
            reach=reach,
            remedy=verbs,
            timeline=self.timeline(lead),
            report=text,
            evidence=self._evidence(lead),
            verdict_ids=tuple(self.verdict_ids),
            recurrence=self.recurrence,
            last_step=self.last_step,
            superseded_by=self.superseded_by,
            close_reason=self.close_reason,
        )

    def reach(self, lead: Finding, policy: Policy) -> Reach:
        """The farthest of the verdicts that support the present culprit.

        Silence is no proof against a node, a shared cause has no node to act on, and without a job there is nothing to heal:
        those never reach `act`; nor does what has not stood for long enough.
        """
        supporting = [f for f in self.findings if f.culprit == lead.culprit and (not f.cleared or f is lead)]
        reach = highest_reach(
            [f.verdict.reach for f in supporting if policy.kind(f.verdict.kind).family is not Family.TELEMETRY]
        )
        if not reach_at_least(reach, Reach.NOTIFY):
            reach = highest_reach([f.verdict.reach for f in supporting])
        held = (
            not self.job
            or lead.verdict.entity.kind in SHARED_ENTITIES
            or policy.kind(lead.verdict.kind).family is Family.TELEMETRY
            or not self.confirmed
        )
        return Reach.NOTIFY if held and reach is Reach.ACT else reach

    def timeline(self, lead: Finding) -> Timeline:
        """Moments known so far."""
        return Timeline(
            lead.onset_at_ns,
            self.first_signal_at_ns,
            self.verdict_at_ns,
            self.decided_at_ns,
            self.acted_at_ns,
            self.recovered_at_ns,
            self.closed_at_ns,
        )

    def victims(self, lead: Finding, policy: Policy) -> tuple[str, ...]:
        """Those the detectors named, and those accused because they suffered."""
        named = [victim for f in self.findings if f.culprit == lead.culprit for victim in f.verdict.victims]
        accused = [
            report.who(f.verdict.entity, f.verdict.rank)
            for f in self.findings
            if f.culprit != lead.culprit and f.culprit.startswith("node:") and explains(lead, f, policy)
        ]
        return tuple(dict.fromkeys((*named, *accused)))[:32]

    def _confidence(self, lead: Finding) -> float:
        doubt = 1.0
        for finding in self.findings:
            if finding.culprit == lead.culprit and not finding.cleared:
                doubt *= 1.0 - min(max(finding.verdict.confidence, 0.0), 0.99)
        return round(1.0 - doubt, 4) if doubt < 1.0 else lead.verdict.confidence

    def _culprits(self, lead: Finding) -> tuple[Entity, ...]:
        return () if lead.verdict.entity.kind is EntityKind.JOB else (lead.verdict.entity,)

    def _evidence(self, lead: Finding) -> tuple[Evidence, ...]:
        own = [e for f in (lead, *self.findings) if f.culprit == lead.culprit for e in f.verdict.evidence]
        return tuple(dict.fromkeys(own))[:MAX_EVIDENCE]


def case_of(incident: Incident) -> Case:
    """A case rebuilt from its published record: the lead stands for all its findings."""
    times = incident.timeline
    entity = incident.culprits[0] if incident.culprits else Entity(EntityKind.JOB, incident.job)
    verdict = Verdict(
        cluster=incident.cluster,
        verdict_id=incident.verdict_ids[0] if incident.verdict_ids else "",
        detector=RECOVERED,
        job=incident.job,
        attempt=incident.attempt,
        entity=entity,
        rank=incident.culprit_rank,
        kind=incident.kind,
        confidence=incident.confidence,
        onset_at_ns=times.fault_at_ns,
        window_end_ns=times.first_signal_at_ns,
        reach=incident.reach,
        evidence=incident.evidence,
        victims=incident.victims,
        text=incident.title,
    )
    lead = Finding(
        verdict, times.verdict_at_ns, incident.observed_at_ns, times.fault_at_ns, detectors={RECOVERED: incident.reach}
    )
    return Case(
        incident.incident_id,
        incident.cluster,
        incident.job,
        incident.attempt,
        times.verdict_at_ns,
        times.verdict_at_ns,
        incident.last_step,
        [lead],
        list(incident.verdict_ids),
        incident.status,
        incident.dedup_key,
        incident.revision,
        incident.recurrence,
        close_reason=incident.close_reason,
        superseded_by=incident.superseded_by,
        first_signal_at_ns=times.first_signal_at_ns,
        verdict_at_ns=times.verdict_at_ns,
        decided_at_ns=times.decided_at_ns,
        acted_at_ns=times.acted_at_ns,
        recovered_at_ns=times.recovered_at_ns,
        closed_at_ns=times.closed_at_ns,
        support_at_ns=incident.observed_at_ns,
        dirty=False,
        confirmed=incident.reach is Reach.ACT,
    )


def settle_s(kind: FaultKind) -> float:
    """How long the first publication waits for a better culprit."""
    if kind.name == "job_hang":
        return 2.0
    return 0.2 if kind.family is Family.FAIL_STOP else 1.0


def promoted(verdict: Verdict, leaf: str, nodes: list[str]) -> Verdict:
    """The verdict that several nodes of one leaf add up to."""
    return replace(
        verdict,
        verdict_id=stable_id("promoted", verdict.kind, leaf, verdict.job, verdict.verdict_id),
        detector=PROMOTER,
        entity=Entity(EntityKind.LEAF, leaf),
        rank=-1,
        reach=Reach.NOTIFY,
        victims=tuple(nodes),
        text=f"{len(nodes)} nodes of leaf {leaf} at once",
    )
