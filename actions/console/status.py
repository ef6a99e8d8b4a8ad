"""Putting the status together from what can be had; what cannot be had is said."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from actions.console.model import SILENT_AFTER_S, IncidentLine, JobLine, NodeLine, Part, Status, moment
from actions.console.service_view import Fetch, ServiceData, WardenLine, broker_answers, look, over_http
from actions.console.store_view import NodeTicks, RankSteps, StoreData, StoreView
from actions.console.worker_view import look_at_worker
from trainwarden.clock import NS_PER_S, Clock, SystemClock
from trainwarden.config import Config
from trainwarden.errors import UnavailableError

MAX_AGE_S = 0.9


class Console:
    """Builds the status; safe to ask from many threads, looks at its sources at most about once a second.

    Parameters
    ----------
    fetch
        How the action service is asked.
    probe
        Says why the broker cannot be reached, or nothing.
    worker
        Looks at the stream worker's page: address and the age in seconds from which it is late.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        fetch: Fetch,
        store: StoreView,
        probe: Callable[[str], str] = broker_answers,
        worker: Callable[[str, float], Part] = look_at_worker,
    ) -> None:
        self._config = config
        self._clock = clock
        self._fetch = fetch
        self._store = store
        self._probe = probe
        self._worker = worker
        self._lock = threading.Lock()
        self._made_ns = -(2**62)
        self._made: Status | None = None

    def status(self) -> Status:
        """The status, at most a second old."""
        with self._lock:
            if self._made is None or self._clock.monotonic_ns() - self._made_ns > MAX_AGE_S * NS_PER_S:
                self._made = self._make()
                self._made_ns = self._clock.monotonic_ns()
            return self._made

    def close(self) -> None:
        """Let the store's client go."""
        self._store.close()

    def _make(self) -> Status:
        store, store_part = self._look_at_store()
        service, service_part = self._look_at_service()
        reason = self._probe(self._config.kafka.url)
        broker_part = Part("kafka", not reason, reason or "reachable")
        worker_part = self._worker(self._config.streams.web_listen, self._config.health.late_s)
        now_s = self._clock.now_ns() / NS_PER_S
        incidents = merge_incidents(service.incidents if service else (), store.incidents)
        ages = [now_s - node.arrived_s for node in store.nodes]
        return Status(
            at=moment(self._clock.now_ns()),
            cluster=self._config.cluster,
            mode=service.mode if service else self._config.policy.mode.value,
            kill_switch=service.kill_switch if service else self._kill_switch_file(),
            telemetry_age_s=round(max(min(ages), 0.0), 1) if ages else None,
            parts=(service_part, worker_part, store_part, broker_part),
            jobs=jobs_of(store.ranks, now_s),
            nodes=nodes_of(store, service.wardens if service else (), incidents, now_s, known=store_part.ok),
            incidents=incidents,
            actions=service.actions if service and service.actions else store.actions,
            deliveries=store.deliveries,
        )

    def _look_at_store(self) -> tuple[StoreData, Part]:
        try:
            return self._store.look(), Part("store", True, "answers")
        except UnavailableError as error:
            return StoreData(), Part("store", False, f"{error}: telemetry and history cannot be shown")

    def _look_at_service(self) -> tuple[ServiceData | None, Part]:
        try:
            service = look(self._fetch)
        except UnavailableError as error:
            return None, Part("actions", False, f"{error}: nothing is done about incidents")
        return service, Part("actions", True, service.state)

    def _kill_switch_file(self) -> str:
        path = self._config.path(self._config.actions.kill_switch, "KILL_SWITCH")
        return f"{path} exists" if path.exists() else ""


def jobs_of(ranks: Iterable[RankSteps], now_s: float) -> tuple[JobLine, ...]:
    """The newest attempt of each job."""
    newest: dict[str, list[RankSteps]] = {}
    for rank in ranks:
        held = newest.setdefault(rank.job, [])
        if held and held[0].attempt < rank.attempt:
            held.clear()
        if not held or held[0].attempt == rank.attempt:
            held.append(rank)
    return tuple(_job(job, held, now_s) for job, held in sorted(newest.items()))


