"""Two stages as units: whoever has them, and however many share them, the same is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from detectors.base import registry
from streams.merge import PATIENCE_NS, Merger
from streams.recording import Recorder
from streams.replay import RECORDED, copy, replay
from streams.service import BusWorker, read_all
from streams.units import REST, SHARES, Unit, dealt, units
from tests.streams.fingerprint import Detectors, Fingerprint
from tests.streams.synthetic import START_NS, Cluster
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.errors import UsageError
from trainwarden.records import Summary, Verdict, decode, encode
from trainwarden.topics import SUMMARIES

CONFIG = from_table({"cluster": "c", "streams": {"snapshot_s": 5}})
NODES = tuple(f"n{number:02d}" for number in range(12))


class Lines(Fingerprint):
    name = "dynamic_threshold"


class Trends(Fingerprint):
    name = "foretell"


@pytest.fixture(autouse=True)
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each share of the second stage: equal words mean equal frames in equal order."""
    monkeypatch.setattr("streams.detect.registry", lambda: Detectors(Fingerprint, Lines, Trends))


@dataclass
class Site:
    """A memory bus, a cluster on it, and workers that have the units."""

    workers: int
    backwards: bool = False
    hands: list[list[BusWorker]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = SimulatedClock(START_NS)
        self.bus = MemoryBus(self.clock)
        self.cluster = Cluster(nodes=NODES)
        self.publisher = self.bus.publisher()
        self.second = 0
        self.hands = [[self.employ(unit) for unit in hand] for hand in dealt(units(4), self.workers)]
        for topic, _, record in self.cluster.announcements():
            self.publisher.publish(topic, b"", encode(record))

    def employ(self, unit: Unit) -> BusWorker:
        return BusWorker(CONFIG, self.bus, self.clock, "b", unit=unit)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            for topic, _, record in self.cluster.second(self.second):
                self.publisher.publish(topic, record.node.encode(), encode(record))
            self.second += 1
            for _ in range(10):
                self.clock.advance_ns(100 * NS_PER_MS)
                for hand in reversed(self.hands) if self.backwards else self.hands:
                    for worker in hand:
                        worker.step()

    def on(self, topic: str) -> Iterator[Any]:
        return (decode(message.value) for message in read_all(self.bus, topic))

    def said(self) -> dict[str, list[str]]:
        """Words of each detector in order; a repeat must be the same record, and counts once."""
        found: dict[str, dict[str, Verdict]] = {}
        for verdict in self.on("tw.verdicts"):
            assert isinstance(verdict, Verdict)
            first = found.setdefault(verdict.detector, {}).setdefault(verdict.verdict_id, verdict)
            assert encode(first) == encode(verdict)
        return {name: [verdict.text for verdict in verdicts.values()] for name, verdicts in sorted(found.items())}


def test_every_detector_is_run_by_one_unit() -> None:
    shares = [unit for unit in units() if unit.share]
    for name in registry().all():
        assert sum(unit.runs(name) for unit in shares) == 1, name
    assert not any(unit.runs(name) for unit in units() if not unit.share for name in registry().all())
    assert set().union(*SHARES.values()) <= set(registry().all())
    assert [unit.share for unit in units() if unit.correlates] == [REST]


def test_one_two_and_eight_workers_say_the_same_in_whatever_order_they_work() -> None:
    found = []
    for workers, backwards in ((1, False), (2, False), (8, False), (8, True)):
        site = Site(workers, backwards)
        site.run(8)
        site.cluster.silent.add("n05")
        site.run(10)
        found.append(site.said())
    assert [len(words) for words in found[0].values()] == [len(found[0]["fingerprint"])] * 3
    assert len(found[0]["fingerprint"]) >= 12
    assert len(set(map(str, found))) == 1


def test_a_frame_of_the_second_stage_holds_what_the_one_stage_sees() -> None:
    """Grid points, nodes, who was there, values: of the two-stage frames and of a worker that does it all."""
    site = Site(1)
    seen: dict[str, list[Any]] = {"whole": [], "units": []}
    whole = BusWorker(CONFIG, site.bus, site.clock, "whole")
    rest = next(worker for hand in site.hands for worker in hand if worker.stage.role.owner == f"share/{REST}")
    for name, worker in (("whole", whole), ("units", rest)):
        run, ticks = worker.stage.pipeline.run, seen[name]
        worker.stage.pipeline.run = lambda frame, keep_every=1, run=run, ticks=ticks: ticks.extend(frame.ticks) or run(frame)  # type: ignore[method-assign, misc]  # fmt: skip
    site.hands.append([whole])
    site.run(5)
    site.cluster.silent.add("n05")
    site.run(8)

    def described(tick: Any) -> tuple[Any, ...]:
        families = {n: (f.entities, f.metrics, f.values.tobytes(), f.states) for n, f in tick.families.items()}
        return tick.at_ns, tick.nodes, tick.present.tolist(), families, tick.gaps

    assert len(seen["units"]) >= 8
    by_time = {tick.at_ns: described(tick) for tick in seen["whole"]}
    assert all(described(tick) == by_time[tick.at_ns] for tick in seen["units"])


@pytest.mark.parametrize("victim", ["block/1", f"share/{REST}", "share/lines"])
def test_a_unit_whose_worker_is_killed_goes_on_elsewhere_and_says_the_same(victim: str) -> None:
    undisturbed = Site(2)
    undisturbed.run(14)
    site = Site(2)
    site.run(7)
    unit = next(unit for unit in units(4) if unit.role.owner == victim)
    for hand in site.hands:
        hand[:] = [worker for worker in hand if worker.stage.role.owner != victim]
    site.hands[0].append(site.employ(unit))  # at once: the cuts are those of the undisturbed run, so every word must be
    site.run(7)
    assert site.said() == undisturbed.said()


def test_nobody_is_called_silent_while_a_block_has_no_worker_and_its_ticks_come_later() -> None:
    site = Site(2)
    site.run(6)
    lost = next(worker for hand in site.hands for worker in hand if worker.stage.role.owner == "block/2")
    for hand in site.hands:
        hand[:] = [worker for worker in hand if worker is not lost]
    frames = _ticks_of(site)
    site.run(6)
    assert not frames, "a cell without a block is not closed"
    site.hands[1].append(site.employ(next(unit for unit in units(4) if unit.role.block == 2)))
    site.run(4)
    assert len(frames) >= 8
    assert all(tick.present.all() and tick.nodes == NODES for tick in frames)
    assert [tick.at_ns for tick in frames] == sorted({tick.at_ns for tick in frames})


def test_a_block_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    site = Site(2)
    site.run(5)
    for hand in site.hands:
        hand[:] = [worker for worker in hand if worker.stage.role.owner != "block/2"]
    frames = _ticks_of(site)
    site.run(int(PATIENCE_NS / NS_PER_S) + 5)
    assert len(frames) >= 3
    missing = set(NODES) - set(frames[-1].nodes)
    assert missing
    assert frames[-1].present.all(), "nodes of whom nobody knows are not said to be silent"


def test_what_is_repeated_too_late_is_counted_and_changes_nothing() -> None:
    site = Site(1)
    site.run(6)
    before = len(site.said()["fingerprint"])
    old = next(record for record in site.on("tw.summaries") if isinstance(record, Summary))
    site.publisher.publish("tw.summaries", b"0", encode(old))
    rest = next(worker for worker in site.hands[0] if worker.stage.role.owner == f"share/{REST}")
    rest.step()
    site.clock.advance_ns(300 * NS_PER_MS)
    rest.step()
    assert rest.metrics.value("tw_summaries_late_total", block=str(old.block)) == 1
    assert len(site.said()["fingerprint"]) == before


def test_a_cold_start_waits_for_the_first_word_of_each_block_but_not_for_ever() -> None:
    """A worker with a block comes later than the others: nobody knows yet whether that block has nodes."""
    site = Site(2)
    for hand in site.hands:
        hand[:] = [worker for worker in hand if worker.stage.role.owner != "block/2"]
    frames = _ticks_of(site)
    site.run(6)
    assert not frames
    site.hands[1].append(site.employ(next(unit for unit in units(4) if unit.role.block == 2)))
    site.run(3)
    assert frames[0].at_ns < START_NS + NS_PER_S
    assert all(tick.nodes == NODES for tick in frames)


def test_a_successor_waits_from_when_its_predecessor_waited() -> None:
    """The cut that closes a cell without a block is repeated with the same result: what was held back is part of the record."""
    site = Site(2)
    site.run(5)
    for hand in site.hands:
        hand[:] = [worker for worker in hand if worker.stage.role.owner != "block/2"]
    site.run(int(PATIENCE_NS / NS_PER_S) + 3)
    said = site.said()
    cold = [found for found in site.on("tw.cuts") if found.node == "share/lines"]
    assert cold[0].seq == 1
    unit = next(unit for unit in units(4) if unit.name == "share/lines")
    bus = MemoryBus(SimulatedClock(site.clock.now_ns()))
    for topic in ("tw.summaries", "tw.steps", "tw.logs", "tw.topology", "tw.cuts"):
        for log, copied in zip(site.bus.partitions(topic), bus.partitions(topic), strict=True):
            copied.extend(log)
    again = BusWorker(CONFIG, bus, bus.clock, "again", unit=unit)
    again.step()
    assert not again.stage.catching_up
    repeated = [decode(message.value).text for message in read_all(bus, "tw.verdicts")]
    assert repeated == said["dynamic_threshold"][: len(repeated)]
    assert len(repeated) == len(said["dynamic_threshold"])


def test_the_mergers_state_is_whole() -> None:
    site = Site(1)
    site.run(6)
    rest = next(worker for worker in site.hands[0] if worker.stage.role.owner == f"share/{REST}")
    aligner = rest.stage.pipeline.aligner
    assert isinstance(aligner, Merger)
    again = Merger(aligner.settings)
    again.restore(aligner.snapshot())
    assert again.snapshot() == aligner.snapshot()


def _ticks_of(site: Site) -> list[Any]:
    """Ticks that the second stage sees from now on."""
    rest = next(worker for hand in site.hands for worker in hand if worker.stage.role.owner == f"share/{REST}")
    ticks: list[Any] = []
    run = rest.stage.pipeline.run
    rest.stage.pipeline.run = lambda frame, keep_every=1: ticks.extend(frame.ticks) or run(frame)  # type: ignore[method-assign, func-returns-value]
    return ticks


@pytest.mark.parametrize("killed", [False, True])
def test_a_replay_says_byte_for_byte_what_the_units_said(tmp_path: Path, killed: bool) -> None:
    site = Site(2)
    site.run(7)
    if killed:
        unit = next(unit for unit in units(4) if unit.name == "share/lines")
        for hand in site.hands:
            hand[:] = [worker for worker in hand if worker.stage.role.owner != unit.name]
        site.hands[0].append(site.employ(unit))
    site.run(7)
    recorded = tuple(topic.name for topic in (*RECORDED, SUMMARIES))
    with Recorder(tmp_path / "r") as recorder:
        subscriber = site.bus.subscriber(recorded)
        while batch := subscriber.poll(0.0):
            copy(batch, recorder)
    told = replay(tmp_path / "r", CONFIG)
    again: dict[str, list[str]] = {}
    for verdict in told.verdicts:
        again.setdefault(verdict.detector, []).append(verdict.text)
    said = site.said()
    assert sorted(again) == sorted(said)
    assert {name: words[: len(said[name])] for name, words in again.items()} == said
    assert told.frames >= 10
    assert told.nodes == set(NODES)


def test_a_recording_of_units_without_summaries_is_refused(tmp_path: Path) -> None:
    site = Site(1)
    site.run(4)
    with Recorder(tmp_path / "r") as recorder:
        for topic in ("tw.ticks", "tw.cuts"):
            copy(read_all(site.bus, topic), recorder)
    with pytest.raises(UsageError, match=r"streams.stages = 2 and holds no tw.summaries"):
        replay(tmp_path / "r", CONFIG)
