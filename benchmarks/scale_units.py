"""What the units of two-stage detection cost, beside one worker that does it all, on the same simulated cluster; and whether they agree.

    python -m benchmarks.scale_units [--nodes 256] [--seconds 120] [--faults mix:4] [--json FILE]

All on the memory bus and a simulated clock, so that what is timed is processor time of the units alone, without broker and client. Printed:
milliseconds per simulated second of each unit, the gain of 2, 4 and 8 workers over one (all units' time over that of the worker with the
most: what a second worker is worth), the overhead of two stages against one, and how many findings (detector, kind, entity) both say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import process_time

from collectors.simulated.encode import Encoder
from collectors.simulated.run import build
from collectors.simulated.spec import START_NS, Spec
from streams.service import BusWorker, read_all
from streams.units import dealt, units
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, SimulatedClock
from trainwarden.config import from_table
from trainwarden.records import Verdict, decode

STEP_MS = 250
AFTER_S = 4
WARM_S = 20
GAIN_BAR = 1.7
CONFIG = from_table({"cluster": "sim", "streams": {"snapshot_s": 1_000_000}})
Finding = tuple[str, str, str]


def measure(nodes: int, seconds: int, faults: str, seed: int = 0) -> dict[str, object]:
    """Cost of each unit and of the whole, in milliseconds per second; agreement of their findings."""
    work = units()
    alone, staged = MemoryBus(SimulatedClock(START_NS)), MemoryBus(SimulatedClock(START_NS))
    whole = BusWorker(CONFIG, alone, alone.clock, "whole")
    crew = [BusWorker(CONFIG, staged, staged.clock, "unit", unit=unit) for unit in work]
    costs = {unit.role.owner: 0.0 for unit in work} | {"whole": 0.0}
    for second, sent in enumerate(_seconds(nodes, seconds, faults, seed)):
        for topic, key, value in sent:
            alone.append(topic, key, value)
            staged.append(topic, key, value)
        for _ in range(1000 // STEP_MS):
            _advance((alone, staged))
            # blocks before those who wait for them
            for name, worker in (("whole", whole), *((w.stage.role.owner, w) for w in reversed(crew))):
                started_s = process_time()
                worker.step()
                costs[name] += (process_time() - started_s) if second >= WARM_S else 0.0
    timed_s = seconds + AFTER_S - WARM_S
    per_s = {name: round(1000 * cost_s / timed_s, 2) for name, cost_s in costs.items()}
    return _result(nodes, seconds, per_s, _findings(alone), _findings(staged))


def _seconds(nodes: int, seconds: int, faults: str, seed: int) -> Iterable[list[tuple[str, bytes, bytes]]]:
    simulator = build(Spec(nodes=nodes, seed=seed), faults, float(seconds))
    encoder = Encoder(simulator)
    for interval in simulator.intervals(seconds):
        yield [(message.topic, message.key, message.value) for message in encoder.messages(interval)]
    for _ in range(AFTER_S):
        yield []


def _advance(buses: Sequence[MemoryBus]) -> None:
    for bus in buses:
        assert isinstance(bus.clock, SimulatedClock)
        bus.clock.advance_ns(STEP_MS * NS_PER_MS)


def _findings(bus: MemoryBus) -> set[Finding]:
    verdicts = (decode(message.value) for message in read_all(bus, "tw.verdicts"))
    return {(v.detector, v.kind, str(v.entity)) for v in verdicts if isinstance(v, Verdict) and not v.clears}


def _result(
    nodes: int, seconds: int, per_s: dict[str, float], alone: set[Finding], staged: set[Finding]
) -> dict[str, object]:
    whole = per_s.pop("whole")
    total = sum(per_s.values())
    gains = {}
    for workers in (2, 4, 8):
        hands = [sum(per_s[unit.role.owner] for unit in hand) for hand in dealt(units(), workers)]
        gains[workers] = round(total / max(hands), 2)
    return {
        "nodes": nodes, "seconds": seconds, "whole_ms_per_s": whole, "units_ms_per_s": per_s, "total_ms_per_s": round(total, 2),
        "overhead": round(total / whole, 2), "gain": gains,
        "findings": {"both": len(alone & staged), "one_stage_only": sorted(alone - staged), "two_stages_only": sorted(staged - alone)},
    }  # fmt: skip


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--faults", default="mix:4")
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    given = parser.parse_args()
    if given.seconds <= WARM_S:
        parser.error(f"--seconds: {given.seconds} found, expected more than the {WARM_S} s of warm-up")
    result = measure(given.nodes, given.seconds, given.faults)
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    gain = result["gain"]
    assert isinstance(gain, dict)
    return int(gain[2] < GAIN_BAR)


if __name__ == "__main__":
    sys.exit(main())
