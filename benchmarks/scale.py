"""A whole cluster's records through one machine: broker, worker, store and action service, and what each of them costs.

    python -m benchmarks.scale [--nodes 1250] [--minutes 3] [--broker kafka|tansu] [--json FILE]

The simulator publishes at real time (ticks, steps, logs, topology, with faults; answers in a file of their own), everything else is the
product as it ships: all detectors on, embedded store, actions in mode observe. Shown: processor time of every part per second of real time,
memory at the beginning and at the end and its growth by the hour, and two delays. From the grid point to its frame: `tw_tick_delay_ms`
of the worker itself, for every tick. From tick to verdict: for every verdict, from the moment at which the collector gave the tick it rests
on to Kafka (that node's tick at the end of what the verdict looked at; for a verdict of a job or a leaf the last tick of that second) to
the moment at which a reader of the topic has the verdict.
What rests on no tick (steps, logs) counts from the end of its window. The JSON has all of it by the minute and by the sample, and the table
says what the worst minute coincided with (`benchmarks.scale_timeline`). Exit code 1 when workers and store need more than a core together,
when either p95 is above 2 s, or when memory is not flat.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import scale_timeline as timeline
from benchmarks.collector_cost import cpu_s
from trainwarden import topics
from trainwarden.bus import Bus, Message, connect
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import DecodeError, TrainwardenError
from trainwarden.records import FrameCut, Verdict, decode
from trainwarden.selfmetrics import quantile_ms

CORE_BAR, P95_BAR_MS = 1.0, 2000.0
GROWN_BAR = 1.10
"""Memory at the end over that after the warm-up."""
WILD_CLOCK_MS = 30_000
SAMPLE_S = 5.0
LOOKED_AT_S = 300
"""Delays of verdicts are those of the last minutes: reading all ticks of half an hour again would take as long as the run's own reading."""
READY_S = 120.0
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_HAND = re.compile(r"has (\d+) of (\d+) units")


@dataclass
class Part:
    """One process: cores it used, and its memory at the beginning and at the end of the measurement."""

    name: str
    pid: int
    cpu_s: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """Note processor time and memory now."""
        self.cpu_s.append(cpu_s(self.pid))
        self.pss_mb.append(_pss_mb(self.pid))

    def growth_mb_per_hour(self, seconds: float) -> float:
        """Slope of a straight line through all samples of memory."""
        middle, every_s = (len(self.pss_mb) - 1) / 2, seconds / max(1, len(self.pss_mb) - 1)
        mean = sum(self.pss_mb) / len(self.pss_mb)
        spread = sum((i - middle) ** 2 for i in range(len(self.pss_mb))) or 1.0
        slope = sum((i - middle) * (mb - mean) for i, mb in enumerate(self.pss_mb)) / spread
        return round(slope * 3600 / every_s, 1)

    def cores(self, seconds: float) -> float:
        """Processor seconds per second."""
        return (self.cpu_s[-1] - self.cpu_s[0]) / seconds


@dataclass(frozen=True)
class Plan:
    """What to run."""

    nodes: int
    minutes: float
    warm_s: float
    broker: str
    workers: int
    faults: str
    directory: Path
    stages: int = 1


