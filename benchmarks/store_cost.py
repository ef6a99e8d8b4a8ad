"""What the store costs for each second of a cluster, by part, and beside another checkout over the same messages.

    python -m benchmarks.store_cost [--nodes 1250] [--seconds 48] [--batch-s 10] [--beside CHECKOUT] [--rounds 2] [--json FILE]

A simulated cluster's messages (ticks, steps, logs, topology, with faults) are written to a file once. A process for each round takes them
from memory into a real embedded store: its own checkout and, with `--beside`, another one take turns (as it is in a directory, say of `git
archive`). Shown: milliseconds of processor time, engine's threads included, for each second of the cluster: decoding, making columns, the
journal, inserts as the writer's thread sees them (`client`; the engine's own work is in it where no HTTP lies between), the writer's rest,
the engine's other threads with the merges that they made meanwhile, and merges until none runs any more. Reading from a broker is not in it
but for parsing what a broker sends (`fetch`: batches of `--fetch-batch` messages, lz4); `benchmarks.hops` has the whole of it.

Both checkouts must hold the same in the end: rows of every table of ticks, steps and logs, a hash of those of one node in sixteen, and what
the roll-ups count. Exit code 1 when they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import msgspec

PARTS = ("fetch", "decode", "columns", "journal", "client", "writer", "engine", "merges after", "all")
HASHED = (
    "host_ticks", "process_ticks", "nic_ticks", "mesh_ticks", "gpu_ticks", "port_ticks", "board_ticks", "other_ticks", "gaps", "steps",
    "log_events",
)  # fmt: skip
ROLLED = ("host_1m", "process_1m", "nic_1m", "steps_1m")
MERGES_LIMIT_S = 120.0
WARM_S = 8
Message = tuple[str, bytes, bytes]
Spent = defaultdict[str, float]


def record(path: Path, nodes: int, count: int, faults: str) -> None:
    """Write the messages of so many seconds to a file."""
    from benchmarks._stream import seconds

    start_ns = time.time_ns() // 10**9 * 10**9
    with path.open("wb") as file:
        for second in seconds(nodes, count, faults, start_ns=start_ns):
            packed = msgspec.msgpack.encode([(one.topic, one.key, one.value) for one in second])
            file.write(len(packed).to_bytes(4, "big") + packed)


def recorded(path: Path) -> Iterator[list[Message]]:
    """The messages, second by second."""
    decoder = msgspec.msgpack.Decoder(list[Message])
    with path.open("rb") as file:
        while size := file.read(4):
            yield decoder.decode(file.read(int.from_bytes(size, "big")))


class Parts:
    """Processor time of the writer's thread by part; wraps methods of the writer's objects."""

    def __init__(self) -> None:
        self.spent_s: Spent = defaultdict(float)

    def of(self, owner: Any, method: str, part: str, inside: str = "") -> None:
        """Count every call of that method; what is spent there does not count as `inside`, the part that calls it."""
        setattr(owner, method, self._counted(getattr(owner, method), part, inside))

    def _counted(self, act: Callable[..., Any], part: str, inside: str) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            began_s = thread_time()
            try:
                return act(*given, **named)
            finally:
                spent_s = thread_time() - began_s
                self.spent_s[part] += spent_s
                self.spent_s[inside] -= spent_s

        return counted


def threads_s() -> Spent:
    """Processor seconds of this process's threads so far, by name."""
    found: Spent = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[(task / "comm").read_text().strip()] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


class Feed:
    """One writer on one new store, fed from memory by a clock that this object moves."""

    def __init__(self, server: Any, batch_s: float, parts: Parts, start_ns: int) -> None:
        from streams.store.service import prepare
        from streams.store.writer import BatchLimits, StoreWriter
        from trainwarden.bus.memory import MemoryBus
        from trainwarden.clock import SimulatedClock
        from trainwarden.selfmetrics import Metrics

        client = prepare(f"{server.url}/bench")
        self.client = server.direct(client) if hasattr(server, "direct") else client  # a checkout from before that way
        self._clock = SimulatedClock(start_ns)
        self._bus = MemoryBus(self._clock)
        self._writer = StoreWriter(
            self._bus, self.client, self._clock, Metrics("store"), "sim", BatchLimits(int(1000 * batch_s), 10**9)
        )
        inserter = self._writer._inserter
        parts.of(inserter, "_tables", "columns")
        parts.of(inserter, "_insert_table", "client")
        parts.of(self._writer._journal, "write", "journal")
        self.parts = parts

    def take(self, second: list[Message]) -> float:
        """A second's messages; returns the processor seconds of everything but laying them on the bus."""
        for topic, key, value in second:
            self._bus.append(topic, key, value)
        self._clock.advance_ns(10**9)
        return self._counted(self._writer.cycle)

    def end(self) -> float:
        """Write the rest."""
        return self._counted(self._writer.drain)

    def _counted(self, act: Callable[[], int]) -> float:
        began_s, mine_s = process_time(), thread_time()
        act()
        self.parts.spent_s["writer"] += thread_time() - mine_s
        return process_time() - began_s


