"""Records for the store's tests: what a small job says, with numbers that can be counted again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwarden.bus import Bus, Publisher
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Block,
    Catalog,
    Cause,
    DeadLetter,
    Delivery,
    Entity,
    EntityKind,
    Evidence,
    Gap,
    Incident,
    IncidentStatus,
    LogEvent,
    Metric,
    Mode,
    Placement,
    Plan,
    PlanStep,
    PolicyChange,
    Record,
    StepReport,
    StepRow,
    Tick,
    Timeline,
    TopologyEvent,
    Verb,
    Verdict,
    catalog_id_of,
    encode,
    pack_floats,
)  # fmt: skip
from trainwarden.topics import node_block

START_NS = 1_764_400_000 * NS_PER_S

FAMILIES: dict[str, tuple[str, ...]] = {
    "host": ("cpu_busy_ratio", "load1", "mem_available_ratio", "brand_new_metric"),
    "process": ("alive", "cpu_cores", "rss_bytes", "last_step"),
    "nic": ("up", "rx_bytes_per_s", "tx_bytes_per_s"),
    "mesh": ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count"),
    "gpu": ("power_w",),
}


def catalogs() -> list[Catalog]:
    """One catalogue per family."""
    found = []
    for family, names in FAMILIES.items():
        metrics = tuple(Metric(name, name.rsplit("_", 1)[-1]) for name in names)
        found.append(
            Catalog(
                cluster="c", catalog_id=catalog_id_of(family, metrics), family=family, source=family, metrics=metrics
            )
        )
    return found


_IDS = {catalog.family: catalog.catalog_id for catalog in catalogs()}


def block(family: str, devices: Sequence[str], values: Sequence[float]) -> Block:
    """A block of `family` with its true catalogue id."""
    return Block(family, _IDS[family], tuple(devices), pack_floats(values))


def tick(seq: int, node: str = "n0", rank: int = 0, peers: Sequence[str] = ("n1",)) -> Tick:
    """Tick number `seq` of a node that runs one rank; the CPU share is absent in every fifth."""
    busy = math.nan if seq % 5 == 4 else 0.5
    return Tick(
        cluster="c", node=node, seq=seq, observed_at_ns=START_NS + seq * NS_PER_S, boot_id="b",
        blocks=(
            block("host", ["host"], [busy, 1.0, 0.75, 7.0]),
            block("process", [f"rank{rank}"], [1.0, 0.9, 1e9, seq]),
            block("nic", ["eth0", "eth1"], [1.0, 10.0, 20.0, 1.0, math.nan, 40.0]),
            block("mesh", list(peers), [0.2, 0.4, 5.0, 0.0] * len(peers)),
            block("gpu", ["gpu0"], [300.0]),
        ),
        placements=(Placement("job", 1, rank, "cpu"),),
        gaps=(Gap("rdma", "absent"),) if seq % 10 == 0 else (),
    )  # fmt: skip


def steps(first: int, count: int, rank: int = 0, node: str = "n0", slow: bool = False) -> StepReport:
    """Steps of 60 ms; a slow rank computes 40 of them, the others 20 and wait for it."""
    rows = []
    for step in range(first, first + count):
        started_ns = START_NS + step * 60 * NS_PER_MS
        local_ms = 40.0 if slow else 20.0
        rows.append(StepRow(step, "train", started_ns, 60.0, 1.0, 9.0, 40.0, 50.0 - local_ms, 5.0,
                            arrived_at_ns=started_ns + int(local_ms * NS_PER_MS), loss=2.0, samples=32))  # fmt: skip
    return StepReport(cluster="c", node=node, seq=first, observed_at_ns=START_NS + (first + count) * 60 * NS_PER_MS, boot_id="b",
                      job="job", attempt=1, rank=rank, world=4, rows=tuple(rows))  # fmt: skip


def log(seq: int, code: str = "", node: str = "n0") -> LogEvent:
    """One log event."""
    return LogEvent(cluster="c", node=node, seq=seq, observed_at_ns=START_NS + seq * NS_PER_S, boot_id="b", source="train",
                    code=code, line=f"line {seq}", attributes={"exit_code": "9"}, job="job", attempt=1, rank=0)  # fmt: skip


def verdict(number: int = 0) -> Verdict:
    """A verdict about n2."""
    return Verdict(
        cluster="c", observed_at_ns=START_NS + 5 * NS_PER_S, verdict_id=f"v{number}", detector="hang", job="job", attempt=1, rank=2,
        entity=Entity(EntityKind.RANK, "2", "n2"), kind="rank_frozen", score=1.0, confidence=0.9, onset_at_ns=START_NS,
        evidence=(Evidence("step_age_s", "s", (START_NS,), (math.nan,)),), victims=("rank:0",),
    )  # fmt: skip


def incident(revision: int, status: IncidentStatus, incident_id: str = "i0") -> Incident:
    """Revision of an incident whose culprit is n2."""
    return Incident(
        cluster="c", observed_at_ns=START_NS + (6 + revision) * NS_PER_S, incident_id=incident_id, dedup_key="d0", revision=revision,
        status=status, job="job", attempt=1, kind="rank_frozen", severity="critical", title="job stands: rank 2 on n2 is frozen",
        culprits=(Entity(EntityKind.NODE, "n2"),), culprit_rank=2, victims=("rank:0", "rank:1"),
        causes=(Cause("rank_frozen", Entity(EntityKind.NODE, "n2"), 0.9),), confidence=0.9, remedy=("restart",),
        timeline=Timeline(START_NS, START_NS + NS_PER_S, START_NS + 3 * NS_PER_S, 0, START_NS + 5 * NS_PER_S,
                          START_NS + 9 * NS_PER_S if status is IncidentStatus.CLOSED else 0),
        report="Rank 2 stopped.", verdict_ids=("v0",), last_step=100,
    )  # fmt: skip


def one_of_each() -> list[tuple[str, bytes, Record]]:
    """(topic, key, record): everything that the store keeps."""
    at_ns = START_NS + 7 * NS_PER_S
    plan = Plan(cluster="c", observed_at_ns=at_ns, plan_id="p0", incident_id="i0", job="job", kind="rank_frozen",
                steps=(PlanStep(Verb.RESTART, "job:job", "k0"),), mode=Mode.AUTO, expires_at_ns=at_ns + NS_PER_S)  # fmt: skip
    action = ActionResult(cluster="c", observed_at_ns=at_ns, plan_id="p0", incident_id="i0", job="job", key="k0", verb="restart",
                          target="job:job", status=ActionStatus.DONE, mode=Mode.AUTO, started_at_ns=at_ns,
                          finished_at_ns=at_ns + NS_PER_S, detail={"attempt": "2"})  # fmt: skip
    delivery = Delivery(
        cluster="c", observed_at_ns=at_ns, incident_id="i0", receiver="oncall", cause="first", status="sent"
    )
    topology = TopologyEvent(cluster="c", observed_at_ns=at_ns, entity="job:job", origin="hook", valid_from_ns=START_NS, attempt=1,
                             ranks=((0, "n0", "cpu"), (2, "n2", "cpu")))  # fmt: skip
    return [
        *(("tw.catalog", c.catalog_id.encode(), c) for c in catalogs()),
        ("tw.ticks", node_block("n0"), tick(0)), ("tw.steps", b"job", steps(0, 4)), ("tw.logs", node_block("n0"), log(0, "xid:79")),
        ("tw.topology", b"job:job", topology), ("tw.verdicts", b"c", verdict()),
        ("tw.incidents", b"i0", incident(1, IncidentStatus.OPEN)), ("tw.incidents", b"i0", incident(2, IncidentStatus.CLOSED)),
        ("tw.actions", b"i0", plan), ("tw.actions", b"i0", action), ("tw.actions", b"i0", delivery),
        ("tw.policy", b"mode", PolicyChange(cluster="c", observed_at_ns=at_ns, key="mode", value="auto", author="me")),
        ("tw.dead", b"tw.ticks", DeadLetter(cluster="c", observed_at_ns=at_ns, topic="tw.ticks", reason="r", payload=b"\xff\x00")),
    ]  # fmt: skip


def publish(bus: Bus, records: Sequence[tuple[str, bytes, Record]], publisher: Publisher | None = None) -> None:
    """Publish and wait until the broker has all of it."""
    chosen = publisher or bus.publisher()
    for topic, key, record in records:
        chosen.publish(topic, key, encode(record))
    chosen.flush(10.0)
