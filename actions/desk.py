"""Where incidents become decisions: each newest revision is planned, judged by the rails and written down, once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from actions import planner
from actions.backends.base import Backend
from actions.journal import Journal
from actions.ledger import Row, StoredPlan, step_row
from actions.planner import PlannerSettings
from actions.probe import may_return, probe
from actions.rails.base import Rail, Refusal, first_refusal
from actions.rails.breaker import LATCH
from actions.watch import Watch
from actions.world import World, is_open, nodes_of
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import UnavailableError, UsageError
from trainwarden.policy import Policy, strictest
from trainwarden.records import ActionStatus, Incident, Mode, Plan, Reach
from trainwarden.selfmetrics import Metrics

LOG = logging.getLogger("trainwarden.actions.desk")

KEPT_INCIDENTS = 10_000
OPERATOR = "operator"
"""Stands as rail where a person said no."""


@dataclass
class Standing:
    """What operators have said by record or file, as far as it binds everything."""

    kill_switch_file: Path
    record_mode: Mode = Mode.AUTO
    record_kill_switch: str = ""
    expires_at_ns: dict[str, int] = field(default_factory=dict)

    def mode(self, now_ns: int) -> Mode:
        """Ceiling from `tw.policy`."""
        return Mode.AUTO if self._over("mode", now_ns) else self.record_mode

    def kill_switch(self, now_ns: int) -> str:
        """Why everything is stopped; empty when it is not. A file that cannot be looked at stops everything too."""
        try:
            if self.kill_switch_file.exists():
                said = self.kill_switch_file.read_text(errors="replace").strip()
                return said[:200] or f"{self.kill_switch_file} exists"
        except OSError as error:
            return f"{self.kill_switch_file} cannot be read ({error.strerror})"
        return "" if self._over("kill_switch", now_ns) else self.record_kill_switch

    def _over(self, key: str, now_ns: int) -> bool:
        return 0 < self.expires_at_ns.get(key, 0) <= now_ns


class Desk:
    """Decides; carrying out is the executor's. Called from the service's main thread and from the operator's API.

    Parameters
    ----------
    launch
        Takes a plan that has begun and carries it out elsewhere, without waiting.
    sizes
        Least number of nodes of a job, and the multiple that it shrinks in.
    """

    def __init__(
        self, policy: Policy, planner_settings: PlannerSettings, rails: list[Rail], journal: Journal, backend: Backend, watch: Watch,
        standing: Standing, metrics: Metrics, clock: Clock, launch: Callable[[Plan], None], sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        self.policy = policy
        self.settings = planner_settings
        self.rails = rails
        self.journal = journal
        self.standing = standing
        self._backend = backend
        self._watch = watch
        self._metrics = metrics
        self._clock = clock
        self._launch = launch
        self._sizes = sizes
        self._lock = threading.RLock()
        self._incidents: dict[str, Incident] = {}
        self._again_ns: dict[str, int] = {}
        self._refused_by: dict[str, tuple[str, str]] = {}

    # --- incidents ---------------------------------------------------------------------------------------------------

    def learn(self, incident: Incident) -> bool:
        """Keep the newest revision; False for one that is not newer."""
        with self._lock:
            known = self._incidents.get(incident.incident_id)
            if known is not None and known.revision >= incident.revision:
                return False
            self._incidents.pop(incident.incident_id, None)
            self._incidents[incident.incident_id] = incident
            while len(self._incidents) > KEPT_INCIDENTS:
                self._incidents.pop(next(iter(self._incidents)))
            return True

    def incidents(self) -> tuple[Incident, ...]:
        """Newest revision of every incident known."""
        with self._lock:
            return tuple(self._incidents.values())

    def incident(self, incident_id: str) -> Incident | None:
        """One incident."""
        with self._lock:
            return self._incidents.get(incident_id)

    def due(self) -> list[Incident]:
        """Open incidents whose plan was held up by something that may be over by now."""
        now_ns = self._clock.now_ns()
        with self._lock:
            ids = [incident_id for incident_id, at_ns in self._again_ns.items() if at_ns <= now_ns]
            return [self._incidents[incident_id] for incident_id in ids if incident_id in self._incidents]

    def consider(self, incident: Incident) -> None:
        """Decide about the newest revision of an incident. Deciding twice about the same thing changes nothing.

        Raises
        ------
        UsageError
            The incident asks for what no plan can be made of; it belongs to the dead letters.
        LedgerError
            Nothing could be written, so nothing is done.
        """
        began_ns = self._clock.monotonic_ns()
        with self._lock:
            self._again_ns.pop(incident.incident_id, None)
            newest = self.journal.ledger.newest_plan(incident.incident_id)
            if not is_open(incident):
                self._withdraw(newest, f"incident {incident.incident_id} is {incident.status.value}")
                return
            if newest is not None and newest.ended is None and not self._waits(newest.plan):
                self._again_ns[incident.incident_id] = self._clock.now_ns() + NS_PER_S
                return
            self._decide(incident, newest)
        self._metrics.observe_ms("tw_decision_ms", (self._clock.monotonic_ns() - began_ns) / 1e6)

    def _decide(self, incident: Incident, newest: StoredPlan | None) -> None:
        now_ns, ledger = self._clock.now_ns(), self.journal.ledger
        job, number = self._watch.job(incident.job), ledger.next_number(incident.incident_id)
        policy = replace(self.policy, mode=strictest(self.policy.mode, self.standing.mode(now_ns)))
        plan = planner.plan(incident, policy, job, now_ns, number, self.settings, self._recurred(incident, now_ns))
        if plan is None:
            return
        plan = replace_fence(plan, ledger.fence)
        signature = planner.signature(plan)
        if newest is not None and self._is_settled(incident, newest, signature):
            return
        if self._is_history(incident, newest, now_ns):
            return
        self._withdraw(newest, f"revision {incident.revision} calls for another plan")
        self._record(plan, signature, incident)

    def _record(self, plan: Plan, signature: str, incident: Incident) -> None:
        culprits = ",".join(nodes_of(incident.culprits))
        refusal = self._refusal(plan)
        if plan.mode is Mode.OBSERVE:
            self.journal.add_plan(plan, signature, [Row.of(plan, ActionStatus.SKIPPED, f"mode observe: {plan.reason}")])
        elif plan.mode is Mode.RECOMMEND:
            note = {"would_be_refused": f"{refusal.rail}: {refusal.reason}"} if refusal else {}
            rows = [step_row(plan, step, ActionStatus.RECOMMENDED) for step in plan.steps]
            self.journal.add_plan(plan, signature, [*rows, Row.of(plan, ActionStatus.RECOMMENDED, plan.reason, **note)])
        elif refusal is not None:
            self._deny(plan, signature, refusal)
        elif plan.mode is Mode.APPROVE:
            self.journal.add_plan(plan, signature, [Row.of(plan, ActionStatus.WAITING, "waiting for approval")])
        else:
            self._refused_by.pop(plan.incident_id, None)
            self.journal.add_plan(plan, signature, [self._begin_row(plan, culprits)])
            self._launch(plan)

    def _deny(self, plan: Plan, signature: str, refusal: Refusal) -> None:
        """A refusal is written once; the same one again, while its cause lasts, is not news."""
        self._metrics.count("tw_rail_refusals_total", rail=refusal.rail)
        if refusal.retry_at_ns:
            self._again_ns[plan.incident_id] = refusal.retry_at_ns
        if self._refused_by.get(plan.incident_id) == (refusal.rail, signature):
            return
        self._latch(refusal)
        marks = {name: "1" for name, on in (("page", refusal.page), ("retry", refusal.retry_at_ns > 0)) if on}
        row = Row.of(plan, ActionStatus.DENIED, refusal.reason, refusal.rail, **marks)
        self.journal.add_plan(plan, signature, [row])
        self._refused_by[plan.incident_id] = (refusal.rail, signature)
        LOG.warning("plan %s is refused by %s: %s", plan.plan_id, refusal.rail, refusal.reason)

    def _refusal(self, plan: Plan) -> Refusal | None:
        for step in plan.steps:
            if reason := self._backend.can(step.verb):
                return Refusal("backend", f"{step.verb.value}: {reason}")
        return first_refusal(self.rails, plan, self.world(plan))

    def _latch(self, refusal: Refusal) -> None:
        if refusal.latch:
            self.journal.ledger.note(f"latch:{refusal.rail}", refusal.reason, "rail")

    def _waits(self, plan: Plan) -> bool:
        return not any(row.status is ActionStatus.STARTED for row in self.journal.ledger.rows_of(plan.plan_id))

    def _is_settled(self, incident: Incident, newest: StoredPlan, signature: str) -> bool:
        """What was decided stays decided. A refusal is asked about again when the rail said so or the incident has news."""
        ended = newest.ended
        if ended is not None and ended.status is ActionStatus.VERIFIED and incident.attempt == newest.plan.attempt:
            return True
        if newest.signature != signature:
            return False
        if ended is None or ended.status is not ActionStatus.DENIED or ended.rail == OPERATOR:
            return True
        return "retry" not in ended.detail and incident.revision <= newest.plan.incident_revision

    def _is_history(self, incident: Incident, newest: StoredPlan | None, now_ns: int) -> bool:
        """Old news read at a start: neither acted on nor recommended, only counted."""
        age = next((rail.settings.event_age_s for rail in self.rails if rail.name == "expiry"), 300.0)
        old = now_ns - incident.observed_at_ns > age * NS_PER_S
        if old:
            self._metrics.count("tw_rail_refusals_total", rail="expiry")
            LOG.info("incident %s revision %d is history: nothing is decided", incident.incident_id, incident.revision)
        return old

    def _withdraw(self, newest: StoredPlan | None, reason: str) -> None:
        """A plan that waits for approval ends when its incident moves on."""
        if newest is not None and newest.ended is None and self._waits(newest.plan):
            self.journal.add(Row.of(newest.plan, ActionStatus.EXPIRED, reason))

    def _recurred(self, incident: Incident, now_ns: int) -> bool:
        """Whether the ledger knows a plan that began for the same kind and culprit within the kind's window."""
        culprits = set(nodes_of(incident.culprits))
        since_ns = now_ns - int(self.policy.kind(incident.kind).recurrence_window_s * NS_PER_S)
        rows = self.journal.ledger.rows_since(since_ns, status=ActionStatus.STARTED, job=incident.job)
        return bool(culprits) and any(
            not row.verb
            and row.detail.get("kind") == incident.kind
            and culprits & set(row.detail.get("culprits", "").split(","))
            for row in rows
        )

    # --- operators ---------------------------------------------------------------------------------------------------

    def approve(self, plan_id: str, author: str, reason: str) -> Row:
        """Let a waiting plan run; the rails are asked again.

        Raises
        ------
        UsageError
            No such plan, or it does not wait any more.
        """
        with self._lock:
            stored = self._waiting(plan_id)
            self.journal.ledger.note(f"approve:{plan_id}", reason, author)
            if (refusal := self._refusal(stored.plan)) is not None:
                self._latch(refusal)
                return self.journal.add(
                    Row.of(stored.plan, ActionStatus.DENIED, refusal.reason, refusal.rail, author=author)
                )
            incident = self.incident(stored.plan.incident_id)
            row = self._begin_row(stored.plan, ",".join(nodes_of(incident.culprits)) if incident else "")
            written = self.journal.add(replace(row, reason=f"approved by {author}: {reason}"))
            self._launch(stored.plan)
            return written

    def reject(self, plan_id: str, author: str, reason: str) -> Row:
        """End a waiting plan."""
        with self._lock:
            stored = self._waiting(plan_id)
            return self.journal.add(
                Row.of(stored.plan, ActionStatus.DENIED, f"rejected by {author}: {reason}", "operator")
            )

    def return_node(self, cluster: str, node: str, author: str, reason: str) -> Plan:
        """Order `node` back into its job; begins at once unless a rail objects.

        Raises
        ------
        UsageError
            The node is unknown, or a rail objects (the sentence is the rail's).
        """
        with self._lock:
            cluster_now = self._watch.cluster()
            result = probe(node, cluster_now)
            if not may_return(result, by_operator=True):
                raise UsageError(f"{node} is not returned: {result.reason}")
            state = cluster_now[node]
            job = self._watch.job(state.job)
            plan = planner.return_plan(cluster, job, node, reason, author, self._clock.now_ns(), self.settings)
            plan = replace_fence(plan, self.journal.ledger.fence)
            if (refusal := self._refusal(plan)) is not None:
                self.journal.add_plan(
                    plan, planner.signature(plan), [Row.of(plan, ActionStatus.DENIED, refusal.reason, refusal.rail)]
                )
                raise UsageError(f"{node} is not returned: {refusal.reason} ({refusal.rail})")
            self.journal.add_plan(
                plan,
                planner.signature(plan),
                [replace(self._begin_row(plan, ""), reason=f"{plan.reason} (probe: {result.reason})")],
            )
            self._launch(plan)
            return plan

    def reset_breaker(self, author: str, reason: str) -> None:
        """Close the breaker; incidents seen before are not acted on."""
        self.journal.ledger.note(LATCH, "", f"{author}: {reason}")

    def expire_waiting(self) -> None:
        """End plans that nobody approved in time."""
        now_ns = self._clock.now_ns()
        with self._lock:
            for stored in self.journal.ledger.open_plans():
                if stored.plan.expires_at_ns <= now_ns and self._waits(stored.plan):
                    self.journal.add(Row.of(stored.plan, ActionStatus.EXPIRED, "nobody approved it in time"))

    # --- for others --------------------------------------------------------------------------------------------------

    def world(self, plan: Plan) -> World:
        """What a rail may look at for `plan`, from what is known now; asks nobody."""
        now_ns = self._clock.now_ns()
        return World(
            now_ns=now_ns, job=self._watch.job(plan.job), cluster=self._watch.cluster(), incident=self.incident(plan.incident_id),
            incidents=self.incidents(), ledger=self.journal.ledger, kill_switch=self.standing.kill_switch(now_ns),
            min_nodes=self._sizes[0], node_unit=self._sizes[1],
        )  # fmt: skip

    def newer_trouble(self, plan: Plan, generation: int) -> str:
        """Another open incident, which may be acted on, about what `plan` has started."""
        for incident in self.incidents():
            other = incident.incident_id != plan.incident_id and incident.job == plan.job
            if other and incident.attempt >= generation and is_open(incident) and incident.reach is Reach.ACT:
                return f"generation {generation} is in trouble again: {incident.title or incident.kind} ({incident.incident_id})"
        return ""

    def _waiting(self, plan_id: str) -> StoredPlan:
        stored = self.journal.ledger.plan(plan_id)
        if stored is None:
            raise UsageError(f"no plan {plan_id!r} in the ledger: see `trainwarden actions plans`")
        if stored.ended is not None:
            raise UsageError(f"plan {plan_id} is {stored.ended.status.value} already: {stored.ended.reason}")
        if stored.plan.mode is not Mode.APPROVE or not self._waits(stored.plan):
            raise UsageError(f"plan {plan_id} does not wait for approval: it has begun")
        return stored

    def _begin_row(self, plan: Plan, culprits: str) -> Row:
        row = Row.of(plan, ActionStatus.STARTED, plan.reason, kind=plan.kind, culprits=culprits)
        return replace(row, key=plan.plan_id)


def replace_fence(plan: Plan, fence: int) -> Plan:
    """`plan` with the fencing number of who made it."""
    return msgspec.structs.replace(plan, fence=fence)


def set_kill_switch(path: Path, on: bool, author: str, reason: str) -> dict[str, object]:
    """Write or remove the kill-switch file.

    Raises
    ------
    UnavailableError
        The file cannot be written or removed; the sentence says which one to handle by hand.
    """
    try:
        if on:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{author}: {reason}\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UnavailableError(f"kill switch {path}: {error.strerror}; write or remove the file by hand") from None
    return {"on": on, "file": str(path)}