class Site:
    """The processes of one run."""

    def __init__(self, plan: Plan, address: str) -> None:
        self.plan = plan
        self.ports = [free_port() for _ in range(plan.workers)]
        self.bus: Bus = connect(f"kafka://{address}")
        self.bus.wait_ready(60.0)
        self.bus.ensure_topics(topics.needed(plan.stages))
        self._store, self._status = free_port(), free_port()
        self._address = address
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str, port: int = 0) -> Part:
        """Start a part of the product."""
        path = self.plan.directory / f"{name}.toml"
        path.write_text(self._toml(port))
        log = (self.plan.directory / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "trainwarden.cli", *words, "--config", str(path)]
        self._running.append(subprocess.Popen(command, stdout=log, stderr=log))
        return Part(name, self._running[-1].pid)

    def page(self, port: int, name: str = "metrics") -> str:
        """A worker's self-metrics, or its word on its health; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def wait_until(self, what: str, holds: Any) -> None:
        """Wait for a state of affairs."""
        deadline_s = time.monotonic() + READY_S
        while not holds():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{what}: not within {READY_S:g} s; see the logs in {self.plan.directory}")
            time.sleep(0.5)

    def close(self) -> None:
        """End everything."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
        self.bus.close()

    def _toml(self, port: int) -> str:
        folder = self.plan.directory
        secret = folder / "secret"
        secret.write_text("0" * 64)
        secret.chmod(0o600)
        return (
            f'cluster = "sim"\nrun_dir = "{folder}"\n[kafka]\nurl = "kafka://{self._address}"\n'
            f'[streams]\nweb_listen = "127.0.0.1:{port or free_port()}"\ndata_directory = "scratch-{port}"\n'
            f"stages = {self.plan.stages}\n"
            f'[store]\nurl = "clickhouse://127.0.0.1:{self._store}/trainwarden"\ndirectory = "{folder}/store"\n'
            f'[policy]\nmode = "observe"\n[actions]\nlisten = "127.0.0.1:{self._status}"\n'
            f'[backends.warden]\nsecret_file = "{secret}"\n'
        )


@contextmanager
def broker(plan: Plan) -> Iterator[tuple[str, int]]:
    """Address and process of a broker."""
    if plan.broker == "tansu":
        with TansuBroker(plan.directory / "tansu.log") as tansu:
            yield tansu.bootstrap, tansu.pid
        return
    with ApacheKafka(plan.directory / "kafka") as kafka:
        yield kafka.bootstrap, kafka.pid


def measure(plan: Plan) -> dict[str, object]:
    """Run it; returns the figures."""
    with ExitStack() as stack:
        address, pid = stack.enter_context(broker(plan))
        site = Site(plan, address)
        stack.callback(site.close)
        parts = [Part("broker", pid), site.start("store", "store"), site.start("actions", "actions")]
        parts += [site.start(f"worker{n}", "worker", port=port) for n, port in enumerate(site.ports)]
        site.wait_until("a worker answers", lambda: any(site.page(port) for port in site.ports))
        parts.append(_simulate(site))
        site.wait_until("ticks are closed", lambda: "tw_tick_age_seconds" in "".join(map(site.page, site.ports)))
        site.wait_until("every unit is at work", lambda: plan.stages == 1 or _all_dealt(site))
        time.sleep(plan.warm_s)
        listener = stack.enter_context(Listener(site.bus))
        before = [numbers(site.page(port)) for port in site.ports]
        took_s, samples = _watch(parts, 60 * plan.minutes, lambda: map(numbers, map(site.page, site.ports)))
        after = [numbers(site.page(port)) for port in site.ports]
        heard = listener.heard()
        return _result(plan, parts, took_s, before, after, verdict_delays_ms(site.bus, heard)) | _course(
            parts, samples, heard
        )


def _all_dealt(site: Site) -> bool:
    """Whether the workers of two stages have all units between them, and each has some."""
    told = [_HAND.match(site.page(port, "healthz")) for port in site.ports]
    return all(told) and sum(int(word[1]) for word in told if word) == int(told[0][2] if told[0] else -1)


def _simulate(site: Site) -> Part:
    plan = site.plan
    minutes = plan.minutes + (plan.warm_s + READY_S) / 60
    truth = str(plan.directory / "truth.json")
    words = ("--nodes", str(plan.nodes), "--minutes", f"{minutes:.2f}", "--rate", "1", "--faults", plan.faults)
    return site.start("simulator", "simulate", *words, "--kafka", "--truth", truth)


def _watch(
    parts: list[Part], seconds: float, pages: Callable[[], Iterable[timeline.Page]]
) -> tuple[float, list[timeline.Sample]]:
    """Look at everything now and then for so long; returns how long it was."""
    started_s, samples, page = time.monotonic(), list[timeline.Sample](), timeline.Page()
    while True:
        for part in parts:
            part.sample()
        gone_s = time.monotonic() - started_s
        page = timeline.together(pages()) or page  # a worker that does not answer in time says what it said before
        cpu = {part.name: part.cpu_s[-1] for part in parts}
        samples.append(timeline.Sample(gone_s, page, cpu, {part.name: part.pss_mb[-1] for part in parts}))
        if gone_s >= seconds:
            return gone_s, samples
        time.sleep(max(0.0, min(SAMPLE_S, seconds - (time.monotonic() - started_s))))


