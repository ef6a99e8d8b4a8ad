"""Verdicts in, incidents out: one per job and cause, each with one culprit, told in revisions.

The correlator is pure: time comes with each call. What it publishes is enough to rebuild it (`restore`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from detectors.base import Frame
from streams.budget import Budget
from streams.cases import Case, case_of, promoted, settle_s
from streams.causes import INFRASTRUCTURE, LINKS, Finding, culprit_of, explains, node_of
from streams.progress import Progress
from trainwarden.clock import NS_PER_S
from trainwarden.policy import Family, Policy, reach_at_least
from trainwarden.records import ActionResult, ActionStatus, Incident, IncidentStatus, Plan, Reach, Verdict, stable_id
from trainwarden.selfmetrics import Metrics
from trainwarden.topology import Topology

KEPT_VERDICTS = 8192
KEPT_SIGNALS = 256
KEPT_CLOSED = 1000


@dataclass(frozen=True)
class CorrelatorSettings:
    """Dials of the correlator, seconds.

    Attributes
    ----------
    join_s
        Verdicts further apart belong to different causes.
    quiet_s
        A job that advances again counts as recovered after so long without support for the fault.
    hold_s
        A recovered incident stays open for so long: a fault that comes back is the same one.
    flap_s
        A fault nobody acted on that comes back within this time after its close reopens the same incident.
    silent_slow_s, silent_warning_s
        Detectors repeat or take back what they say; this long without either closes the incident.
    """

    join_s: float = 20.0
    settle_limit_s: float = 3.0
    quiet_s: float = 2.0
    hold_s: float = 5.0
    flap_s: float = 30.0
    silent_slow_s: float = 180.0
    silent_warning_s: float = 60.0


class Correlator:
    """All incidents of a cluster."""

    def __init__(
        self,
        cluster: str,
        policy: Policy,
        settings: CorrelatorSettings | None = None,
        metrics: Metrics | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._cluster = cluster
        self._policy = policy
        self._settings = settings or CorrelatorSettings()
        self._metrics = metrics or Metrics("correlator")
        self._budget = budget
        self._cases: dict[str, Case] = {}
        self._closed: deque[Case] = deque(maxlen=KEPT_CLOSED)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._signals: deque[tuple[int, str, Verdict]] = deque(maxlen=KEPT_SIGNALS)
        self._leaves: tuple[Topology | None, Counter[str]] = None, Counter()
        self._out: list[Incident] = []
        self._ticked_ns = 0
        self.progress = Progress()

    # --- input --------------------------------------------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        """Steps, last words and topology of a frame."""
        self.progress.take(frame)

    def on_progress(self, job: str, step: int, attempt: int, now_ns: int) -> None:
        """A rank of `job` finished `step`."""
        self.progress.advance(job, step, attempt, now_ns)

    def on_verdict(self, verdict: Verdict, now_ns: int) -> None:
        """One opinion. Repeats, opinions about attempts that are over, and opinions of reach `store` change nothing."""
        if (reason := self._why_ignored(verdict)) is not None:
            self._metrics.count("tw_verdicts_ignored_total", reason=reason)
            return
        self._remember(verdict)
        job = self._job_of(verdict)
        if verdict.clears:
            self._clear(verdict, job)
        elif (case := self._host(verdict, job, now_ns)) is not None:
            self._join(case, verdict, now_ns)
        elif not reach_at_least(verdict.reach, Reach.NOTIFY) or not self._may_open(verdict, job, now_ns):
            self._signals.append((now_ns, culprit_of(verdict.entity), verdict))

    def on_plan(self, plan: Plan) -> None:
        """The planner decided."""
        case = self._cases.get(plan.incident_id)
        if case is not None and not case.decided_at_ns:
            case.decided_at_ns, case.dirty = plan.observed_at_ns, True

    def on_action(self, result: ActionResult) -> None:
        """A row of the ledger about one of the incidents."""
        case = self._cases.get(result.incident_id)
        if case is None:
            return
        at_ns = result.started_at_ns or result.observed_at_ns
        case.decided_at_ns = case.decided_at_ns or at_ns
        if result.status is ActionStatus.STARTED:
            case.acted_at_ns = case.acted_at_ns or at_ns
            if case.status is not IncidentStatus.RECOVERED:
                case.status = IncidentStatus.ACTING
        elif result.status is ActionStatus.REVERTED and case.status is IncidentStatus.ACTING:
            case.status = IncidentStatus.OPEN
        case.verified = case.verified or result.status is ActionStatus.VERIFIED
        self._tell(case, result)

    # --- output -------------------------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> list[Incident]:
        """Let time pass: revisions to publish, oldest incident first. Nothing happens to an incident between ticks."""
        self._watch_clock(now_ns)
        for case in list(self._cases.values()):
            self._follow(case, now_ns)
            if case.live:
                case.confirm(self._policy, now_ns)
            if case.dirty and now_ns >= case.due_at_ns:
                self._publish(case, now_ns)
        out, self._out = self._out, []
        self._metrics.set("tw_open_incidents", sum(case.live for case in self._cases.values()))
        return out

    def open_incidents(self) -> list[Case]:
        """Cases that are not closed."""
        return [case for case in self._cases.values() if case.live]

    def restore(self, incidents: Iterable[Incident]) -> int:
        """Rebuild from the newest revision of each incident; returns how many are live."""
        newest: dict[str, Incident] = {}
        for incident in incidents:
            if incident.revision >= newest.get(incident.incident_id, incident).revision:
                newest[incident.incident_id] = incident
        for incident in sorted(newest.values(), key=lambda i: i.timeline.verdict_at_ns):
            case = case_of(incident)
            case.paid_by = self._budget.recall(incident) if self._budget is not None else ""
            for verdict_id in case.verdict_ids:
                self._known[verdict_id] = None
            if case.live:
                self._cases[case.incident_id] = case
            elif case.status is IncidentStatus.CLOSED:
                self._closed.append(case)
        return len(self._cases)

    # --- where a verdict belongs ----------------------------------------------------------------------------------------

    def _why_ignored(self, verdict: Verdict) -> str | None:
        if verdict.verdict_id in self._known:
            return "repeat"
        if not reach_at_least(verdict.reach, Reach.CORRELATE):
            return "reach"
        if verdict.job and verdict.attempt < self.progress.attempt(verdict.job):
            return "attempt is over"
        if verdict.job and self.progress.of(verdict.job).finished:
            return "job is over"
        return None

    def _remember(self, verdict: Verdict) -> None:
        self._known[verdict.verdict_id] = None
        if len(self._known) > KEPT_VERDICTS:
            self._known.popitem(last=False)

    def _job_of(self, verdict: Verdict) -> str:
        return verdict.job or self.progress.job_on(node_of(verdict.entity))

    def _may_open(self, verdict: Verdict, job: str, now_ns: int) -> bool:
        """Open the incident if the budget of false ones allows it."""
        paid_by, disturbed = (
            "",
            bool(job)
            and any(
                c.job == job and c.live and not c.came_along and self._near(c, verdict, now_ns)
                for c in self._cases.values()
            ),
        )
        if self._budget is not None and not disturbed:
            culprit = culprit_of(verdict.entity)
            allies = [signal for _, signal in self._lately_about(culprit, now_ns)]
            admitted, paid_by = self._budget.admits(verdict, (job, verdict.kind, culprit), allies, now_ns)
            if not admitted:
                return False
        self._open(verdict, job, now_ns, paid_by, came_along=disturbed)
        return True

    def _lately_about(self, culprit: str, now_ns: int) -> list[tuple[int, Verdict]]:
        since_ns = now_ns - self._settings.join_s * NS_PER_S
        return [(at_ns, signal) for at_ns, about, signal in self._signals if about == culprit and at_ns >= since_ns]

    def _clear(self, verdict: Verdict, job: str) -> None:
        culprit = culprit_of(verdict.entity)
        if self._budget is not None:
            jobs = {job} if job else self._budget.jobs_waiting()
            self._budget.take_back(verdict.kind, culprit, jobs)
        for case in self._cases.values():
            if job in ("", case.job):
                case.clear(verdict.kind, culprit, verdict.observed_at_ns, verdict.detector)

    def _host(self, verdict: Verdict, job: str, now_ns: int) -> Case | None:
        """The live case that this verdict supports, is explained by, or takes over."""
        finding = _finding(verdict, now_ns)
        cases = [case for case in self._cases.values() if case.job == job and case.live]
        same = next((case for case in cases if case.lead(self._policy).culprit == finding.culprit), None)
        if same is not None:
            return None if self._recurs(same, verdict, now_ns) else same
        near = [case for case in cases if self._near(case, verdict, now_ns)]
        for case in near:
            if self._accounts_for(case, finding) or case.mentions(verdict):
                return case
        taken = [case for case in near if self._takes_over(finding, case)]
        for other in taken[1:]:
            self._supersede(other, taken[0], now_ns)
        return taken[0] if taken else self._reopened(verdict, job, now_ns)

    def _near(self, case: Case, verdict: Verdict, now_ns: int) -> bool:
        """Same attempt, and close in time (or the case is being healed, which hurts everybody for a while)."""
        if self._newer(case, verdict):
            return False
        recent = now_ns - max(case.support_at_ns, case.opened_at_ns) <= self._settings.join_s * NS_PER_S
        return recent or case.status is IncidentStatus.ACTING

    def _takes_over(self, finding: Finding, case: Case) -> bool:
        """A better explanation; what began after the repair did cannot be why it was needed."""
        too_late = case.acted_at_ns and finding.onset_at_ns >= case.acted_at_ns
        return not too_late and explains(finding, case.lead(self._policy), self._policy)

    def _newer(self, case: Case, verdict: Verdict) -> bool:
        """Only verdicts that name their job know its attempt."""
        return bool(verdict.job) and verdict.attempt > case.attempt

    def _accounts_for(self, case: Case, finding: Finding) -> bool:
        if explains(case.lead(self._policy), finding, self._policy):
            return True
        family = self._policy.kind(finding.verdict.kind).family
        symptom = (
            family in (Family.FAIL_STOP, Family.FAIL_SLOW, Family.CORRUPTION)
            and finding.verdict.kind not in INFRASTRUCTURE
        )
        return symptom and case.status is IncidentStatus.ACTING

    def _recurs(self, case: Case, verdict: Verdict, now_ns: int) -> bool:
        """The same culprit in a newer attempt, after something was done: the remedy did not last."""
        if case.acted_at_ns and self._newer(case, verdict) and verdict.onset_at_ns > case.acted_at_ns:
            self._close(case, "verified" if case.recovered_at_ns else "recurred", now_ns)
            return True
        return False

    def _reopened(self, verdict: Verdict, job: str, now_ns: int) -> Case | None:
        """A fault that nobody acted on and that came back soon after its close: the same incident goes on."""
        key = (job, verdict.kind, culprit_of(verdict.entity))
        for case in reversed(self._closed):
            if now_ns - case.closed_at_ns > self._settings.flap_s * NS_PER_S:
                return None
            if case.job == job and not case.acted_at_ns and not self._newer(case, verdict) and self._key(case) == key:
                self._closed.remove(case)
                self._cases[case.incident_id] = case
                return case
        return None

    # --- what happens to a case -------------------------------------------------------------------------------------------

    def _open(self, verdict: Verdict, job: str, now_ns: int, paid_by: str, came_along: bool) -> None:
        culprit = culprit_of(verdict.entity)
        if not job and self._healed_away(verdict):
            self._metrics.count("tw_verdicts_ignored_total", reason="node is out of its job")
            return
        progress = self.progress.of(job)
        case = Case(
            stable_id("incident", verdict.verdict_id),
            self._cluster,
            job,
            verdict.attempt if verdict.job else self.progress.attempt(job),
            now_ns,
            now_ns + int(self._settle_s(verdict) * NS_PER_S),
            progress.step,
            paid_by=paid_by,
            came_along=came_along,
        )
        self._cases[case.incident_id] = case
        for at_ns, signal in self._lately_about(culprit, now_ns):
            case.take(signal, at_ns, self._policy)
        self._join(case, verdict, now_ns)

    def _join(self, case: Case, verdict: Verdict, now_ns: int) -> None:
        before = case.lead(self._policy).culprit if case.findings else ""
        case.take(verdict, now_ns, self._policy)
        after = case.lead(self._policy)
        if not case.revision and after.culprit != before:
            latest_ns = case.opened_at_ns + int(self._settings.settle_limit_s * NS_PER_S)
            case.due_at_ns = min(now_ns + int(self._settle_s(after.verdict) * NS_PER_S), latest_ns)
        if (
            case.status in (IncidentStatus.RECOVERED, IncidentStatus.CLOSED)
            and culprit_of(verdict.entity) == after.culprit
        ):
            case.status, case.recovered_at_ns, case.closed_at_ns, case.close_reason, case.dirty = (
                IncidentStatus.OPEN,
                0,
                0,
                "",
                True,
            )
        self._promote(case, verdict, now_ns)

    def _settle_s(self, verdict: Verdict) -> float:
        return settle_s(self._policy.kind(verdict.kind))

    def _promote(self, case: Case, verdict: Verdict, now_ns: int) -> None:
        """Most nodes of one leaf accused of a bad link at once: it is the leaf."""
        leaf = self._leaf(node_of(verdict.entity))
        if verdict.kind not in LINKS or not leaf:
            return
        near = [
            c
            for c in self._cases.values()
            if c.job == case.job and c.live and (c is case or self._near(c, verdict, now_ns))
        ]
        accused = {f.node for c in near for f in c.findings if f.verdict.kind in LINKS and not f.cleared}
        suffering = sorted(node for node in accused if self._leaf(node) == leaf)
        if len(suffering) < 2 or len(suffering) < 0.6 * self._members(leaf):
            return
        oldest, *others = sorted(
            (c for c in near if self._leaf(c.lead(self._policy).node) == leaf),
            key=lambda c: c.opened_at_ns,
        ) or [case]
        for other in others:
            self._supersede(other, oldest, now_ns)
        oldest.take(promoted(verdict, leaf, suffering), now_ns, self._policy)

    def _members(self, leaf: str) -> int:
        """Nodes below a leaf, counted once for each picture of the cluster."""
        topology = self.progress.topology
        if self._leaves[0] is not topology:
            self._leaves = topology, Counter(map(self._leaf, topology.nodes()))
        return self._leaves[1][leaf]

    def _leaf(self, node: str) -> str:
        return self.progress.topology.attributes(node).get("leaf", "") if node else ""

    def _watch_clock(self, now_ns: int) -> None:
        """A clock that was set back, here or in the worker that published what was restored, leaves incidents of the future."""
        if now_ns < self._ticked_ns or not self._ticked_ns:
            for case in (*self._cases.values(), *self._closed):
                case.set_back(now_ns)
            self._signals = deque((signal for signal in self._signals if signal[0] <= now_ns), KEPT_SIGNALS)
        self._ticked_ns = now_ns

    def _supersede(self, case: Case, by: Case, now_ns: int) -> None:
        """Two incidents turned out to be one. One that nobody has seen yet just goes into the other."""
        by.absorb(case)
        case.status, case.superseded_by, case.closed_at_ns = IncidentStatus.SUPERSEDED, by.incident_id, now_ns
        if case.revision:
            self._publish(case, now_ns)
        self._cases.pop(case.incident_id, None)

    def _follow(self, case: Case, now_ns: int) -> None:
        """Recovery and close, by what the job does."""
        job = self.progress.of(case.job)
        if case.job and job.finished and case.live:
            self._close(case, "job finished", now_ns)
        elif case.status in (IncidentStatus.OPEN, IncidentStatus.ACTING):
            self._note_progress(case)
            if self._recovered(case, now_ns):
                case.status, case.dirty = IncidentStatus.RECOVERED, True
                case.recovered_at_ns = case.recovered_at_ns or now_ns
        elif case.status is IncidentStatus.RECOVERED and self._may_close(case, now_ns):
            self._close(case, self._close_reason(case), now_ns)

    def _note_progress(self, case: Case) -> None:
        """The first moment at which the job was past the step at fault: recovery is dated back to it."""
        job = self.progress.of(case.job)
        newer = job.attempt > case.attempt
        if not case.job or job.step <= case.last_step or not (newer or job.at_ns > case.support_at_ns):
            return
        stops = self._policy.kind(case.lead(self._policy).verdict.kind).family in (Family.FAIL_STOP, Family.CORRUPTION)
        if not case.recovered_at_ns and (newer or stops or case.acted_at_ns):
            case.recovered_at_ns = job.at_ns

    def _recovered(self, case: Case, now_ns: int) -> bool:
        lead = case.lead(self._policy)
        family = self._policy.kind(lead.verdict.kind).family
        stopped = bool(case.job) and family in (Family.FAIL_STOP, Family.CORRUPTION)
        if self.progress.of(case.job).attempt > case.attempt or stopped:
            # what stopped has to move past the fault; that somebody takes it back is not enough
            quiet_ns = now_ns - max(case.support_at_ns, case.recovered_at_ns)
            quiet = case.verified or quiet_ns >= self._settings.quiet_s * NS_PER_S
            return bool(case.recovered_at_ns) and quiet
        slow = family in (Family.FAIL_SLOW, Family.CORRUPTION, Family.FAIL_STOP)
        limit_s = self._settings.silent_slow_s if slow else self._settings.silent_warning_s
        return lead.cleared or now_ns - case.support_at_ns >= limit_s * NS_PER_S

    def _may_close(self, case: Case, now_ns: int) -> bool:
        return (
            case.verified or now_ns - max(case.recovered_at_ns, case.support_at_ns) >= self._settings.hold_s * NS_PER_S
        )

    def _close_reason(self, case: Case) -> str:
        if case.verified or (case.acted_at_ns and self.progress.of(case.job).attempt > case.attempt):
            return "verified"
        return "cleared" if case.lead(self._policy).cleared else "quiet"

    def _close(self, case: Case, reason: str, now_ns: int) -> None:
        case.status, case.close_reason, case.closed_at_ns = IncidentStatus.CLOSED, reason, now_ns
        if self._budget is not None and case.paid_by and (reason == "verified" or self._agreed(case)):
            self._budget.proved(case.paid_by)
        self._publish(case, now_ns)
        self._cases.pop(case.incident_id, None)
        self._closed.append(case)

    def _agreed(self, case: Case) -> bool:
        """Whether detectors of different families named the culprit."""
        lead = case.lead(self._policy)
        speakers = {name for f in case.findings if f.culprit == lead.culprit for name in f.detectors}
        return self._budget is not None and self._budget.independent(speakers)

    def _publish(self, case: Case, now_ns: int) -> None:
        if not case.revision:
            case.recurrence = self._recurrence(case.job, case.lead(self._policy).verdict, now_ns)
        incident = case.record(self._policy, now_ns)
        self._metrics.count("tw_incident_revisions_total", kind=incident.kind)
        self._out.append(incident)

    def _tell(self, case: Case, result: ActionResult) -> None:
        """Add a ledger row to the incident's story."""
        what = " ".join(part for part in (result.verb, result.target) if part) or "plan"
        line = f"{what} {result.status}" + (f" ({result.reason})" if result.reason else "")
        if line not in case.actions:
            case.actions = [*case.actions, line][-20:]
            case.dirty = True

    # --- memory of what is over ---------------------------------------------------------------------------------------------

    def _key(self, case: Case) -> tuple[str, str, str]:
        lead = case.lead(self._policy)
        return case.job, lead.verdict.kind, lead.culprit

    def _recurrence(self, job: str, verdict: Verdict, now_ns: int) -> int:
        """How often the same culprit was hit by the same kind before, as far as policy remembers."""
        key = (job, verdict.kind, culprit_of(verdict.entity))
        window_ns = int(self._policy.kind(verdict.kind).recurrence_window_s * NS_PER_S)
        earlier = next((case for case in reversed(self._closed) if self._key(case) == key), None)
        return earlier.recurrence + 1 if earlier is not None and now_ns - earlier.closed_at_ns <= window_ns else 0

    def _healed_away(self, verdict: Verdict) -> bool:
        """The node was taken out of its job for this very fault: that it is still broken is no news."""
        culprit = culprit_of(verdict.entity)
        return any(
            self._key(case)[1:] == (verdict.kind, culprit) and case.acted_at_ns
            for case in (*self._closed, *self._cases.values())
        )


def _finding(verdict: Verdict, now_ns: int) -> Finding:
    return Finding(verdict, now_ns, now_ns, verdict.onset_at_ns, detectors={verdict.detector: verdict.reach})