def _job(job: str, ranks: list[RankSteps], now_s: float) -> JobLine:
    times = sorted(rank.step_ms for rank in ranks if rank.step_ms is not None)
    return JobLine(
        job=job, attempt=ranks[0].attempt, ranks=len(ranks), world=max(rank.world for rank in ranks),
        last_step=min(rank.step for rank in ranks), step_ms=round(times[len(times) // 2], 1) if times else None,
        step_age_s=round(now_s - max(rank.arrived_s for rank in ranks), 1),
    )  # fmt: skip


def nodes_of(store: StoreData, wardens: Iterable[WardenLine], incidents: Iterable[IncidentLine], now_s: float,
             known: bool) -> tuple[NodeLine, ...]:  # fmt: skip
    """Every node that anybody knows, in natural order. `known` is whether the store could be asked."""
    ticks = {node.node: node for node in store.nodes}
    by_name = {warden.node: warden for warden in wardens}
    steps: dict[str, list[RankSteps]] = {}
    for rank in store.ranks:
        steps.setdefault(rank.node, []).append(rank)
    suspects = {node: incident for incident in incidents if incident.is_open for node in incident.culprit_nodes}
    names = sorted({*ticks, *by_name, *steps, *suspects}, key=natural)
    return tuple(
        _node(name, ticks.get(name), by_name.get(name), steps.get(name, []), suspects, now_s, known) for name in names
    )


def _node(name: str, ticks: NodeTicks | None, warden: WardenLine | None, steps: list[RankSteps], suspects: Mapping[str, IncidentLine],
          now_s: float, known: bool) -> NodeLine:  # fmt: skip
    age_s = round(max(now_s - ticks.arrived_s, 0.0), 1) if ticks else None
    state, why = _judge(warden, suspects.get(name), age_s, known)
    attempt = max((rank.attempt for rank in steps), default=0)
    steps = [rank for rank in steps if rank.attempt == attempt]
    told = dict(warden.last_steps) if warden else {}
    last = max([rank.step for rank in steps] + list(told.values()), default=None)
    return NodeLine(
        node=name, state=state, why=why, tick_age_s=age_s, job=warden.job if warden and warden.job else steps[0].job if steps else "",
        ranks=tuple(sorted({rank.rank for rank in steps} | set(told))), last_step=last,
        step_age_s=round(now_s - max(rank.arrived_s for rank in steps), 1) if steps else None,
        cpu_busy_ratio=ticks.cpu_busy_ratio if ticks else None, mem_available_ratio=ticks.mem_available_ratio if ticks else None,
    )  # fmt: skip


def _judge(
    warden: WardenLine | None, incident: IncidentLine | None, age_s: float | None, known: bool
) -> tuple[str, str]:
    missing = _missing(warden, age_s, known)
    if warden is not None and warden.excluded:
        return "excluded", "; ".join(
            [f"excluded: {warden.reason}" if warden.reason else "excluded from the job", *missing]
        )
    if incident is not None:
        return "suspect", "; ".join([f"{incident.kind}, {incident.confidence:.0%} sure", *missing])
    if missing:
        return "silent" if known else "unknown", "; ".join(missing)
    return "ok", warden.state if warden else "reports"


def _missing(warden: WardenLine | None, age_s: float | None, known: bool) -> list[str]:
    """What we would have to hear to know how the node is."""
    found = []
    if not known:
        found.append("the store is away")
    elif age_s is None or age_s > SILENT_AFTER_S:
        found.append("no telemetry" if age_s is None else f"no telemetry for {age_s:.0f} s")
    if warden is not None and not warden.reachable:
        found.append("its warden does not answer")
    return found


def merge_incidents(*sources: Iterable[IncidentLine]) -> tuple[IncidentLine, ...]:
    """Newest revision of each incident, open ones first, then the newest."""
    newest: dict[str, IncidentLine] = {}
    for incident in (incident for source in sources for incident in source):
        if incident.incident_id not in newest or newest[incident.incident_id].revision < incident.revision:
            newest[incident.incident_id] = incident
    by_time = sorted(newest.values(), key=lambda incident: incident.began_at, reverse=True)
    return tuple(sorted(by_time, key=lambda incident: not incident.is_open))


def natural(name: str) -> list[tuple[str, int]]:
    """Sort key under which n2 comes before n10."""
    return [(text, int(digits) if digits else -1) for text, digits in re.findall(r"([^0-9]*)([0-9]*)", name)]


def status(config: Config, clock: Clock | None = None) -> Status:
    """The status as a terminal sees it: the action service is asked over HTTP."""
    clock = clock or SystemClock()
    console = Console(config, clock, over_http(config.actions.listen), StoreView(config.store.url, clock))
    try:
        return console.status()
    finally:
        console.close()


def as_table(made: Status) -> dict[str, Any]:
    """The status as plain data, for JSON."""
    return {"schema": 1, **asdict(made)}