def _course(parts: list[Part], samples: list[timeline.Sample], heard: list[tuple[Verdict, int]]) -> dict[str, object]:
    """What happened when."""
    minutes, ours = (
        timeline.by_minute(samples),
        [part.name for part in parts if part.name.startswith(("worker", "store"))],
    )
    return {
        "memory_growth": {name: timeline.growth(samples, name) for name in ours},
        "worst_minute": timeline.worst(minutes), "late_by_minute": timeline.late_minutes(minutes),
        "window_to_verdict": timeline.of_window_ms(((verdict.window_end_ns, at_ns) for verdict, at_ns in heard), _quantile),
        "minutes": minutes,
        "samples": {"columns": ["at_s", "ticks", "p50_ms", "p95_ms", "late", "snapshots", *(f"{part.name}_mb" for part in parts)],
                    "rows": timeline.by_sample(samples)},
    }  # fmt: skip


def numbers(page: str) -> dict[tuple[str, str], float]:
    """Values of a metrics page by name and labels (without the component's); those of a worker's units are added up."""
    found: dict[tuple[str, str], float] = {}
    for line in page.splitlines():
        if told := _LINE.fullmatch(line):
            labels = ",".join(word for word in told[2].split(",") if not word.startswith(("component=", "unit=")))
            found[told[1], labels] = found.get((told[1], labels), 0.0) + float(told[3])
    return found


class Listener:
    """Reads the verdicts topic as they come, and notes when."""

    def __init__(self, bus: Bus) -> None:
        self._subscriber = bus.subscriber((topics.VERDICTS.name,), start="latest")
        self._heard: list[tuple[Verdict, int]] = []
        self._stop = threading.Event()
        self._broken = ""
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self.since_ns = time.time_ns()

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10.0)
        self._subscriber.close()

    def heard(self) -> list[tuple[Verdict, int]]:
        """Verdicts said since the beginning, each with the time at which it could be read."""
        if self._broken:
            raise SystemExit(f"nobody listened to the verdicts to the end: {self._broken}")
        return [pair for pair in list(self._heard) if pair[0].observed_at_ns >= self.since_ns]

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                for message in self._subscriber.poll(0.5):
                    if (record := _verdict(message.value)) is not None:
                        self._heard.append((record, time.time_ns()))
        except TrainwardenError as error:
            self._broken = str(error)


class Head(msgspec.Struct, array_like=True, tag="tick"):
    """The first fields of a tick: what it takes to find it."""

    schema: int
    cluster: str
    node: str
    seq: int
    observed_at_ns: int


