"""Carries a plan out, one step after the other, so that it can be killed anywhere and continued by another process.

Every step is ``started`` in the ledger before its effect, with what it is going to do (members, generation); the effect carries the
step's key, so that repeating it after a crash gets the stored answer from the warden instead of a second effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import msgspec

from actions.backends.base import Backend, Order, Outcome
from actions.capacity import Hold, choose_members
from actions.fences import PendingFences
from actions.journal import Journal
from actions.ledger import LeaseLost, LedgerError, Row, step_row
from actions.rails.base import Rail, Refusal, first_refusal
from actions.rebalancing import UNDO, wait_for_rate
from actions.shares import pace_ms, parse_shares, propose, text_of
from actions.verify import Verification, verify
from actions.watch import Watch
from actions.world import JobState, NodeState, World, isolated_by, restarts
from trainwarden.clock import Clock
from trainwarden.errors import TrainwardenError
from trainwarden.records import ActionStatus, Plan, PlanStep, Verb

LOG = logging.getLogger("trainwarden.actions.executor")

SAVE_FLOOR_MS = 3000.0
SAVE_CEILING_MS = 15_000.0
HEAD_START_S = 0.3
"""How long isolating may take before the others are told to go on without the node."""
RESTART_ROUNDS = 2
"""A member that does not answer is left out once; a second silence is for a person."""
_ENDED = (ActionStatus.DONE, ActionStatus.FAILED, ActionStatus.SKIPPED, ActionStatus.WAITING)


class _Stop(Exception):
    """The plan ends here with this status and sentence."""

    def __init__(self, status: ActionStatus, reason: str, rail: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.rail = rail


@dataclass(frozen=True)
class ExecutorSettings:
    """Bounds of carrying out; see `trainwarden.config.ActionsConfig`."""

    min_nodes: int = 2
    node_unit: int = 1
    verify_s: float = 60.0


class Executor:
    """Runs plans that have begun (their plan-level ``started`` row is written). One call per plan, each in its own thread.

    Parameters
    ----------
    world_of
        Builds the world for a plan from the newest picture.
    newer_trouble
        One sentence when another open incident concerns a job from this generation on; then verifying is pointless.
    """

    def __init__(
        self, journal: Journal, backend: Backend, watch: Watch, fences: PendingFences, rails: list[Rail], clock: Clock,
        settings: ExecutorSettings, world_of: Callable[[Plan], World], newer_trouble: Callable[[Plan, int], str],
    ) -> None:  # fmt: skip
        self._journal = journal
        self._backend = backend
        self._watch = watch
        self._fences = fences
        self._rails = rails
        self._clock = clock
        self._settings = settings
        self._world_of = world_of
        self._newer_trouble = newer_trouble
        self._pool = ThreadPoolExecutor(8, "isolate")
        self._isolating: dict[str, list[tuple[PlanStep, Future[Outcome]]]] = {}

    def run(self, plan: Plan) -> None:
        """Carry on from where the ledger says the plan stands, to its end."""
        try:
            self._run(plan)
        except LeaseLost as error:
            LOG.error("plan %s stops here: %s", plan.plan_id, error)
        except LedgerError as error:
            LOG.error("plan %s is held: %s", plan.plan_id, error)
            self._journal.tell(Row.of(plan, ActionStatus.WAITING, str(error), "ledger", page="1"))

    def _run(self, plan: Plan) -> None:
        try:
            self._read_again(plan)
            for step in plan.steps:
                self._step(plan, step)
            self._close_isolations(plan)
            self._verify(plan)
        except _Stop as stop:
            self._end(plan, stop.status, str(stop), stop.rail)
        except LedgerError:
            raise
        except TrainwardenError as error:
            self._end(plan, ActionStatus.FAILED, str(error))
        except Exception as error:
            LOG.exception("plan %s failed", plan.plan_id)
            self._end(plan, ActionStatus.FAILED, f"a fault of the action service: {error!r}")
        finally:
            self._isolating.pop(plan.plan_id, None)

    def _read_again(self, plan: Plan) -> None:
        """Before the first effect the world is read anew and every rail is asked once more."""
        cluster = self._watch.refresh()
        if any(_took_effect(row, cluster) for rows in self._written(plan).values() for row in rows):
            return
        refusal = first_refusal(self._rails, plan, self._world_of(plan))
        if refusal is not None:
            raise _stop_for(refusal)

    def _step(self, plan: Plan, step: PlanStep) -> None:
        rows = self._written(plan).get(step.key, [])
        if step.verb is not Verb.RESTART and any(row.status in _ENDED for row in rows):
            return
        if (reason := self._world_of(plan).kill_switch) != "":
            raise _Stop(
                ActionStatus.FAILED, f"the kill switch went on in the middle of the plan: {reason}", "kill_switch"
            )
        begun = next((row for row in rows if row.status is ActionStatus.STARTED), None)
        {
            Verb.SAVE: self._save,
            Verb.ISOLATE: self._isolate,
            Verb.RESTART: self._restart,
            Verb.RETURN_NODE: self._return_node,
            Verb.REBALANCE: self._rebalance,
            Verb.REROUTE: self._reroute,
        }[step.verb](plan, step, begun)

    def _save(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        if begun is not None:
            self._write(
                plan, step, ActionStatus.SKIPPED, "the service was restarted during the save: the last good one counts"
            )
            return
        job = self._watch.job(plan.job)
        deadline_ms = min(SAVE_CEILING_MS, max(SAVE_FLOOR_MS, 2 * job.observed_save_ms))
        self._start(plan, step, deadline_ms=f"{deadline_ms:.0f}")
        began_ns = self._clock.monotonic_ns()
        outcome = self._backend.save(self._order(plan, step.key), deadline_ms)
        took_ms = (self._clock.monotonic_ns() - began_ns) / 1e6
        if outcome.status == "done":
            self._watch.saved(plan.job, took_ms)
            self._write(plan, step, ActionStatus.DONE, outcome.reason, **outcome.detail)
        else:
            self._write(
                plan, step, ActionStatus.FAILED, f"{outcome.reason}: the last good save counts", **outcome.detail
            )

    def _isolate(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        """Sent first, but the others do not wait until the node's processes are dead: the new rendezvous keeps it out."""
        if begun is None:
            self._start(plan, step)
        answer = self._pool.submit(self._backend.isolate, self._order(plan, step.key), step.target)
        wait([answer], timeout=HEAD_START_S)
        self._isolating.setdefault(plan.plan_id, []).append((step, answer))
        if answer.done():
            self._close_isolations(plan)

    def _close_isolations(self, plan: Plan) -> None:
        for step, answer in self._isolating.pop(plan.plan_id, []):
            outcome = answer.result()
            if outcome.status == "failed" and self._is_excluded(step.target):
                outcome = Outcome("done", f"{outcome.reason}; the node is excluded all the same")
            if outcome.status == "pending":
                self._fences.add(plan, step)
            elif outcome.status == "done":
                self._write(plan, step, ActionStatus.DONE, outcome.reason, **outcome.detail)
            else:
                self._write(plan, step, ActionStatus.FAILED, outcome.reason)
                raise _Stop(ActionStatus.FAILED, f"{step.target} could not be isolated: {outcome.reason}")

    def _return_node(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        if begun is None:
            self._start(plan, step)
        self._fences.cancel(step.target)
        outcome = self._backend.return_node(self._order(plan, step.key), step.target)
        status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
        self._write(plan, step, status, outcome.reason, **outcome.detail)
        if outcome.status != "done":
            raise _Stop(ActionStatus.FAILED, f"{step.target} could not be returned: {outcome.reason}")

    def _reroute(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        """The node leaves the rail that it uses now; the same order sent again is answered and not done again."""
        if begun is None:
            self._start(plan, step)
        outcome = self._backend.reroute(self._order(plan, step.key), step.target)
        status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
        self._write(plan, step, status, outcome.reason, **outcome.detail)
        if status is ActionStatus.FAILED:
            raise _Stop(status, f"the traffic of {step.target} could not be moved: {outcome.reason}")

    def _rebalance(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        """The shares are chosen once and written down first: after a crash the same change is asked for again."""
        if begun is None:
            ranks = self._watch.job(plan.job).shares
            proposal = propose(ranks, len(ranks))
            if proposal.why_not:
                raise _Stop(ActionStatus.DENIED, proposal.why_not, "backend")
            before = text_of([ranks[rank].share for rank in sorted(ranks)])
            begun = self._start(
                plan, step, shares=text_of(proposal.shares), before=before, step_ms=f"{pace_ms(ranks):.2f}"
            )
        outcome = self._backend.rebalance(self._order(plan, step.key), parse_shares(begun.detail["shares"]))
        status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
        self._write(plan, step, status, outcome.reason, **outcome.detail)
        if status is ActionStatus.FAILED:
            raise _Stop(status, f"the shares of job {plan.job} could not be changed: {outcome.reason}")

    def _verify_rate(self, plan: Plan, step: PlanStep) -> None:
        """By the length of a step; shares that do not help are taken back."""
        begun = next(row for row in self._written(plan)[step.key] if row.status is ActionStatus.STARTED)
        result = wait_for_rate(
            self._watch, plan.job, step.key, float(begun.detail["step_ms"]), self._settings.verify_s, self._clock,
            self._journal.ledger.check_lease,
        )  # fmt: skip
        if result.passed:
            self._end(plan, ActionStatus.VERIFIED, result.reason, **result.detail)
            return
        outcome = self._backend.rebalance(self._order(plan, f"{step.key}.{UNDO}"), parse_shares(begun.detail["before"]))
        self._write(plan, step, ActionStatus.REVERTED, f"{result.reason}; shares as before: {outcome.reason}")
        self._end(plan, ActionStatus.REVERTED, result.reason, **result.detail)

    def _restart(self, plan: Plan, step: PlanStep, begun: Row | None) -> None:
        """Order the new world; once more without those who did not answer. The ledger says which round we are in."""
        del begun
        silent: tuple[str, ...] = ()
        for number in range(1, RESTART_ROUNDS + 1):
            rows = self._written(plan)
            done = any(row.status is ActionStatus.DONE for row in rows.get(_round_of(step, number).key, []))
            if done and _round_of(step, number + 1).key not in rows:
                return
            if not done and self._order_world(plan, _round_of(step, number), silent):
                return
            silent = tuple(sorted({*silent, *self._silent_in(plan, _round_of(step, number))}))
        raise _Stop(ActionStatus.FAILED, f"job {plan.job} could not be restarted: {', '.join(silent)} did not answer")

    def _order_world(self, plan: Plan, step: PlanStep, silent: tuple[str, ...]) -> bool:
        """One round; False when members did not answer. A refusal by a warden ends the plan."""
        if any(row.status is ActionStatus.FAILED for row in self._written(plan).get(step.key, [])):
            return False
        intent = self._intent(plan, step, silent)
        order, job = self._order(plan, step.key), self._watch.job(plan.job)
        outcome = self._backend.restart(order, _members(intent), int(intent["generation"]), job)
        try:
            self._close_isolations(plan)
        finally:
            status = ActionStatus.DONE if outcome.status == "done" else ActionStatus.FAILED
            self._write(plan, step, status, outcome.reason, silent=",".join(outcome.silent), **outcome.detail)
        if status is ActionStatus.FAILED and (outcome.status == "refused" or not outcome.silent):
            raise _Stop(ActionStatus.FAILED, f"job {plan.job} could not be restarted: {outcome.reason}")
        return status is ActionStatus.DONE

    def _silent_in(self, plan: Plan, step: PlanStep) -> set[str]:
        rows = self._written(plan).get(step.key, [])
        return {node for row in rows for node in row.detail.get("silent", "").split(",") if node}

    def _intent(self, plan: Plan, step: PlanStep, silent: tuple[str, ...]) -> Mapping[str, str]:
        """What this restart is to do, as the ledger has it or decided now."""
        rows = self._written(plan).get(step.key, [])
        begun = next((row for row in rows if row.status is ActionStatus.STARTED), None)
        if begun is not None:
            return begun.detail
        job = self._watch.job(plan.job)
        if step.key == _restart_key(plan) and job.generation > plan.attempt:
            raise _Stop(
                ActionStatus.FAILED, f"job {plan.job} went on to attempt {job.generation} by other means meanwhile"
            )
        members = self._choose(plan, job, silent)
        highest = max((int(row.detail.get("generation", 0)) for row in self._restarts_of(plan.job)), default=0)
        generation = max(job.generation, plan.attempt, highest) + 1
        incident = self._world_of(plan).incident
        told = incident.last_step if incident is not None else -1
        # wardens of a dead job know no step, and a worker that was killed in between tells none: then our own memory counts
        base = told if told >= 0 else max(job.last_step, self._watch.reached(plan.job))
        return self._start(
            plan, step, members=",".join(members), generation=str(generation), last_step=str(base)
        ).detail

    def _choose(self, plan: Plan, job: JobState, silent: tuple[str, ...]) -> tuple[str, ...]:
        self._ask_breaker(plan, silent)
        back = tuple(step.target for step in plan.steps if step.verb is Verb.RETURN_NODE)
        without = (*isolated_by(plan), *silent)
        chosen = choose_members(job, without, self._settings.min_nodes, self._settings.node_unit, back)
        if isinstance(chosen, Hold):
            raise _Stop(self._give_back(plan), chosen.reason, "capacity")
        return chosen

    def _ask_breaker(self, plan: Plan, silent: tuple[str, ...]) -> None:
        """Leaving silent members out is isolating them by another name, so the breaker has its say."""
        if not silent:
            return
        steps = tuple(PlanStep(Verb.ISOLATE, node, "") for node in silent)
        wider = msgspec.structs.replace(plan, steps=(*steps, *plan.steps))
        refusal = first_refusal([rail for rail in self._rails if rail.name == "breaker"], wider, self._world_of(plan))
        if refusal is not None:
            raise _Stop(ActionStatus.FAILED, f"{', '.join(silent)} did not answer and {refusal.reason}", refusal.rail)

    def _give_back(self, plan: Plan) -> ActionStatus:
        """The job cannot run without the nodes that this plan took out: better a sick node than none."""
        for step in (step for step in plan.steps if step.verb is Verb.ISOLATE):
            self._fences.cancel(step.target)
            outcome = self._backend.return_node(self._order(plan, f"{step.key}.undo"), step.target)
            self._write(plan, step, ActionStatus.REVERTED, f"given back: {outcome.reason}")
        return ActionStatus.REVERTED if isolated_by(plan) else ActionStatus.FAILED

    def _restarts_of(self, job: str) -> list[Row]:
        return self._journal.ledger.rows_since(0, Verb.RESTART, ActionStatus.STARTED, job)

    def _verify(self, plan: Plan) -> None:
        divided = next((step for step in plan.steps if step.verb is Verb.REBALANCE), None)
        if not restarts(plan) and divided is not None:
            self._verify_rate(plan, divided)
            return
        if not restarts(plan):
            self._end(plan, ActionStatus.VERIFIED, "nothing to wait for: no restart was part of the plan")
            return
        result = self._watch_over(plan)
        if result.again and self._second_chance(plan, result.reason):
            result = self._watch_over(plan)
        status = ActionStatus.VERIFIED if result.passed else ActionStatus.FAILED
        self._end(plan, status, result.reason, **result.detail)

    def _watch_over(self, plan: Plan) -> Verification:
        intent = self._begun_restarts(plan)[-1].detail
        return verify(
            self._watch, plan.job, _members(intent), int(intent["generation"]), int(intent["last_step"]), self._settings.verify_s,
            self._clock, self._journal.ledger.check_lease, lambda: self._newer_trouble(plan, int(intent["generation"])),
        )  # fmt: skip

    def _begun_restarts(self, plan: Plan) -> list[Row]:
        rows = self._journal.ledger.rows_of(plan.plan_id)
        return [row for row in rows if row.verb == Verb.RESTART.value and row.status is ActionStatus.STARTED]

    def _second_chance(self, plan: Plan, reason: str) -> bool:
        """A new world that broke while starting (a port, a slow joiner) is ordered once more; what breaks twice is for a person."""
        begun = len(self._begun_restarts(plan))
        if begun >= RESTART_ROUNDS or self._world_of(plan).kill_switch:
            return False
        LOG.warning("plan %s: %s; the job is restarted once more", plan.plan_id, reason)
        step = next(step for step in plan.steps if step.verb is Verb.RESTART)
        return self._order_world(plan, _round_of(step, begun + 1), ())

    def _end(self, plan: Plan, status: ActionStatus, reason: str, rail: str = "", /, **detail: str) -> None:
        page = {"page": "1"} if status in (ActionStatus.FAILED, ActionStatus.REVERTED) else {}
        self._journal.add(Row.of(plan, status, reason, rail, **{**detail, **page}))
        LOG.info("plan %s (%s) is %s: %s", plan.plan_id, plan.reason, status.value, reason)

    def _is_excluded(self, node: str) -> bool:
        state = self._watch.refresh().get(node)
        return state is not None and state.excluded

    def _order(self, plan: Plan, key: str) -> Order:
        self._journal.ledger.check_lease()
        return Order(key, plan.job, self._journal.ledger.fence, f"incident {plan.incident_id}: {plan.reason}")

    def _start(self, plan: Plan, step: PlanStep, /, **detail: str) -> Row:
        return self._write(plan, step, ActionStatus.STARTED, "", **detail)

    def _write(self, plan: Plan, step: PlanStep, status: ActionStatus, reason: str, /, **detail: str) -> Row:
        begun = next((r for r in self._written(plan).get(step.key, []) if r.status is ActionStatus.STARTED), None)
        row = step_row(plan, step, status, reason, **detail)
        return self._journal.add(replace(row, started_at_ns=begun.at_ns if begun else 0))

    def _written(self, plan: Plan) -> dict[str, list[Row]]:
        """Rows of the plan's steps, by key."""
        found: dict[str, list[Row]] = {}
        for row in self._journal.ledger.rows_of(plan.plan_id):
            if row.verb:
                found.setdefault(row.key, []).append(row)
        return found


def _took_effect(row: Row, cluster: Mapping[str, NodeState]) -> bool:
    """Whether the row stands for something done to the job, as far as anybody knows.

    A save changes nothing, and an order to isolate that was begun may never have left the service that began it.
    """
    if row.verb == Verb.SAVE.value:
        return False
    if row.verb != Verb.ISOLATE.value or row.status is not ActionStatus.STARTED:
        return True
    state = cluster.get(row.target)
    return state is None or not state.reachable or state.excluded


def _round_of(step: PlanStep, number: int) -> PlanStep:
    return step if number == 1 else msgspec.structs.replace(step, key=f"{step.key}.{number}")


def _restart_key(plan: Plan) -> str:
    return next(step.key for step in plan.steps if step.verb is Verb.RESTART)


def _members(intent: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(intent["members"].split(","))


def _stop_for(refusal: Refusal) -> _Stop:
    return _Stop(ActionStatus.DENIED, refusal.reason, refusal.rail)