def merges_s(client: Any) -> float:
    """Processor seconds until no merge runs."""
    began_s, deadline_s, quiet = process_time(), time.monotonic() + MERGES_LIMIT_S, 0
    while quiet < 4 and time.monotonic() < deadline_s:
        running = client.query("SELECT count() FROM system.merges").result_rows[0][0]
        quiet = 0 if running else quiet + 1
        time.sleep(0.5)
    if quiet < 4:
        raise SystemExit(
            f"merges still ran after {MERGES_LIMIT_S:g} s: what they cost is not known, and no figure is printed"
        )
    return process_time() - began_s


def run(path: Path, seconds: int, batch_s: float, pace: float, fetch_batch: int) -> dict[str, Any]:
    """One round of the checkout that this process imports."""
    from streams.store import inserts
    from streams.store.chdb_server import ChdbServer

    with contextlib.suppress(ImportError):  # a checkout from before
        from streams.cycles import collect_rarely

        collect_rarely()  # as the service does
    parts = Parts()
    parts.of(inserts, "decode_or_dead", "decode", "columns")
    with (
        tempfile.TemporaryDirectory(prefix="tw-store-cost-", ignore_cleanup_errors=True) as folder,
        ChdbServer(Path(folder), port=0) as server,
    ):
        feed = Feed(server, batch_s, parts, int(path.stat().st_mtime) * 10**9)
        all_s, count, before = 0.0, 0, threads_s()
        for number, second in enumerate(islice(recorded(path), WARM_S + seconds)):
            if number == WARM_S:
                feed.end()
                parts.spent_s.clear()
                all_s, before, began_s = 0.0, threads_s(), time.monotonic()
            elif number > WARM_S and pace:
                time.sleep(max(0.0, began_s + (number - WARM_S) / pace - time.monotonic()))
            all_s += feed.take(second)
            count += number >= WARM_S
        all_s += feed.end()
        parts.spent_s["merges after"] = merges_s(feed.client)
        threads = {name: spent_s - before[name] for name, spent_s in threads_s().items()}
        held = contents(feed.client)
        return {"ms_per_s": _shares(parts.spent_s, all_s, count, fetch_ms_per_s(path, fetch_batch)), "held": held,
                "threads_ms_per_s": {name: round(1000 * spent_s / count, 1) for name, spent_s in threads.items()}}  # fmt: skip


def _shares(spent_s: Spent, all_s: float, count: int, fetch_ms: float) -> dict[str, float]:
    python = ("decode", "columns", "journal", "client")
    found = {part: 1000 * spent_s[part] / count for part in (*python, "writer", "merges after")}
    found["engine"] = 1000 * all_s / count - found["writer"]
    found["writer"] -= sum(found[part] for part in python)
    found |= {"fetch": fetch_ms, "all": 1000 * (all_s + spent_s["merges after"]) / count + fetch_ms}
    return {part: round(found[part], 1) for part in PARTS if part in found}


def contents(client: Any) -> dict[str, list[Any]]:
    """What the store holds, for comparing."""
    found = {}
    for table in HASHED:
        (count,) = client.query(f"SELECT count() FROM {table}").result_rows[0]
        every = "sum(cityHash64(* APPLY(x -> ifNull(toString(x), 'absent'))))"
        (checksum,) = client.query(f"SELECT {every} FROM {table} WHERE cityHash64(node) % 16 = 0").result_rows[0]
        found[table] = [count, checksum]
    for table in ROLLED:
        columns = [row[0] for row in client.query(f"DESCRIBE TABLE {table}").result_rows]
        exact = ", ".join(name for name in columns if not name.endswith("_sum") and name != "minute")
        sums = " + ".join(f"ifNull(sum({name}), 0)" for name in columns if name.endswith("_sum")) or "0"
        asked = f"SELECT count(), sum(cityHash64(minute, {exact})), {sums} FROM {table} FINAL"
        count, checksum, total = client.query(asked).result_rows[0]
        found[table] = [count, checksum, float(f"{total:.9g}")]
    return found