class Produced:
    """When the tick of a node and second was given to Kafka, for those of the last minutes."""

    def __init__(self, bus: Bus) -> None:
        self._of_node: dict[tuple[str, int], int] = {}
        self._last: dict[int, int] = {}
        decoder, subscriber = msgspec.msgpack.Decoder(Head), bus.subscriber((topics.TICKS.name,))
        subscriber.seek_to(_positions(bus, time.time_ns() - LOOKED_AT_S * NS_PER_S))
        while batch := subscriber.poll(2.0):
            for message in batch:
                self._note(decoder.decode(message.value), message)
        subscriber.close()
        self.first_ns = NS_PER_S * min(self._last, default=0)

    def _note(self, head: Head, message: Message) -> None:
        second = (head.observed_at_ns + NS_PER_S // 4) // NS_PER_S
        self._of_node[head.node, second] = message.timestamp_ms
        if abs(message.timestamp_ms - 1000 * second) > WILD_CLOCK_MS:
            return  # its clock is off: it says nothing about anybody else's second
        self._last[second] = max(message.timestamp_ms, self._last.get(second, 0))

    def before(self, verdict: Verdict) -> float:
        """Milliseconds: when what the verdict rests on was there."""
        second, beside_ns = divmod(verdict.window_end_ns, NS_PER_S)
        node = verdict.entity.node or verdict.entity.name
        if beside_ns or second not in self._last:
            return verdict.window_end_ns / NS_PER_MS
        return float(self._of_node.get((node, second), self._last[second]))

    def lateness_ms(self) -> list[float]:
        """From the grid point to the moment at which its last tick was given to Kafka: what the simulator itself was late."""
        return sorted(at_ms - 1000.0 * second for second, at_ms in self._last.items())


def _positions(bus: Bus, since_ns: int) -> dict[str, int]:
    """Where the ticks topic stood at the first cut after a moment."""
    subscriber, found = bus.subscriber((topics.CUTS.name,)), dict[str, int]()
    while not found and (batch := subscriber.poll(2.0)):
        cuts = (decode(message.value) for message in batch)
        found = next((cut.positions for cut in cuts if isinstance(cut, FrameCut) and cut.now_ns >= since_ns), {})
    subscriber.close()
    return {place: offset for place, offset in found.items() if place.startswith(f"{topics.TICKS.name}/")}


@dataclass(frozen=True)
class Delays:
    """Sorted milliseconds: of verdicts, and of the last tick of each second."""

    verdicts_ms: list[float]
    ticks_ms: list[float]


def verdict_delays_ms(bus: Bus, heard: list[tuple[Verdict, int]]) -> Delays:
    """From tick to verdict, over the verdicts whose ticks are still looked at."""
    produced = Produced(bus)
    recent = ((verdict, at_ns) for verdict, at_ns in heard if verdict.window_end_ns >= produced.first_ns)
    delays = sorted(at_ns / NS_PER_MS - produced.before(verdict) for verdict, at_ns in recent)
    return Delays(delays, produced.lateness_ms())


def _verdict(payload: bytes) -> Verdict | None:
    try:
        record = decode(payload)
    except DecodeError:
        return None
    return record if isinstance(record, Verdict) else None


def _result(
    plan: Plan,
    parts: list[Part],
    took_s: float,
    before: list[dict[tuple[str, str], float]],
    after: list[dict[tuple[str, str], float]],
    delays: Delays,
) -> dict[str, object]:
    grown = {
        key: sum(page.get(key, 0.0) for page in after) - sum(page.get(key, 0.0) for page in before)
        for key in {key for page in after for key in page}
    }
    ours = [part for part in parts if part.name.startswith(("worker", "store"))]
    detectors = {
        labels.removeprefix('detector="').rstrip('"'): round(value / took_s, 2)
        for (name, labels), value in grown.items()
        if name == "tw_detector_ms_sum"
    }
    buckets = {
        float(labels.split('"')[1]): value
        for (name, labels), value in grown.items()
        if name == "tw_tick_delay_ms_bucket"
    }
    return {
        "plan": {key: str(value) for key, value in asdict(plan).items() if key != "directory"}, "seconds": round(took_s, 1),
        "parts": {part.name: {"cores": round(part.cores(took_s), 3), "pss_mb": [part.pss_mb[0], part.pss_mb[-1]]} for part in parts},
        "workers_and_store_cores": round(sum(part.cores(took_s) for part in ours), 3),
        "memory_mb_per_hour": {part.name: part.growth_mb_per_hour(took_s) for part in ours},
        "memory_ratio": round(max(part.pss_mb[-1] / max(part.pss_mb[0], 1.0) for part in ours), 3),
        "records_per_s": {labels: round(value / took_s, 1) for (name, labels), value in grown.items() if name == "tw_records_total"},
        "ticks_per_s": round(buckets.get(float("inf"), 0.0) / took_s, 2),
        "tick_delay_p50_ms": quantile_ms(buckets, 0.5), "tick_delay_p95_ms": quantile_ms(buckets, 0.95),
        "tick_delay_p99_ms": quantile_ms(buckets, 0.99),
        "simulator_late_p50_ms": _quantile(delays.ticks_ms, 0.5), "simulator_late_p95_ms": _quantile(delays.ticks_ms, 0.95),
        "verdicts": len(delays.verdicts_ms), "verdict_delay_p50_ms": _quantile(delays.verdicts_ms, 0.5),
        "verdict_delay_p95_ms": _quantile(delays.verdicts_ms, 0.95), "verdict_delay_worst_ms": _quantile(delays.verdicts_ms, 1.0),
        "frame_ms_per_s": round(sum(v for (name, _), v in grown.items() if name == "tw_frame_ms_sum") / took_s, 1),
        "detector_ms_per_s": dict(sorted(detectors.items(), key=lambda item: -item[1])),
        "late": sum(v for (name, _), v in grown.items() if name == "tw_ticks_late_total"),
        "dead_letters": sum(v for (name, _), v in grown.items() if name == "tw_dead_letters_total"),
    }  # fmt: skip


def _quantile(values: list[float], share: float) -> float | None:
    return round(values[min(len(values) - 1, int(share * len(values)))], 1) if values else None


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['plan']['nodes']} nodes for {result['seconds']} s on {result['plan']['broker']}: {result['records_per_s']}"
    ]
    lines += [
        f"{name:12} {row['cores']:6.3f} cores  {row['pss_mb'][0]:7.0f} -> {row['pss_mb'][1]:7.0f} MB"
        for name, row in result["parts"].items()
    ]
    lines.append(f"workers and store together {result['workers_and_store_cores']:.3f} cores (bar {CORE_BAR:g}), "
                 f"memory at most x {result['memory_ratio']:.3f} (bar {GROWN_BAR:g}), "
                 f"by the hour {result['memory_mb_per_hour']} MB")  # fmt: skip
    lines.append(f"grid point to frame: p50 {result['tick_delay_p50_ms']} p95 {result['tick_delay_p95_ms']} "
                 f"p99 {result['tick_delay_p99_ms']} ms "
                 f"(bar p95 {P95_BAR_MS:g}); {result['ticks_per_s']} ticks/s")  # fmt: skip
    lines.append(
        f"tick to verdict, {result['verdicts']} of them: p50 {result['verdict_delay_p50_ms']} p95 {result['verdict_delay_p95_ms']} "
        f"worst {result['verdict_delay_worst_ms']} ms (bar p95 {P95_BAR_MS:g}); a second's last tick was on Kafka "
        f"{result['simulator_late_p50_ms']} ms after its grid point, p95 {result['simulator_late_p95_ms']}"
    )
    lines.append(f"detectors {result['frame_ms_per_s']} ms a second: {result['detector_ms_per_s']}")
    lines.append(f"late {result['late']:g}, dead letters {result['dead_letters']:g}")
    lines += timeline.lines(result)
    return "\n".join(lines)


