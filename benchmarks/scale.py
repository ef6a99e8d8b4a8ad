"""A whole cluster's records through one machine: broker, worker, store and action service, and what each of them costs.

    python -m benchmarks.scale [--nodes 1250] [--minutes 3] [--broker kafka|tansu] [--json FILE]

The simulator publishes at real time (ticks, steps, logs, topology, with faults; answers in a file of their own), everything else is the
product as it ships: all detectors on, embedded store, actions in mode observe. Shown: processor time of every part per second of real time,
memory at the beginning and at the end, the delay from a grid point to its frame (p50, p95, worst: `tw_tick_delay_ms` of the worker itself)
and from a tick to the verdict about it on the topic. Exit code 1 when workers and store need more than a core together, when the delay's
p95 is above 2 s, or when memory is not flat.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.collector_cost import cpu_s
from trainwarden import topics
from trainwarden.bus import Bus, connect
from trainwarden.clock import NS_PER_MS
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import DecodeError
from trainwarden.records import Verdict, decode
from trainwarden.selfmetrics import quantile_ms

CORE_BAR, P95_BAR_MS = 1.0, 2000.0
GROWN_BAR = 1.10
"""Memory at the end over that after the warm-up."""
SAMPLE_S = 5.0
READY_S = 120.0
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")


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


class Site:
    """The processes of one run."""

    def __init__(self, plan: Plan, address: str) -> None:
        self.plan = plan
        self.ports = [free_port() for _ in range(plan.workers)]
        self.bus: Bus = connect(f"kafka://{address}")
        self.bus.wait_ready(60.0)
        self.bus.ensure_topics(topics.ALL)
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

    def page(self, port: int) -> str:
        """A worker's self-metrics; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
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
        time.sleep(plan.warm_s)
        before = [numbers(site.page(port)) for port in site.ports]
        took_s = _watch(parts, 60 * plan.minutes)
        after = [numbers(site.page(port)) for port in site.ports]
        return _result(plan, parts, took_s, before, after, verdict_delays_ms(site.bus, took_s))


def _simulate(site: Site) -> Part:
    plan = site.plan
    minutes = plan.minutes + (plan.warm_s + READY_S) / 60
    truth = str(plan.directory / "truth.json")
    words = ("--nodes", str(plan.nodes), "--minutes", f"{minutes:.2f}", "--rate", "1", "--faults", plan.faults)
    return site.start("simulator", "simulate", *words, "--kafka", "--truth", truth)


def _watch(parts: list[Part], seconds: float) -> float:
    started_s = time.monotonic()
    while True:
        for part in parts:
            part.sample()
        gone_s = time.monotonic() - started_s
        if gone_s >= seconds:
            return gone_s
        time.sleep(min(SAMPLE_S, seconds - gone_s))


def numbers(page: str) -> dict[tuple[str, str], float]:
    """Values of a metrics page by name and labels (without the component's)."""
    found = {}
    for line in page.splitlines():
        if told := _LINE.fullmatch(line):
            labels = ",".join(word for word in told[2].split(",") if not word.startswith("component="))
            found[told[1], labels] = float(told[3])
    return found


def verdict_delays_ms(bus: Bus, last_s: float) -> list[float]:
    """From the end of what a verdict looked at to its place on the topic, of the verdicts published in the last seconds."""
    subscriber, since_ms, found = bus.subscriber((topics.VERDICTS.name,)), (time.time() - last_s) * 1000, []
    while batch := subscriber.poll(2.0):
        for message in batch:
            if message.timestamp_ms >= since_ms and (record := _verdict(message.value)) is not None:
                found.append(message.timestamp_ms - record.window_end_ns / NS_PER_MS)
    subscriber.close()
    return sorted(found)


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
    verdicts_ms: list[float],
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
        "plan": {key: str(value) for key, value in asdict(plan).items()}, "seconds": round(took_s, 1),
        "parts": {part.name: {"cores": round(part.cores(took_s), 3), "pss_mb": [part.pss_mb[0], part.pss_mb[-1]]} for part in parts},
        "workers_and_store_cores": round(sum(part.cores(took_s) for part in ours), 3),
        "memory_ratio": round(max(part.pss_mb[-1] / max(part.pss_mb[0], 1.0) for part in ours), 3),
        "records_per_s": {labels: round(value / took_s, 1) for (name, labels), value in grown.items() if name == "tw_records_total"},
        "ticks_per_s": round(buckets.get(float("inf"), 0.0) / took_s, 2),
        "tick_delay_p50_ms": quantile_ms(buckets, 0.5), "tick_delay_p95_ms": quantile_ms(buckets, 0.95),
        "tick_delay_p99_ms": quantile_ms(buckets, 0.99),
        "verdicts": len(verdicts_ms),
        "verdict_delay_p50_ms": _quantile(verdicts_ms, 0.5), "verdict_delay_p95_ms": _quantile(verdicts_ms, 0.95),
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
                 f"memory at most x {result['memory_ratio']:.3f} (bar {GROWN_BAR:g})")  # fmt: skip
    lines.append(f"grid point to frame: p50 {result['tick_delay_p50_ms']} p95 {result['tick_delay_p95_ms']} "
                 f"p99 {result['tick_delay_p99_ms']} ms "
                 f"(bar p95 {P95_BAR_MS:g}); {result['ticks_per_s']} ticks/s")  # fmt: skip
    lines.append(
        f"{result['verdicts']} verdicts, delay p50 {result['verdict_delay_p50_ms']} p95 {result['verdict_delay_p95_ms']} ms"
    )
    lines.append(f"detectors {result['frame_ms_per_s']} ms a second: {result['detector_ms_per_s']}")
    lines.append(f"late {result['late']:g}, dead letters {result['dead_letters']:g}")
    return "\n".join(lines)


def holds(result: dict[str, Any]) -> bool:
    """Whether the bars hold."""
    p95_ms = result["tick_delay_p95_ms"]
    return bool(
        result["workers_and_store_cores"] < CORE_BAR
        and p95_ms is not None
        and p95_ms < P95_BAR_MS
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
    parser.add_argument("--workers", type=int, default=1, help="one leads, the others stand by")
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
        )
        result = measure(plan)
    print(table(result))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not holds(result))


if __name__ == "__main__":
    sys.exit(main())
