"""Several real workers that share the units of two-stage detection, a cluster in real time, and what they said: for tests on Kafka."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from streams.service import BusWorker, read_all
from streams.units import units
from tests.streams.synthetic import START_NS, Cluster
from trainwarden.bus import Message, connect
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import Config, load
from trainwarden.embedded.ports import free_port
from trainwarden.records import FrameCut, LogEvent, Record, Summary, Verdict, decode, encode
from trainwarden.topics import CUTS, RAW, SUMMARIES, TICKS, needed

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""A failure, not an expectation."""
NODES = tuple(f"n{number:02d}" for number in range(12))
Placed = tuple[str, int, Any]


@dataclass
class Worker:
    """A process and the port of its pages."""

    port: int
    log: Path
    process: subprocess.Popen[bytes]

    def page(self, name: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{name}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def units(self) -> list[str]:
        """What it has, once it is at work."""
        _, _, names = self.page("healthz").strip().partition(": ")
        return names.split(", ") if names else []


class Staged:
    """Workers, and a cluster whose records lie on full seconds of the wall clock."""

    def __init__(self, directory: Path, bootstrap: str) -> None:
        self.directory = directory
        self.bootstrap = bootstrap
        self.workers: list[Worker] = []
        self.cluster = Cluster(nodes=NODES)
        self.config = self._config(free_port())[1]
        self.bus = connect(self.config.kafka)
        self.bus.ensure_topics(needed(2))
        self.publisher = self.bus.publisher()
        self.sent: set[tuple[str, int]] = set()
        self._second = 0
        self._last_s = 0

    def _config(self, port: int) -> tuple[Path, Config]:
        path = self.directory / f"worker-{port}.toml"
        path.write_text(
            f'cluster = "c"\nrun_dir = "{self.directory / f"run-{port}"}"\n[kafka]\nurl = "kafka://{self.bootstrap}"\n'
            f'[streams]\nstages = 2\nsnapshot_s = 2\nweb_listen = "127.0.0.1:{port}"\n'
        )
        return path, load(path)

    def start(self) -> Worker:
        port = free_port()
        path, _ = self._config(port)
        log = self.directory / f"worker-{port}.log"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "tests.streams.words", str(path)]
            worker = Worker(port, log, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out))
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait(30)
        self.publisher.close()
        self.bus.close()

    # --- time passes --------------------------------------------------------------------------------------------------

    def until(self, what: str, holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Wait, in silence."""
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {limit_s} s\n{self._said()}"
            time.sleep(0.1)

    def live_until(self, what: str, holds: Callable[[], bool]) -> None:
        """The cluster goes on speaking, once a second, until `holds`; it speaks at least once."""
        deadline = time.monotonic() + LIMIT_S
        self.live(1)
        while not holds():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s\n{self._said()}"
            self.live(1)

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            at_s = max(int(time.time()) + 1, self._last_s + 1)
            while time.time() < at_s:
                time.sleep(0.02)
            self._speak(at_s)

    def _speak(self, at_s: int) -> None:
        shift_ns = at_s * NS_PER_S - START_NS - self._second * NS_PER_S
        placed = list(self.cluster.second(self._second))
        if not self._last_s:
            placed = [*self.cluster.announcements(), *placed]
        # what ranks did is on the broker before the tick that closes the second
        self._put([p for p in placed if p[0] != TICKS.name], shift_ns)
        self._put([p for p in placed if p[0] == TICKS.name], shift_ns)
        self.sent |= {(record.node, at_s) for topic, _, record in placed if topic == TICKS.name}
        self._second, self._last_s = self._second + 1, at_s

    def _put(self, placed: list[Placed], shift_ns: int) -> None:
        for topic, _, record in placed:
            fields = {name: getattr(record, name) for name in record.__struct_fields__}
            if fields["observed_at_ns"]:
                fields["observed_at_ns"] += shift_ns
            self.publisher.publish(topic, record.node.encode(), encode(type(record)(**fields)))
        self.publisher.flush(60)

    def kill_rank(self, rank: int) -> None:
        """A worker of the job dies, and its collector says so."""
        node = NODES[rank]
        event = LogEvent(
            node=node, seq=1, boot_id="b1", observed_at_ns=time.time_ns(), source="hook", severity="error", code="worker_exit:-9",
            attributes={"rank": str(rank), "pid": "1", "exit_code": "-9", "generation": "1"}, job="j", attempt=1, rank=rank,
        )  # fmt: skip
        self.publisher.publish("tw.events", node.encode(), encode(event))
        self.publisher.flush(60)

    def forget(self, *topics: str) -> None:
        """Delete topics, and make them again empty."""
        admin = KafkaAdminClient(bootstrap_servers=[self.bootstrap], request_timeout_ms=60_000)
        try:
            admin.delete_topics(list(topics))
            self.until("the broker has forgotten", lambda: not set(topics) & set(admin.list_topics()))
        finally:
            admin.close()
        self.bus.ensure_topics(needed(2))

    # --- what is there ------------------------------------------------------------------------------------------------

    def have_all(self, *workers: Worker) -> bool:
        """Whether these have all units between them, and each has some."""
        hands = [worker.units() for worker in workers]
        return all(hands) and sorted(name for hand in hands for name in hand) == sorted(unit.name for unit in units())

    def messages(self, topic: str) -> list[Message]:
        """Everything on a topic up to its end now, by partition."""
        consumer = KafkaConsumer(bootstrap_servers=[self.bootstrap], enable_auto_commit=False)
        try:
            partitions = [
                TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())
            ]
            consumer.assign(partitions)
            consumer.seek_to_beginning()
            ends = consumer.end_offsets(partitions)
            found: list[Message] = []
            deadline = time.monotonic() + LIMIT_S
            while any(consumer.position(p) < ends[p] for p in partitions):
                assert time.monotonic() < deadline, f"{topic} cannot be read to its end"
                found.extend(
                    Message(r.topic, r.partition, r.offset, r.key or b"", r.value or b"", r.timestamp)
                    for records in consumer.poll(timeout_ms=200).values()
                    for r in records
                )
            return found
        finally:
            consumer.close()

    def records(self, topic: str) -> Iterator[Record]:
        return (decode(message.value) for message in self.messages(topic))

    def opinions(self) -> dict[str, bytes]:
        """Verdicts of the detectors by identity; what was said again must have been said in the same words."""
        return unique(self.messages("tw.verdicts"))

    def heard_until(self) -> int:
        """The newest grid point, in seconds, that every share has looked at."""
        newest: dict[str, int] = defaultdict(int)
        for share, words in self.words().items():
            newest[share] = max(words, default=0)
        return min(newest.values(), default=0) // NS_PER_S if len(newest) == 5 else 0

    def words(self) -> dict[str, dict[int, str]]:
        """What each share saw of each grid point."""
        found: dict[str, dict[int, str]] = {}
        for payload in self.opinions().values():
            verdict = decode(payload)
            if verdict.kind == "threshold":
                at_ns, ticks, _ = verdict.text.split(":")
                if int(at_ns):
                    found.setdefault(verdict.detector, {})[int(at_ns)] = ticks
        return found

    def cuts(self) -> dict[str, list[int]]:
        """Numbers of each unit's cuts, in the order of the topic."""
        found: dict[str, list[int]] = {}
        for cut in self.records("tw.cuts"):
            assert isinstance(cut, FrameCut)
            found.setdefault(cut.node, []).append(cut.seq)
        return found

    def assert_nothing_lost(self, woken: bool = False) -> None:
        """Every tick that was sent is in a summary, every cut is there once, and all shares saw the same of every grid point. A worker that
        was `woken` in the middle of a send may have put a cut beside its successor's, with the same number."""
        present = {
            (node, summary.at_ns // NS_PER_S)
            for summary in self.records("tw.summaries")
            if isinstance(summary, Summary)
            for node, there in zip(summary.nodes, summary.present, strict=True)
            if there
        }
        assert not self.sent - present, "ticks that nobody looked at"
        cuts = {name: list(dict.fromkeys(numbers)) if woken else numbers for name, numbers in self.cuts().items()}
        assert sorted(cuts) == sorted(unit.name for unit in units())
        assert {name: numbers for name, numbers in cuts.items() if numbers != list(range(1, len(numbers) + 1))} == {}
        words = self.words()
        assert len(words) == 5
        for seen in words.values():
            assert {at_s for _, at_s in self.sent} <= {at_ns // NS_PER_S for at_ns in seen}
        for at_ns in {at_ns for seen in words.values() for at_ns in seen}:
            assert len({seen[at_ns] for seen in words.values() if at_ns in seen}) == 1, "two shares saw two things"

    def retold_by_one(self) -> dict[str, bytes]:
        """What one worker with all units says of the same records, cut as they were."""
        bus = MemoryBus(SimulatedClock(time.time_ns()))
        for topic in (*RAW, SUMMARIES, CUTS):
            for message in self.messages(topic.name):
                log = bus.partitions(topic.name)[message.partition]
                assert message.offset == len(log)
                log.append(message)
        crew = [BusWorker(self.config, bus, bus.clock, "retold", unit=unit) for unit in units()]
        assert all(worker.stage.catching_up for worker in crew)
        for worker in crew:
            for _ in range(100):  # it reads so many thousand records at once
                worker.step()
            assert not worker.stage.catching_up, "recorded cuts cannot be repeated"
        return unique(read_all(bus, "tw.verdicts"))

    def _said(self) -> str:
        return "\n".join(f"--- {w.log.name}: {w.page('healthz')}{w.log.read_text()[-2500:]}" for w in self.workers)


def unique(messages: list[Message]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for message in messages:
        verdict = decode(message.value)
        if isinstance(verdict, Verdict) and verdict.detector != "own_health":
            assert found.setdefault(verdict.verdict_id, message.value) == message.value, "one verdict, two contents"
    return found


def stopped(*workers: Worker) -> None:
    for worker in workers:
        worker.process.send_signal(signal.SIGTERM)
    for worker in workers:
        assert worker.process.wait(60) == 0, worker.log.read_text()[-3000:]
