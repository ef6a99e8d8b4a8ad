"""Collectors that lie: what three of many put on the topics beside the truth that the others tell."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from collectors.simulated.encode import Encoder
from collectors.simulated.families import FAMILIES, columns
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from streams.service import BusWorker, read_all
from streams.units import units
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import Config, from_table
from trainwarden.records import (
    Block,
    DeadLetter,
    Incident,
    LogEvent,
    Reach,
    Record,
    StepReport,
    Tick,
    Verdict,
    decode,
    encode,
)

Forge = Callable[["Scene", Record], Iterator[Record]]
"""What a liar adds for each true record that it can see; the true one is published all the same."""


@dataclass(frozen=True)
class Scene:
    """Who lies about whom."""

    liars: tuple[str, ...]
    victim: str
    begin_ns: int = 0
    own_boot: str = ""
    """Boot id of the first liar's own collector."""

    def header(self, of: Record, node: str) -> dict[str, Any]:
        """A record's header, spoken in somebody's name."""
        return {"node": node, "boot_id": f"forged{self.liars[0]}", "seq": of.seq}


def with_values(block: Block, values: dict[str, float]) -> Block:
    """The block with some columns of every device overwritten."""
    flat, names = array("f"), columns(block.family)
    flat.frombytes(block.values)
    width = len(FAMILIES[block.family].metrics)
    for name, value in values.items():
        flat[names[name] :: width] = array("f", [value] * len(block.devices))
    return replace(block, values=flat.tobytes())


SICK: dict[str, dict[str, float]] = {
    "nic": {"carrier": 0.0},
    "gpu": {
        "ecc_uncorrectable_count": 9.0,
        "xid_last": 79.0,
        "temp_c": 104.0,
        "row_remap_failure": 1.0,
        "sm_clock_mhz": 300.0,
    },
    "mesh": {"lost_count": 4.0, "sent_count": 4.0, "rtt_ms": math.nan, "rtt_max_ms": math.nan},
}


def sick_ticks(scene: Scene, record: Record) -> Iterator[Record]:
    """The victim's own ticks again, with everything broken, in the victim's name."""
    if isinstance(record, Tick) and record.node == scene.victim:
        blocks = tuple(with_values(block, SICK.get(block.family, {})) for block in record.blocks)
        yield replace(
            record,
            blocks=blocks,
            observed_at_ns=record.observed_at_ns + NS_PER_MS,
            **scene.header(record, scene.victim),
        )


def accusing_probes(scene: Scene, record: Record) -> Iterator[Record]:
    """Each liar says that it probes the victim: for ten seconds with answers, so that it is believed, and then without any."""
    if not isinstance(record, Tick) or record.node not in scene.liars:
        return
    believed = record.observed_at_ns < scene.begin_ns + 10 * NS_PER_S
    answered = {"rtt_ms": 0.05, "rtt_max_ms": 0.06, "sent_count": 4.0, "lost_count": 0.0}
    blocks = tuple(_probing(block, scene.victim, answered if believed else SICK["mesh"]) for block in record.blocks)
    yield replace(record, blocks=blocks)


def _probing(block: Block, victim: str, told: dict[str, float]) -> Block:
    """The block with one more probe, if it is one of probes."""
    if block.family != "mesh":
        return block
    rows = [(device, row) for device, row in block.rows() if device != victim]
    mine = [told.get(metric.name, math.nan) for metric in FAMILIES["mesh"].metrics]
    values = array("f", [value for row in (*(row for _, row in rows), mine) for value in row])
    return replace(block, devices=(*(device for device, _ in rows), victim), values=values.tobytes())


def slow_steps(scene: Scene, record: Record) -> Iterator[Record]:
    """The steps of the victim's ranks again, computing three times as long, said by a liar in its own name or in the victim's."""
    if isinstance(record, StepReport) and record.node == scene.victim:
        rows = tuple(
            replace(row, forward_ms=3 * row.forward_ms, backward_ms=3 * row.backward_ms, wait_ms=1.0)
            for row in record.rows
        )
        yield replace(record, rows=rows, **scene.header(record, scene.victim))
        mine = {
            "node": scene.liars[0],
            "boot_id": scene.own_boot,
            "seq": record.seq + 1_000_000 + 100_000 * (record.rank % 8),
        }
        yield replace(record, rows=rows, **mine)


def dire_logs(scene: Scene, record: Record) -> Iterator[Record]:
    """Words that end a node's service, in the victim's name."""
    if isinstance(record, Tick) and record.node == scene.victim:
        for number, code in enumerate(("xid:79", "xid:48", "worker_exit:-9")):
            header = scene.header(record, scene.victim)
            placement = record.placements[0] if record.placements else None
            yield LogEvent(
                cluster=record.cluster,
                **{**header, "seq": 3 * header["seq"] + number},
                observed_at_ns=record.observed_at_ns,
                source="kernel",
                severity="critical",
                code=code,
                line=code,
                job=placement.job if placement else "",
                attempt=placement.attempt if placement else 0,
                rank=placement.rank if placement else -1,
            )