def fetch_ms_per_s(path: Path, size: int) -> float:
    """Parsing what a broker sends, as the bus's subscriber does, for each second of some."""
    from kafka.consumer.fetcher import Fetcher
    from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder
    from kafka.structs import TopicPartition

    from trainwarden.bus import Message as Read
    from trainwarden.bus import kafka as ours

    unpack = getattr(ours, "PartitionRecords", None)
    packed, count = [], 0
    for second in recorded(path):
        if (count := count + 1) > WARM_S:
            break
        for first in range(0, len(second), size):
            builder = MemoryRecordsBuilder(2, 3, 1 << 24)
            for _, key, value in second[first : first + size]:
                builder.append(timestamp=1, key=key, value=value, headers=[])
            builder.close()
            packed.append(bytes(builder.buffer()))
    began_s, place = process_time(), TopicPartition("t", 0)
    for batch in packed:
        if unpack is not None:
            unpack(0, place, MemoryRecords(batch)).take()
            continue
        for r in Fetcher.PartitionRecords(0, place, MemoryRecords(batch)).take():
            Read(r.topic, r.partition, r.offset, r.key or b"", r.value or b"", r.timestamp)
    return 1000 * (process_time() - began_s) / WARM_S


def one(checkout: Path, path: Path, given: argparse.Namespace, batch_s: float) -> dict[str, Any]:
    """A round of a checkout, in a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--one", str(path), "--batch-s", str(batch_s)]
    done = subprocess.run(
        [*command, "--pace", str(given.pace), "--fetch-batch", str(given.fetch_batch), "--seconds", str(given.seconds)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the round of {checkout} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, by checkout."""
    here = Path(__file__).resolve().parents[1]
    ways = {"here": (here, given.batch_s)}
    if given.beside:
        ways = {"beside": (given.beside.resolve(), given.beside_batch_s or given.batch_s)} | ways
    with tempfile.TemporaryDirectory(prefix="tw-store-stream-") as folder:
        path = given.stream or Path(folder) / "stream"
        if not path.exists():
            record(path, given.nodes, WARM_S + given.seconds, given.faults)
        rounds = [
            {way: one(*where[:1], path, given, where[1]) for way, where in ways.items()} for _ in range(given.rounds)
        ]
    held = [row[way]["held"] for row in rounds for way in ways]
    return {
        "nodes": given.nodes, "seconds": given.seconds, "rounds": given.rounds, "pace": given.pace,
        "batch_s": {way: where[1] for way, where in ways.items()},
        "ms_per_s": {way: _medians([row[way]["ms_per_s"] for row in rounds]) for way in ways},
        "threads_ms_per_s": {way: rounds[-1][way]["threads_ms_per_s"] for way in ways},
        "ratios": [round(row["here"]["ms_per_s"]["all"] / row["beside"]["ms_per_s"]["all"], 3) for row in rounds] if given.beside else [],
        "different": sorted({table for one in held for table in one if one[table] != held[0][table]}), "held": held[0],
    }  # fmt: skip


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {part: round(statistics.median(row[part] for row in rows), 1) for part in rows[0]}


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    ways = result["ms_per_s"]
    head = f"{result['nodes']} nodes, {result['seconds']} s, {result['rounds']} rounds"
    columns = [f"{way}, batches of {result['batch_s'][way]:g} s" for way in ways]
    lines = [
        f"{head}; milliseconds of a core for a second of the cluster",
        f"{'part':16}" + "".join(f" {name:>24}" for name in columns),
    ]
    lines += [
        f"{part:16}" + "".join(f" {ways[way][part]:24.1f}" for way in ways) for part in PARTS if part in ways["here"]
    ]
    lines += [f"threads of {way}: {found}" for way, found in result["threads_ms_per_s"].items()]
    if result["ratios"]:
        rows = sum(one[0] for one in result["held"].values())
        same = f"DIFFERENT: {result['different']}" if result["different"] else f"both hold the same {rows} rows"
        lines.append(f"ratio by round: {result['ratios']}; {same}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=int, default=48)
    parser.add_argument("--batch-s", type=float, default=10.0)
    parser.add_argument("--beside", type=Path, default=None, help="another checkout")
    parser.add_argument("--beside-batch-s", type=float, default=None, help="its batches; default: as here")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of the cluster in one; 0: as fast as it goes")
    parser.add_argument("--faults", default="mix:6")
    parser.add_argument("--fetch-batch", type=int, default=5, help="messages in one batch of the producer")
    parser.add_argument("--stream", type=Path, default=None, help="recorded messages; made there when missing")
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    parser.add_argument("--one", type=Path, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(run(given.one, given.seconds, given.batch_s, given.pace, given.fetch_batch)))
        return 0
    result = measure(given)
    print(table(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(result["different"]))


if __name__ == "__main__":
    sys.exit(main())
