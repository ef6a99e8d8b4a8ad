"""How many events a second go through correlation (verdicts in, incidents out), and how many log events through the log path.

    python -m benchmarks.correlation [--seconds 20] [--rate 5000] [--json FILE]

The worker's own stages are called directly with encoded messages, ten times a second of simulated time as in production, over a cluster
of 1,250 nodes in ten jobs. Each mix is offered at `--rate`; shown is what one core sustains (events by processor time), and what came out.

* `storm`: one switch fails: 40 nodes of a job are accused by probes, codes and stragglers, again each second;
* `noise`: levels and trends of any node, said and taken back, none of which may open an incident;
* `many`: 200 nodes in trouble of their own at once, with and without a job;
* `mixed`: 60 % noise, 25 % storm, 10 % many, 5 % messages that were there before;
* `logs`: log events of all nodes, one in a thousand with a fatal code, through decoding, alignment and all detectors.

Exit code 1 when a mix of verdicts stays below 5,000 a second. With a broker, and whether a burst drains: `benchmarks.burst`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

from detectors.base import Frame
from streams.detect import Pipeline
from streams.stage import CorrelatorStage, RawStage
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.records import (
    Entity,
    EntityKind,
    Incident,
    LogEvent,
    Reach,
    TopologyEvent,
    Verdict,
    decode,
    encode,
    stable_id,
)
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import INCIDENTS, LOGS, VERDICTS
from trainwarden.topology import Topology

BAR_PER_S = 5000.0
NODES, JOBS, STRUCK, ALONE = 1250, 10, 40, 200
TICKS_PER_S = 10
WARM_S = 1
"""Not counted: detectors are looked up, and the storm is new."""
START_NS = 1_764_400_000 * NS_PER_S
CONFIG = from_table({"cluster": "bench"})
STORM = (("link_down", "mesh_links"), ("node_lost", "hang"), ("link_slow", "mesh_links"), ("compute_slow", "straggler"))
QUIET = (("threshold", "dynamic_threshold"), ("unusual", "series_residual"), ("stale_series", "stale_series"))
LONELY = (("device_state", "device_states"), ("recurring_code", "recurring_codes"), ("link_slow", "mesh_links"))
Source = Callable[[int, random.Random], Verdict]


def node_name(number: int) -> str:
    return f"n{number:05d}"


def job_of(number: int) -> str:
    """Every tenth node is in no job."""
    return "" if number % 10 == 9 else f"job{number * JOBS // NODES}"


def topology() -> Topology:
    """Nodes with leaves, and the jobs on them."""
    made = Topology()
    for number in range(NODES):
        name, facts = node_name(number), {"leaf": f"leaf{number // STRUCK}", "rack": f"rack{number // 8}"}
        made.apply(TopologyEvent(entity=f"node:{name}", origin="scheduler", valid_from_ns=START_NS, attributes=facts))
        if job := job_of(number):
            ranks = tuple((8 * number + gpu, name, f"gpu{gpu}") for gpu in range(8))
            made.apply(TopologyEvent(entity=f"job:{job}", origin="scheduler", valid_from_ns=START_NS, ranks=ranks))
    return made


def verdict(
    said: tuple[str, str], number: int, at_ns: int, reach: Reach, begun_ns: int = START_NS, clears: bool = False
) -> Verdict:
    """What a detector would say of a node at `at_ns`."""
    kind, detector = said
    entity = Entity(EntityKind.NODE, node_name(number))
    return Verdict(
        cluster="bench", observed_at_ns=at_ns, verdict_id=stable_id(kind, detector, entity, at_ns, clears), detector=detector, kind=kind,
        job=job_of(number), entity=entity, score=5.0, confidence=0.9, onset_at_ns=begun_ns, window_start_ns=begun_ns,
        window_end_ns=at_ns, reach=reach, text=f"{kind} of {entity}", clears=clears,
    )  # fmt: skip


def storm(at_ns: int, dice: random.Random) -> Verdict:
    """Of the failed switch's nodes."""
    return verdict(dice.choice(STORM), dice.randrange(STRUCK), at_ns, Reach.ACT)


def noise(at_ns: int, dice: random.Random) -> Verdict:
    """Of any node, a third of it taken back."""
    return verdict(dice.choice(QUIET), dice.randrange(NODES), at_ns, Reach.CORRELATE, at_ns, dice.random() < 0.33)


def many(at_ns: int, dice: random.Random) -> Verdict:
    """Of nodes that are in trouble by themselves."""
    return verdict(dice.choice(LONELY), 300 + 4 * dice.randrange(ALONE), at_ns, Reach.NOTIFY)


@dataclass
class Mixed:
    """A day with everything."""

    _last: Verdict | None = None

    def __call__(self, at_ns: int, dice: random.Random) -> Verdict:
        """The next one."""
        share = dice.random()
        if share < 0.05 and self._last is not None:
            return self._last
        self._last = (noise if share < 0.65 else storm if share < 0.90 else many)(at_ns, dice)
        return self._last


@dataclass
class Outcome:
    """What a mix cost and what it came to."""

    mix: str
    events: int = 0
    cpu_s: float = 0.0
    incidents: set[str] = field(default_factory=set)
    revisions: int = 0
    slowest_tick_ms: float = 0.0

    def spent(self, seconds: float) -> None:
        """A tick took so long."""
        self.cpu_s += seconds
        self.slowest_tick_ms = max(self.slowest_tick_ms, 1000 * seconds)

    def row(self) -> dict[str, Any]:
        """For tables and JSON."""
        return {
            "mix": self.mix, "events": self.events,
            "per_s": round(self.events / self.cpu_s), "us": round(1e6 * self.cpu_s / self.events, 1),
            "slowest_tick_ms": round(self.slowest_tick_ms, 1), "incidents": len(self.incidents), "revisions": self.revisions,
        }  # fmt: skip


