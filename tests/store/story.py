"""A small recorded story: four ranks train, rank 2 is frozen, the job is restarted and goes on. Two minutes, the same every time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from streams.store.writer import BatchLimits, StoreWriter
from tests.store.make_records import block, catalogs, publish
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, NS_PER_S, SystemClock
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Cause,
    Delivery,
    Entity,
    EntityKind,
    Evidence,
    Gap,
    Incident,
    IncidentStatus,
    LogEvent,
    Mode,
    Placement,
    Plan,
    PlanStep,
    Reach,
    Record,
    StepReport,
    StepRow,
    Tick,
    Timeline,
    TopologyEvent,
    Verb,
    Verdict,
)
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import node_block

Line = tuple[str, bytes, Record]

JOB, CLUSTER, STEP_MS = "tiny-lm", "demo", 60.0
NODES = ("n0", "n1", "n2", "n3")
GUILTY = 2
INCIDENT = "1f0c2a9be4d07731"
LENGTH_S = 120
FAULT_S, FIRST_SIGNAL_S, VERDICT_S, DECIDED_S, ACTED_S, RESUMED_S, RECOVERED_S, CLOSED_S = (
    70,
    72,
    73.2,
    73.4,
    73.6,
    82,
    85,
    95,
)
SAVED_EVERY = 50


@dataclass(frozen=True)
class Story:
    """The story with its zero point.

    `lines` are (topic, key, record) in the order of their times.
    """

    start_ns: int
    lines: tuple[Line, ...]

    @property
    def fault_step(self) -> int:
        """First step that was not finished before the fault."""
        return int(FAULT_S * 1000 / STEP_MS)


def story(end_ns: int) -> Story:
    """The story, over at `end_ns`."""
    start_ns = end_ns - LENGTH_S * NS_PER_S
    lines = [
        *_layout(start_ns),
        *_ticks(start_ns),
        *_steps(start_ns),
        *_logs(start_ns),
        *_opinions(start_ns),
        *_actions(start_ns),
    ]
    return Story(start_ns, tuple(lines))


def fill(client: Any, told: Story) -> None:
    """Write a story into the store the way it always goes: over a bus, by the writer."""
    bus = MemoryBus()
    publish(bus, told.lines)
    writer = StoreWriter(bus, client, SystemClock(), Metrics("store"), CLUSTER, BatchLimits(age_ms=0))
    while writer.cycle():
        pass
    writer.close()


def _at(start_ns: int, seconds: float) -> int:
    return start_ns + int(seconds * 1000) * NS_PER_MS


def _layout(start_ns: int) -> list[Line]:
    ranks = tuple((rank, node, "cpu") for rank, node in enumerate(NODES))
    attempts = [TopologyEvent(cluster=CLUSTER, observed_at_ns=_at(start_ns, at_s), entity=f"job:{JOB}", origin="hook", seq=attempt,
                              valid_from_ns=_at(start_ns, at_s), attempt=attempt, ranks=ranks)
                for attempt, at_s in ((1, 0.0), (2, RESUMED_S))]  # fmt: skip
    return [
        *(("tw.catalog", c.catalog_id.encode(), c) for c in catalogs()),
        *(("tw.topology", b"job", event) for event in attempts),
    ]


def _ticks(start_ns: int) -> list[Line]:
    dice, lines = random.Random(3), list[Line]()
    for second in range(LENGTH_S):
        for rank, node in enumerate(NODES):
            frozen = rank == GUILTY and FAULT_S <= second < RESUMED_S
            standing = FAULT_S <= second < RESUMED_S
            busy = 0.05 if standing else 0.8 + dice.uniform(-0.05, 0.05)
            lines.append(("tw.ticks", node_block(node), Tick(
                cluster=CLUSTER, node=node, seq=second, observed_at_ns=_at(start_ns, second), boot_id="b",
                blocks=(
                    block("host", ["host"], [busy, 1.0 + dice.random(), 0.7, 1.0]),
                    block("process", [f"rank{rank}"], [1.0, 0.0 if standing else 0.9, 8e8, math.nan if frozen else second * 16.0]),
                    block("nic", ["eth0"], [1.0, 0.0 if standing else 2e7, 0.0 if standing else 2e7]),
                    block("mesh", [peer for peer in NODES if peer != node], [0.2, 0.3, 5.0, 0.0] * (len(NODES) - 1)),
                ),
                placements=(Placement(JOB, 1 if second < RESUMED_S else 2, rank, "cpu"),),
                gaps=(Gap("rdma", "absent"),) if second == 0 else (),
            )))  # fmt: skip
    return lines


def _steps(start_ns: int) -> list[Line]:
    dice, lines = random.Random(5), list[Line]()
    last = int(FAULT_S * 1000 / STEP_MS) - 1
    resumed_at = last - last % SAVED_EVERY + 1
    runs = [
        (1, 1, last, 0.0),
        (2, resumed_at, resumed_at + int((LENGTH_S - RESUMED_S) * 1000 / STEP_MS) - 2, RESUMED_S),
    ]
    for attempt, first, end, began_s in runs:
        for rank, node in enumerate(NODES):
            rows = tuple(
                _step(step, _at(start_ns, began_s + (step - first) * STEP_MS / 1000), dice)
                for step in range(first, end + 1)
            )
            for chunk in range(0, len(rows), 16):
                part = rows[chunk : chunk + 16]
                lines.append(("tw.steps", JOB.encode(), StepReport(
                    cluster=CLUSTER, node=node, seq=attempt * 10_000 + chunk, observed_at_ns=part[-1].started_at_ns, boot_id="b", job=JOB,
                    attempt=attempt, rank=rank, world=len(NODES), rows=part)))  # fmt: skip
    return lines


def _step(step: int, started_ns: int, dice: random.Random) -> StepRow:
    local_ms = 32.0 + dice.gauss(0, 1.5)
    saving = step % SAVED_EVERY == 0
    return StepRow(
        step=step, phase="checkpoint" if saving else "train", started_at_ns=started_ns, duration_ms=STEP_MS - 1, data_ms=2.0,
        forward_ms=12.0, backward_ms=40.0, wait_ms=54.0 - local_ms, optimizer_ms=4.0, checkpoint_ms=3.0 if saving else math.nan,
        arrived_at_ns=started_ns + int(local_ms * NS_PER_MS), loss=2.0 + 3.0 * math.exp(-step / 400), samples=32,
    )  # fmt: skip


def _logs(start_ns: int) -> list[Line]:
    events = [(RESUMED_S - 1, NODES[GUILTY], "worker_exit:-9", "warning"), (RESUMED_S, NODES[0], "restored", "info")]
    return [("tw.logs", b"b", LogEvent(cluster=CLUSTER, node=node, seq=seq, observed_at_ns=_at(start_ns, at_s), boot_id="b", source="hook",
                                       severity=severity, code=code, line=code, job=JOB, attempt=1))
            for seq, (at_s, node, code, severity) in enumerate(events)]  # fmt: skip


def _evidence(start_ns: int) -> tuple[Evidence, ...]:
    seconds = range(FAULT_S - 10, FAULT_S + 4)
    ages = tuple(0.1 if s < FAULT_S else float(s - FAULT_S) for s in seconds)
    cpu = tuple(0.9 if s < FAULT_S else 0.0 for s in seconds)
    times = tuple(_at(start_ns, s) for s in seconds)
    return (Evidence("step_age_s", "s", times, ages, high=1.2, note=f"rank {GUILTY}"),
            Evidence("cpu_cores", "cores", times, cpu, low=0.5, note=f"rank {GUILTY}, process state T (stopped)"))  # fmt: skip


def _opinions(start_ns: int) -> list[Line]:
    guilty = Entity(EntityKind.NODE, NODES[GUILTY], NODES[GUILTY])
    verdict = Verdict(
        cluster=CLUSTER, observed_at_ns=_at(start_ns, VERDICT_S), verdict_id="v-story", detector="hang", job=JOB, attempt=1,
        entity=Entity(EntityKind.RANK, str(GUILTY), NODES[GUILTY]), rank=GUILTY, kind="rank_frozen", score=1.0, confidence=0.96,
        onset_at_ns=_at(start_ns, FAULT_S), window_start_ns=_at(start_ns, FAULT_S), window_end_ns=_at(start_ns, VERDICT_S),
        reach=Reach.ACT, text="rank 2 is stopped while three ranks wait for it", evidence=_evidence(start_ns),
        victims=("rank:0", "rank:1", "rank:3"),
    )  # fmt: skip
    moments = [FAULT_S, FIRST_SIGNAL_S, VERDICT_S, DECIDED_S, ACTED_S, RECOVERED_S, CLOSED_S]
    lives = [(1, IncidentStatus.OPEN, VERDICT_S), (2, IncidentStatus.ACTING, ACTED_S), (3, IncidentStatus.RECOVERED, RECOVERED_S),
             (4, IncidentStatus.CLOSED, CLOSED_S)]  # fmt: skip
    last = int(FAULT_S * 1000 / STEP_MS) - 1
    revisions = [
        Incident(
            cluster=CLUSTER, observed_at_ns=_at(start_ns, at_s), incident_id=INCIDENT, dedup_key="a1b2c3d4e5f60718",
            revision=revision, status=status, job=JOB, attempt=1, kind="rank_frozen", severity="critical",
            title=f"{JOB} stands: rank {GUILTY} on {NODES[GUILTY]} is frozen", culprits=(guilty,), culprit_rank=GUILTY,
            victims=("rank:0", "rank:1", "rank:3"), causes=(Cause("rank_frozen", guilty, 0.96), Cause("link_down", guilty, 0.03)),
            confidence=0.96, reach=Reach.ACT, remedy=("restart",),
            timeline=Timeline(*(_at(start_ns, m) if m <= at_s else 0 for m in moments)), evidence=_evidence(start_ns),
            report=f"Rank {GUILTY} on {NODES[GUILTY]} finished step {last} and then stopped: its process is in state T and uses no CPU, "
                   "while ranks 0, 1 and 3 wait in the all-reduce. Mesh probes to the node are clean, so the network is not to blame.",
            verdict_ids=("v-story",), last_step=last, close_reason="steps advance again" if status is IncidentStatus.CLOSED else "",
        )
        for revision, status, at_s in lives
    ]  # fmt: skip
    return [("tw.verdicts", b"c", verdict), *(("tw.incidents", b"i", revision) for revision in revisions)]


def _actions(start_ns: int) -> list[Line]:
    shared: dict[str, Any] = {"cluster": CLUSTER, "incident_id": INCIDENT, "job": JOB, "plan_id": "p-story"}
    plan = Plan(observed_at_ns=_at(start_ns, DECIDED_S), incident_revision=1, attempt=1, kind="rank_frozen", mode=Mode.AUTO,
                steps=(PlanStep(Verb.RESTART, f"job:{JOB}", "k-story"),), reason="restart in place", **shared)  # fmt: skip
    rows = [(DECIDED_S, "", "", ActionStatus.PLANNED, "restart in place"), (ACTED_S, "restart", f"job:{JOB}", ActionStatus.STARTED, ""),
            (RESUMED_S, "restart", f"job:{JOB}", ActionStatus.DONE, "attempt 2"),
            (RECOVERED_S, "", "", ActionStatus.VERIFIED, "steps advance past the fault")]  # fmt: skip
    results = [ActionResult(observed_at_ns=_at(start_ns, at_s), seq=seq, key="k-story" if verb else "", verb=verb, target=target,
                            status=status, reason=reason, mode=Mode.AUTO, started_at_ns=_at(start_ns, ACTED_S) if verb else 0,
                            finished_at_ns=_at(start_ns, at_s) if status is ActionStatus.DONE else 0, **shared)
               for seq, (at_s, verb, target, status, reason) in enumerate(rows)]  # fmt: skip
    told = [Delivery(cluster=CLUSTER, observed_at_ns=_at(start_ns, at_s), seq=revision, incident_id=INCIDENT, revision=revision,
                     receiver="oncall", cause=cause, status="sent")
            for revision, cause, at_s in ((1, "first", VERDICT_S), (3, "resolved", RECOVERED_S))]  # fmt: skip
    return [("tw.actions", b"i", record) for record in (plan, *results, *told)]
