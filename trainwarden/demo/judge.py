"""Whether the right thing was done, and when: pure functions of what was observed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from trainwarden.clock import NS_PER_S
from trainwarden.demo.faults.base import Expectation
from trainwarden.demo.observer import Observed
from trainwarden.records import ActionStatus, Incident, IncidentStatus, Mode


@dataclass(frozen=True)
class Injection:
    """What was done to whom."""

    fault: str
    node: str
    rank: int
    at_ns: int
    step: int
    attempt: int
    sentence: str


@dataclass
class Outcome:
    """The judgement. `seconds` are moments after the fault, NaN when they did not happen."""

    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    steps_lost: int = 0
    named: str = ""
    kind: str = ""
    actions: tuple[str, ...] = ()
    step_ms_before: float = math.nan
    step_ms_in_fault: float = math.nan

    @property
    def passed(self) -> bool:
        """Whether everything was right."""
        return not self.failures


def finished(observed: Observed, expectation: Expectation, injection: Injection, settle_s: float, now_ns: int) -> bool:
    """Whether the run can be judged: healed and stepping again, or recommended and left alone for `settle_s`."""
    incident = blamed(observed, injection)
    if incident is None:
        return False
    if expectation.executed:
        resumed = observed.newest_attempt > injection.attempt and observed.last_step > injection.step
        told = incident.status in (IncidentStatus.RECOVERED, IncidentStatus.CLOSED)
        return resumed and told and bool(observed.done(ActionStatus.VERIFIED))
    told = bool(observed.done(ActionStatus.RECOMMENDED))
    return told and now_ns - incident.timeline.verdict_at_ns > settle_s * NS_PER_S


def judge(observed: Observed, expectation: Expectation, injection: Injection) -> Outcome:
    """The outcome of a run, with one sentence for each thing that was wrong."""
    outcome = Outcome()
    incident = blamed(observed, injection)
    if not expectation.kinds:
        _judge_quiet(observed, outcome)
        return outcome
    _judge_others(observed, injection, outcome)
    if incident is None:
        outcome.failures.append("no incident was opened")
        return outcome
    _judge_culprit(incident, expectation, injection, outcome)
    _judge_actions(observed, expectation, injection, outcome)
    _judge_progress(observed, expectation, injection, outcome)
    _measure(observed, incident, injection, outcome)
    return outcome


def blamed(observed: Observed, injection: Injection) -> Incident | None:
    """The first loud incident whose verdict came after the fault."""
    after = [i for i in observed.loud_incidents() if i.timeline.verdict_at_ns >= injection.at_ns]
    return after[0] if after else None


def _judge_quiet(observed: Observed, outcome: Outcome) -> None:
    for incident in observed.loud_incidents():
        outcome.failures.append(f"false alarm: {incident.kind} on {', '.join(map(str, incident.culprits)) or 'nobody'}")
    executed = [r.verb for r in observed.done(ActionStatus.STARTED) if r.verb]
    if executed:
        outcome.failures.append(f"something was done although nothing was wrong: {', '.join(executed)}")
    if observed.newest_attempt > min(observed.attempts, default=0):
        outcome.failures.append("the job was restarted although nothing was wrong")


def _judge_others(observed: Observed, injection: Injection, outcome: Outcome) -> None:
    """Whoever else was accused, before the fault or beside it, was accused falsely."""
    for incident in observed.loud_incidents():
        blames = ", ".join(map(str, incident.culprits)) or "nobody"
        if incident.timeline.verdict_at_ns < injection.at_ns:
            outcome.failures.append(f"false alarm before the fault: {incident.kind} on {blames}")
        elif _nodes(incident) - {injection.node} and incident is not blamed(observed, injection):
            outcome.failures.append(f"accused {blames} of {incident.kind} too")


def _nodes(incident: Incident) -> set[str]:
    return {entity.node or entity.name for entity in incident.culprits}


def _judge_culprit(incident: Incident, expectation: Expectation, injection: Injection, outcome: Outcome) -> None:
    outcome.kind = incident.kind
    outcome.named = ", ".join(str(entity) for entity in incident.culprits) or "nobody"
    if _nodes(incident) != {injection.node}:
        outcome.failures.append(f"named {outcome.named}, the fault was on {injection.node}")
    if incident.kind not in expectation.kinds:
        outcome.failures.append(f"called it {incident.kind}, expected {' or '.join(expectation.kinds)}")


def _judge_actions(observed: Observed, expectation: Expectation, injection: Injection, outcome: Outcome) -> None:
    started = [r.verb for r in observed.done(ActionStatus.DONE) if r.verb and r.verb != "notify"]
    outcome.actions = tuple(started)
    wanted = [verb for verb in expectation.executed if verb in started or verb not in expectation.optional]
    if started != wanted:
        outcome.failures.append(f"did {started or 'nothing'}, expected {list(expectation.executed) or 'nothing'}")
    recommended = {r.verb for r in observed.done(ActionStatus.RECOMMENDED) if r.verb}
    for verb in expectation.recommended:
        if verb not in recommended:
            outcome.failures.append(f"{verb} was not recommended")
    if expectation.recommended:
        outcome.actions = tuple(f"{verb} (recommended)" for verb in sorted(recommended))
    if not expectation.executed and observed.newest_attempt > injection.attempt:
        outcome.failures.append("the job was restarted although it should have been left alone")


def _judge_progress(observed: Observed, expectation: Expectation, injection: Injection, outcome: Outcome) -> None:
    if observed.last_step <= injection.step:
        outcome.failures.append(
            f"training did not go past step {injection.step}: last common step {observed.last_step}"
        )
    if not expectation.executed:
        return
    newest = observed.newest_attempt
    nodes = {node for (attempt, _), node in observed.node_of_rank.items() if attempt == newest}
    if expectation.leaves and injection.node in nodes:
        outcome.failures.append(f"{injection.node} still takes part in attempt {newest}")
    if not expectation.leaves and injection.node not in nodes:
        outcome.failures.append(
            f"{injection.node} was left out of attempt {newest} although a restart in place was right"
        )


def _measure(observed: Observed, incident: Incident, injection: Injection, outcome: Outcome) -> None:
    at = injection.at_ns
    moments = {"first signal": incident.timeline.first_signal_at_ns, "verdict": incident.timeline.verdict_at_ns}
    made = [p for p in observed.plans if p.incident_id == incident.incident_id]
    plans = [
        p for p in made if p.mode is Mode.AUTO
    ] or made  # what is named before it is confirmed is recommended first
    started = [r for r in observed.done(ActionStatus.STARTED) if r.incident_id == incident.incident_id]
    finished_rows = [r for r in observed.done(ActionStatus.DONE) if r.incident_id == incident.incident_id and r.verb]
    moments["decision"] = min((p.observed_at_ns for p in plans), default=0)
    moments["action"] = min((r.started_at_ns for r in started), default=0)
    moments["action done"] = max((r.finished_at_ns for r in finished_rows), default=0)
    moments["resumed"] = _resumed_at(observed, injection)
    moments["caught up"] = _caught_up_at(observed, injection)
    outcome.seconds = {name: (moment - at) / NS_PER_S if moment else math.nan for name, moment in moments.items()}
    outcome.steps_lost = _steps_lost(observed, injection)
    outcome.step_ms_before, outcome.step_ms_in_fault = _step_times(observed, injection)


def _resumed_at(observed: Observed, injection: Injection) -> int:
    """Start of the first step of the attempt after the fault, on the slowest rank."""
    view = observed.attempts.get(observed.newest_attempt)
    if view is None or observed.newest_attempt <= injection.attempt:
        return 0
    return max(row.started_at_ns for row in view.first.values())


def _caught_up_at(observed: Observed, injection: Injection) -> int:
    """When the new attempt was seen past the step of the fault (grain: one report, a second)."""
    view = observed.attempts.get(observed.newest_attempt)
    if view is None or observed.newest_attempt <= injection.attempt or view.lowest_last_step <= injection.step:
        return 0
    return max(row.started_at_ns for row in view.last.values())


def _steps_lost(observed: Observed, injection: Injection) -> int:
    newest = observed.newest_attempt
    if newest <= injection.attempt:
        return 0
    reached = max(row.step for row in observed.attempts[injection.attempt].last.values())
    resumed_from = min(row.step for row in observed.attempts[newest].first.values())
    return max(0, reached + 1 - resumed_from)


def _step_times(observed: Observed, injection: Injection) -> tuple[float, float]:
    durations = observed.attempts[injection.attempt].durations_ms
    world = max(1, observed.attempts[injection.attempt].world)
    before = durations[: injection.step * world]
    during = durations[injection.step * world :]
    return (statistics.median(before) if before else math.nan, statistics.median(during) if during else math.nan)