def messages(source: Source, rate: int, seconds: int) -> Iterator[tuple[int, list[Message]]]:
    """(time, encoded verdicts) of each tick."""
    dice, offset = random.Random(7), 0
    for tick in range(seconds * TICKS_PER_S):
        at_ns, batch = START_NS + tick * NS_PER_S // TICKS_PER_S, []
        for number in range(rate // TICKS_PER_S):
            # verdicts of one tick differ in their window, as those of different frames do
            value = encode(source(at_ns + number * NS_PER_MS // 100, dice))
            batch.append(Message(VERDICTS.name, 0, offset, b"bench", value, at_ns // NS_PER_MS))
            offset += 1
        yield at_ns, batch


def correlate(mix: str, source: Source, rate: int, seconds: int) -> Outcome:
    """A mix through the correlator's stage: decoding and encoding are part of it."""
    clock, picture, outcome = SimulatedClock(START_NS), topology(), Outcome(mix)
    stage = CorrelatorStage(CONFIG, clock, Metrics("worker"))
    for at_ns, batch in messages(source, rate, seconds + WARM_S):
        clock.advance_ns(max(0, at_ns - clock.now_ns()))
        if at_ns == START_NS + WARM_S * NS_PER_S:
            outcome = Outcome(mix, incidents=outcome.incidents, revisions=outcome.revisions)
        began_s = process_time()
        stage.correlator.on_frame(Frame(at_ns, (), (), (), picture))
        for message in batch:
            stage.take(message)
        told = stage.tick()
        outcome.spent(process_time() - began_s)
        outcome.events += len(batch)
        for output in told:
            if output.topic == INCIDENTS.name and isinstance(record := decode(output.value), Incident):
                outcome.incidents.add(record.incident_id)
                outcome.revisions += 1
    return outcome


def log_event(number: int, at_ns: int) -> LogEvent:
    """Log event `number` of the burst."""
    code, node = ("xid:79" if number % 1000 == 999 else ""), node_name(number % NODES)
    return LogEvent(cluster="bench", node=node, seq=number // NODES, observed_at_ns=at_ns, boot_id="b", source="dmesg", severity="warning",
                    code=code, line=f"worker {number}: retry of block {number % 977} after {number % 13} ms", template_id="t1",
                    attributes={"block": str(number % 977)})  # fmt: skip


def logs(rate: int, seconds: int) -> Outcome:
    """Log events through the worker's first stage."""
    clock, outcome = SimulatedClock(START_NS), Outcome("logs")
    stage = RawStage(CONFIG, Pipeline(CONFIG), clock, "bench")
    count = rate // TICKS_PER_S
    for tick in range(seconds * TICKS_PER_S):
        clock.advance_ns(NS_PER_S // TICKS_PER_S)
        numbers = range(tick * count, (tick + 1) * count)
        batch = [
            Message(LOGS.name, 0, n, b"b", encode(log_event(n, clock.now_ns())), clock.now_ns() // NS_PER_MS)
            for n in numbers
        ]
        began_s = process_time()
        stage.take(batch)
        result = stage.cut(clock.now_ns())
        outcome.spent(process_time() - began_s)
        outcome.events += len(result.frame.logs) if result.frame is not None else 0
        outcome.revisions += len(result.verdicts)
    if outcome.events != count * seconds * TICKS_PER_S:
        raise SystemExit(
            f"{count * seconds * TICKS_PER_S - outcome.events} log events of {count * seconds * TICKS_PER_S} are in no frame"
        )
    return outcome


def measure(rate: int, seconds: int) -> list[dict[str, Any]]:
    """A row for each mix."""
    mixes: dict[str, Source] = {"storm": storm, "noise": noise, "many": many, "mixed": Mixed()}
    rows = [correlate(mix, source, rate, seconds).row() for mix, source in mixes.items()]
    return [*rows, logs(10 * rate, max(1, seconds // 10)).row()]


def table(rows: list[dict[str, Any]], rate: int) -> str:
    """The result for people."""
    lines = [f"offered {rate} verdicts a second over {NODES} nodes; what one core sustains:"]
    lines.append(
        f"{'mix':8} {'events':>8} {'a second':>9} {'us each':>8} {'slowest tick ms':>16} {'incidents':>10} {'revisions':>10}"
    )
    lines += [
        f"{row['mix']:8} {row['events']:8d} {row['per_s']:9d} {row['us']:8.1f} {row['slowest_tick_ms']:16.1f} {row['incidents']:10d} "
        f"{row['revisions']:10d}"
        for row in rows
    ]
    lines.append(f"bar {BAR_PER_S:.0f} verdicts a second; of logs, revisions are verdicts about them")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=20, help="of simulated time, for each mix")
    parser.add_argument("--rate", type=int, default=5000, help="verdicts offered a second")
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    given = parser.parse_args()
    rows = measure(given.rate, given.seconds)
    print(table(rows, given.rate))
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": rows, "bar_per_s": BAR_PER_S}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["per_s"] < BAR_PER_S for row in rows if row["mix"] != "logs"))


if __name__ == "__main__":
    sys.exit(main())