FORGERIES: dict[str, Forge] = {"ticks": sick_ticks, "probes": accusing_probes, "steps": slow_steps, "logs": dire_logs}


TOPIC_OF: dict[type[Record], str] = {Tick: "tw.ticks", StepReport: "tw.steps", LogEvent: "tw.events"}


@dataclass
class Told:
    """What the worker made of truth and lies."""

    liars: frozenset[str]
    victims: frozenset[str]
    truly_sick: str
    forged: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    last_words: LogEvent | None = None

    def is_due(self, tick: Tick, at_ns: int) -> bool:
        """Whether it is time for the sick node to say so."""
        return tick.node == self.truly_sick and tick.observed_at_ns >= at_ns and bool(tick.placements)

    def acted_on(self) -> set[str]:
        """Nodes that would be acted on."""
        return {c.node or c.name for i in self.incidents if i.reach is Reach.ACT for c in i.culprits}


ELSEWHERE = b"a key of the forger's choice"


def workers(config: Config, bus: MemoryBus, clock: SimulatedClock, stages: int) -> list[BusWorker]:
    """Who detects: one worker, or all units of two stages."""
    return [BusWorker(config, bus, clock, unit=unit) for unit in (units() if stages == 2 else (None,))]


def perform(spec: Spec, forgeries: Iterable[str], begin_s: int, length_s: int, stages: int = 1) -> Told:
    """A cluster of which three collectors lie from `begin_s` on, each forgery about a node of its own; one node is sick in truth."""
    simulator = build(spec, "none", float(length_s))
    encoder, names = Encoder(simulator), simulator.layout.names
    liars = tuple(names[len(names) * share // 8] for share in (1, 3, 6))
    others = [name for name in names if name not in liars]
    begin_ns = spec.start_ns + begin_s * NS_PER_S
    scenes = {forgery: Scene(liars, victim, begin_ns) for forgery, victim in zip(forgeries, others, strict=False)}
    told = Told(frozenset(liars), frozenset(scene.victim for scene in scenes.values()), others[len(scenes)])
    clock = SimulatedClock(spec.start_ns)
    bus = MemoryBus(clock)
    publisher = bus.publisher()
    config = from_table({"cluster": spec.cluster, "streams": {"snapshot_s": 100_000}})
    crew = workers(config, bus, clock, stages)
    boots: dict[str, str] = {}
    for interval in simulator.intervals(length_s):
        for sent in encoder.messages(interval):
            record = decode(sent.value)
            boots.setdefault(record.node, record.boot_id)
            lies = _lies(scenes, boots, record) if interval.at_s >= begin_s else []
            told.forged += len(lies)
            for said in _instead(record, lies):
                key = sent.key if said.node == record.node and said.boot_id == record.boot_id else ELSEWHERE
                publisher.publish(TOPIC_OF.get(type(said), sent.topic), key, encode(said))
            if told.last_words is None and isinstance(record, Tick) and told.is_due(record, begin_ns + 10 * NS_PER_S):
                told.last_words = _last_words(record)
                publisher.publish("tw.events", sent.key, encode(told.last_words))
        for _ in range(stages):  # what the first stage says is heard by the second
            clock.advance_ns(NS_PER_S // stages)
            for worker in crew:
                worker.step()
    told.verdicts, told.incidents, told.dead = (
        [decode(message.value) for message in read_all(bus, topic)]
        for topic in ("tw.verdicts", "tw.incidents", "tw.dead")
    )
    return told


def _instead(record: Record, lies: list[Record]) -> list[Record]:
    """What is published: a liar's own tick is replaced by what it says instead, others only get company."""
    same = any((lie.node, lie.boot_id, lie.seq) == (record.node, record.boot_id, record.seq) for lie in lies)
    return lies if same else [record, *lies]


def _lies(scenes: dict[str, Scene], boots: dict[str, str], record: Record) -> list[Record]:
    return [
        lie
        for forgery, scene in scenes.items()
        for lie in FORGERIES[forgery](dataclasses.replace(scene, own_boot=boots.get(scene.liars[0], "")), record)
    ]


def _last_words(tick: Tick) -> LogEvent:
    placed = tick.placements[0]
    return LogEvent(cluster=tick.cluster, node=tick.node, boot_id=tick.boot_id, seq=10_000, observed_at_ns=tick.observed_at_ns,
                    source="kernel", severity="critical", code="xid:79", line="xid 79", job=placed.job, attempt=placed.attempt,
                    rank=placed.rank)  # fmt: skip