def holds(result: dict[str, Any]) -> bool:
    """Whether the bars hold."""
    p95s_ms = [result["tick_delay_p95_ms"], result["verdict_delay_p95_ms"]]
    return bool(
        result["workers_and_store_cores"] < CORE_BAR
        and all(p95_ms is not None and p95_ms < P95_BAR_MS for p95_ms in p95s_ms)
        and result["memory_ratio"] < GROWN_BAR
    )


def _pss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return round(next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024, 1)


@contextmanager
def _folder(kept: Path | None) -> Iterator[str]:
    if kept is not None:
        kept.mkdir(parents=True)
        yield str(kept)
        return
    with tempfile.TemporaryDirectory(prefix="tw-scale-", ignore_cleanup_errors=True) as folder:
        yield folder


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument(
        "--warm-seconds", type=float, default=60.0, help="detectors allocate and learn before the clock runs"
    )
    parser.add_argument("--broker", choices=("kafka", "tansu"), default="kafka")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="of one stage one leads and the others stand by; of two they share the units",
    )
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument("--faults", default="mix:6")
    parser.add_argument(
        "--directory", type=Path, default=None, help="a new directory for logs and data, kept; default: a temporary one"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    given = parser.parse_args()
    with _folder(given.directory) as folder:
        plan = Plan(
            given.nodes,
            given.minutes,
            given.warm_seconds,
            given.broker,
            given.workers,
            given.faults,
            Path(folder),
            given.stages,
        )
        result = measure(plan)
    print(table(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not holds(result))


if __name__ == "__main__":
    sys.exit(main())
