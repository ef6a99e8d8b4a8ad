"""The real Faust application in a process of its own, on real brokers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streams.reading import read_all
from streams.recording import Recorder
from streams.replay import RECORDED, copy, replay_recording
from tests.streams.fingerprint import Detectors, Fingerprint
from tests.streams.synthetic import Cluster
from trainwarden.bus import Bus, Message, connect
from trainwarden.config import Config, from_table, load
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import BusError
from trainwarden.records import DeadLetter, FrameCut, Incident, IncidentStatus, LogEvent, Verdict, decode, encode

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class Site:
    """A broker's address, a cluster in real time on it, and worker processes."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory = directory
        self.config_path = directory / "trainwarden.toml"
        self.web_port = free_port()
        self.config_path.write_text(
            f'cluster = "c"\nrun_dir = "{directory}"\n[kafka]\nurl = "kafka://{address}"\n'
            f'[streams]\nsnapshot_s = 2\nweb_listen = "127.0.0.1:{self.web_port}"\n'
        )
        self.config: Config = load(self.config_path)
        self.bus: Bus = connect(self.config.kafka.url)
        self.cluster = Cluster()
        self.workers: list[subprocess.Popen[bytes]] = []
        self.second = 0
        self.publisher: Any = None

    def start_worker(self, web_port: int | None = None) -> subprocess.Popen[bytes]:
        path = self.config_path
        if web_port is not None:
            path = self.directory / f"second-{web_port}.toml"
            path.write_text(self.config_path.read_text().replace(str(self.web_port), str(web_port)))
        with (self.directory / f"worker{len(self.workers)}.log").open("wb") as out:
            command = [sys.executable, "-m", "tests.streams.fingerprint", str(path)]
            self.workers.append(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out))
        return self.workers[-1]

    def log(self, number: int = 0) -> str:
        return (self.directory / f"worker{number}.log").read_text()

    def page(self, name: str, port: int | None = None) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.web_port}/{name}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def wait(self, what: str, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < deadline, (
                f"{what}: not within {patience_s} s; the worker said:\n{self.log(len(self.workers) - 1)[-3000:]}"
            )
            time.sleep(0.1)

    def wait_leading(self) -> None:
        self.wait("a worker leads", lambda: self.page("healthz") == "leads\n")

    def announce(self) -> None:
        self.publisher = self.publisher or self.bus.publisher()
        self.put(*self.cluster.announcements())

    def put(self, *placed: tuple[str, int, Any]) -> None:
        for topic, _, record in placed:
            self.publisher.publish(topic, record.node.encode(), encode(record))
        self.publisher.flush(PATIENCE_S)

    def live(self, seconds: int) -> None:
        """The cluster in real time, its clock set so that START + second is now."""
        shift_ns = time.time_ns() - next(iter(self.cluster.second(self.second)))[2].observed_at_ns
        for _ in range(seconds):
            self.put(*(shifted(placed, shift_ns) for placed in self.cluster.second(self.second)))
            self.second += 1
            time.sleep(1.0)

    def on(self, topic: str) -> list[Any]:
        return [decode(message.value) for message in self.messages(topic)]

    def messages(self, topic: str) -> list[Message]:
        """What is on a topic now."""
        return asyncio.run(read_all(self.config, topic))

    def settled(self, topic: str) -> list[Message]:
        """All of a topic that nobody writes any more: a broker that is slow to hand out the rest looks like its end."""
        found, before = self.messages(topic), -1
        while len(found) != before:
            before, found = len(found), self.messages(topic)
        return found

    def deaths(self) -> list[Incident]:
        """Incidents of a killed rank; that ours is behind, or that the cluster has fallen silent meanwhile, is no part of a story here."""
        incidents = [i for i in self.on("tw.incidents") if isinstance(i, Incident)]
        return [incident for incident in incidents if incident.kind == "rank_killed"]

    def record(self) -> Path:
        """A recording of all that the worker was given and said, once it has stopped."""
        with Recorder(self.directory / "recording") as recorder:
            for topic in RECORDED:
                copy(self.settled(topic.name), recorder)
        return self.directory / "recording"

    def cuts(self) -> list[FrameCut]:
        return [cut for cut in self.on("tw.cuts") if isinstance(cut, FrameCut)]

    def all_cuts(self) -> list[FrameCut]:
        """Of workers that have stopped."""
        records = [decode(message.value) for message in self.settled("tw.cuts")]
        return [cut for cut in records if isinstance(cut, FrameCut)]

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait(PATIENCE_S)
        if self.publisher is not None:
            self.publisher.close()
        self.bus.close()


def shifted(placed: tuple[str, int, Any], shift_ns: int) -> tuple[str, int, Any]:
    topic, partition, record = placed
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return topic, partition, type(record)(**{**fields, "observed_at_ns": record.observed_at_ns + shift_ns})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with TansuBroker(tmp_path / "tansu.log") as broker:
        found = Site(tmp_path, broker.bootstrap)
        yield found
        found.close()


def unique(messages: list[Message]) -> list[bytes]:
    verdicts = [decode(message.value) for message in messages]
    return list({v.verdict_id: encode(v) for v in verdicts if isinstance(v, Verdict)}.values())


def killed(site: Site, node: str = "n2", rank: int = 2) -> tuple[str, int, LogEvent]:
    attributes = {"rank": str(rank), "pid": "1", "exit_code": "-9", "generation": "1"}
    return ("tw.events", 0, LogEvent(node=node, seq=1, boot_id="b1", observed_at_ns=time.time_ns(), source="hook", severity="error",
                                     code="worker_exit:-9", attributes=attributes, job="j", attempt=1, rank=rank))  # fmt: skip


@pytest.mark.slow
def test_from_records_to_an_incident_over_the_death_of_a_worker_and_a_replay_that_says_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor goes on without loss and without a second voice; one who reads the recording later says what both said."""
    site.start_worker()
    site.wait_leading()
    site.announce()
    site.live(6)
    site.publisher.publish("tw.ticks", b"x", b"junk")
    site.put(killed(site))
    site.wait("an incident", lambda: bool(site.deaths()))
    before = site.deaths()[-1]
    assert (before.culprits[0].node, before.culprit_rank) == ("n2", 2)
    site.wait("the dead letter", lambda: bool(site.on("tw.dead")))
    assert [letter.topic for letter in site.on("tw.dead") if isinstance(letter, DeadLetter)] == ["tw.ticks"]
    counted = 'tw_dead_letters_total{component="worker",topic="tw.ticks"} 1'
    site.wait("its count", lambda: counted in site.page("metrics"))

    site.workers[0].kill()
    site.workers[0].wait(PATIENCE_S)
    successor = site.start_worker()
    site.wait_leading()
    count = len(site.cuts())
    site.live(2)
    site.wait("new cuts", lambda: len(site.cuts()) > count)
    site.wait("the correlator's word", lambda: "correlator took 1 open incidents over" in site.log(1))
    successor.send_signal(signal.SIGTERM)
    assert successor.wait(PATIENCE_S) == 0
    cuts = site.all_cuts()
    assert [cut.seq for cut in cuts] == list(range(1, len(cuts) + 1)), site.log(1)
    said = site.settled("tw.verdicts")
    records = [decode(message.value) for message in said]
    prints = [v for v in records if isinstance(v, Verdict) and v.detector == "fingerprint"]
    assert len({v.verdict_id for v in prints}) == len({encode(v) for v in prints}) == len(cuts)
    assert {i.incident_id for i in site.deaths()} == {before.incident_id}

    recording = site.record()
    monkeypatch.setattr("streams.detect.registry", lambda: Detectors(Fingerprint, real=True))
    told = replay_recording(recording, site.config)
    assert [encode(verdict) for verdict in told.verdicts] == unique(said)


@pytest.mark.slow
def test_second_worker_stands_by_and_takes_over(site: Site) -> None:
    other_port = free_port()
    site.start_worker()
    site.wait_leading()
    site.announce()
    site.start_worker(other_port)
    ports = (site.web_port, other_port)

    def voices() -> list[str]:
        return [site.page("healthz", port) for port in ports]

    site.wait("the second answers", lambda: voices()[1] in ("stands by\n", "leads\n"))
    site.live(3)
    # it may be dealt the lead when it joins, and the lead is on its way for a moment
    site.wait("one leads, one stands by", lambda: sorted(voices()) == ["leads\n", "stands by\n"])
    site.wait("a cut", lambda: bool(site.cuts()))
    leader = voices().index("leads\n")
    site.workers[leader].send_signal(signal.SIGTERM)
    assert site.workers[leader].wait(PATIENCE_S) == 0
    before = {cut.boot_id for cut in site.all_cuts()}
    site.wait("the other leads", lambda: voices()[1 - leader] == "leads\n")
    site.live(2)
    site.wait("its cuts", lambda: bool({cut.boot_id for cut in site.cuts()} - before))
    site.workers[1 - leader].send_signal(signal.SIGTERM)
    assert site.workers[1 - leader].wait(PATIENCE_S) == 0
    cuts = site.all_cuts()
    assert [cut.seq for cut in cuts] == list(range(1, len(cuts) + 1))


@pytest.mark.slow
def test_an_event_told_after_a_flood_of_lines_is_heard_before_most_of_them(site: Site) -> None:
    """All lies on the broker when the worker begins: by the positions of its cuts, the first that holds the event holds few lines."""
    site.bus.ensure_topics(RECORDED)
    site.announce()
    flood = [
        LogEvent(node="n1", seq=n, boot_id="b1", observed_at_ns=time.time_ns(), line=f"line {n}") for n in range(30_000)
    ]
    site.put(*(("tw.logs", 0, line) for line in flood))
    _, _, event = killed(site, "n1", 1)
    site.put(("tw.events", 0, replace(event, seq=len(flood))))
    site.start_worker()

    def lines_in(cut: FrameCut) -> int:
        return sum(offset for place, offset in cut.positions.items() if place.startswith("tw.logs/"))

    site.wait("all lines in frames", lambda: any(lines_in(cut) == len(flood) for cut in site.cuts()))
    first = next(
        cut
        for cut in site.cuts()
        if any(place.startswith("tw.events/") and offset for place, offset in cut.positions.items())
    )
    assert first.seq == 1
    assert lines_in(first) < len(flood) / 2


@pytest.mark.faults
@pytest.mark.slow
def test_no_broker_at_start_is_waited_for_and_one_that_returns_empty_is_used_again(tmp_path: Path) -> None:
    port = free_port()
    site = Site(tmp_path, f"127.0.0.1:{port}")
    try:
        worker = site.start_worker()
        site.wait("it says that it waits", lambda: "waiting for it" in site.log())
        assert site.log().count("waiting for it") == 1
        with TansuBroker(tmp_path / "tansu.log", port=port):
            site.wait_leading()
            site.announce()
            site.live(2)
            assert site.cuts()
        site.publisher.close()
        site.publisher = None
        with TansuBroker(tmp_path / "tansu2.log", port=port):
            site.bus.ensure_topics(RECORDED)
            site.announce()

            def heard_again() -> bool:
                site.live(1)
                return bool(site.cuts())

            site.wait("cuts on the new broker", heard_again)
            site.live(3)
            site.put(killed(site))
            site.wait("an incident", lambda: bool(site.deaths()))
        assert worker.poll() is None
        assert site.log().count("\n") < 200, "a lost broker floods no log"
    finally:
        site.close()


@pytest.mark.slow
def test_stop_is_clean_and_quick_even_when_the_broker_is_gone(tmp_path: Path) -> None:
    with TansuBroker(tmp_path / "tansu.log") as broker:
        site = Site(tmp_path, broker.bootstrap)
        worker = site.start_worker()
        site.wait_leading()
        site.announce()
        site.live(1)
    try:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_S) == 0
        assert "Traceback" not in site.log()
    finally:
        site.close()


@pytest.mark.faults
@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_kafka_is_survived_without_loss(
    kafka_runtime: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a durable broker in mid-flight: the worker goes on by itself, cuts are numbered without a gap, a replay agrees."""
    with ApacheKafka(tmp_path / "kafka") as broker:
        site = Site(tmp_path, broker.bootstrap)
        try:
            worker = site.start_worker()
            site.wait_leading()
            site.announce()
            site.live(4)
            broker.kill()
            time.sleep(3)
            broker.start()
            site.wait("the broker is written to again", lambda: published(site))
            count = len(site.cuts())
            site.live(3)
            site.wait("new cuts", lambda: len(site.cuts()) > count)
            site.put(killed(site))
            site.wait("an incident", lambda: bool(site.deaths()))
            assert worker.poll() is None
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
            numbers = list(dict.fromkeys(cut.seq for cut in site.all_cuts()))
            assert numbers == list(range(1, len(numbers) + 1))
            recording = site.record()
            monkeypatch.setattr("streams.detect.registry", lambda: Detectors(Fingerprint, real=True))
            told = replay_recording(recording, site.config)
            assert [encode(verdict) for verdict in told.verdicts] == unique(site.settled("tw.verdicts"))
        finally:
            site.close()


def published(site: Site) -> bool:
    try:
        site.put()
        site.live(1)
    except BusError:
        return False
    return True


def test_a_bus_in_memory_is_refused_with_one_sentence() -> None:
    from streams.app import run
    from trainwarden.errors import ConfigError

    with pytest.raises(ConfigError, match="the worker reads from a broker"):
        run(from_table({"kafka": {"url": "memory://x"}}))


def test_wrong_detector_settings_are_told_before_anything_starts() -> None:
    from streams.app import run
    from trainwarden.errors import ConfigError

    with pytest.raises(ConfigError, match="unknown key"):
        run(from_table({"detectors": {"straggler": {"blok_s": 3}}}))


def test_incident_statuses_are_those_that_receivers_know() -> None:
    assert {status.value for status in IncidentStatus} == {"open", "acting", "recovered", "closed", "superseded"}
