"""The worker's own health: said when it lasts, said again while it does, taken back when it is over."""

from __future__ import annotations

from actions.console.worker_view import part_of
from streams.app import OF_A_LEADER
from streams.health import WorkerHealth
from streams.stage import CorrelatorStage
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.config import Config
from trainwarden.records import Incident, Reach, Verdict, decode, encode
from trainwarden.selfmetrics import Metrics
from trainwarden.vitals import Vital, Vitals

CONFIG = Config(cluster="lab")


class Worker:
    """A worker's health and correlator, moved by hand."""

    def __init__(self) -> None:
        self.clock = SimulatedClock(1_000 * NS_PER_S)
        self.metrics = Metrics("worker")
        self.health = WorkerHealth(CONFIG, self.metrics)
        self.correlator = CorrelatorStage(CONFIG, self.clock, self.metrics)
        self.disabled: dict[str, str] = {}

    def run(self, seconds: int) -> tuple[list[Verdict], list[Incident]]:
        """What is said, and what becomes of it, in so many seconds."""
        verdicts: list[Verdict] = []
        incidents: list[Incident] = []
        for _ in range(seconds * 4):
            self.clock.sleep(0.25)
            for output in self.health.outputs(self.clock.now_ns(), self.disabled):
                self.correlator.take(Message(output.topic, 0, len(verdicts), output.key, output.value, 0))
                verdicts.append(decode(output.value))
            incidents += [decode(output.value) for output in self.correlator.tick()]
        return verdicts, incidents


def test_a_worker_that_is_behind_says_so_and_takes_it_back() -> None:
    worker = Worker()
    worker.metrics.set("tw_tick_age_seconds", 2.0)
    assert worker.run(60) == ([], [])
    worker.metrics.set("tw_tick_age_seconds", 90.0)
    worker.metrics.set("tw_lag_records", 4000, topic="tw.ticks")
    said, incidents = worker.run(30)
    assert [(v.kind, v.entity.name, v.clears) for v in said] == [("pipeline_late", "worker", False)]
    assert "4000 records" in said[0].text
    assert [i.status for i in incidents] == ["open"]
    worker.metrics.set("tw_tick_age_seconds", 1.0)
    said, incidents = worker.run(60)
    assert [v.clears for v in said] == [True]
    assert incidents[-1].status == "closed"


def test_a_worker_with_fresh_ticks_whose_log_lines_wait_says_that() -> None:
    worker = Worker()
    worker.metrics.set("tw_tick_age_seconds", 2.0)
    worker.metrics.set("tw_log_age_seconds", 90.0)
    worker.metrics.set("tw_lag_records", 70_000, topic="tw.logs")
    said, _ = worker.run(30)
    assert [(v.kind, v.entity.name) for v in said] == [("pipeline_late", "worker")]
    assert "the newest log line that was looked at is 90 s old" in said[0].text
    assert "70000 records" in said[0].text


def test_a_short_delay_and_one_that_comes_and_goes_say_nothing() -> None:
    worker = Worker()
    for _ in range(5):
        worker.metrics.set("tw_tick_age_seconds", 90.0)
        assert worker.run(8)[0] == []
        worker.metrics.set("tw_tick_age_seconds", 1.0)
        assert worker.run(8)[0] == []


def test_who_no_longer_leads_shows_nothing_of_the_time_when_it_did() -> None:
    worker = Worker()
    worker.metrics.set("tw_tick_age_seconds", 90.0)
    worker.metrics.set("tw_lag_records", 7, topic="tw.ticks")
    worker.metrics.count("tw_cuts_total", phase="live")
    assert not part_of(worker.metrics.page(), 15.0).ok
    worker.metrics.forget(*OF_A_LEADER)
    assert part_of(worker.metrics.page(), 15.0).detail.startswith("stands by")
    assert worker.metrics.total("tw_cuts_total") == 1
    assert worker.run(30)[0] == []


def test_no_ticks_from_anybody_is_told_apart_from_being_slow() -> None:
    worker = Worker()
    worker.metrics.set("tw_tick_age_seconds", 90.0)
    said, _ = worker.run(30)
    assert "no collector sends" in said[0].text


def test_a_flood_of_dead_letters_is_said_and_a_few_are_not() -> None:
    worker = Worker()
    worker.metrics.count("tw_dead_letters_total", 20, topic="tw.ticks")
    assert worker.run(90)[0] == []
    worker.metrics.count("tw_dead_letters_total", 20, topic="tw.ticks")
    worker.metrics.count("tw_dead_letters_total", 50, topic="tw.steps")
    said, _ = worker.run(30)
    assert [(v.kind, v.value) for v in said] == [("records_refused", 70.0)]
    assert [v.clears for v in worker.run(300)[0]][-1]


def test_a_broken_detector_is_said_while_it_is_off() -> None:
    worker = Worker()
    worker.disabled["hang"] = "ZeroDivisionError() at hang.py:12"
    said, incidents = worker.run(70)
    assert [v.kind for v in said] == ["detector_off", "detector_off"]
    assert "ZeroDivisionError" in said[0].text
    assert incidents[0].culprits
    assert {incident.reach for incident in incidents} == {Reach.NOTIFY}


def test_a_successor_takes_back_what_the_one_before_it_said() -> None:
    first = Worker()
    first.disabled["hang"] = "ZeroDivisionError() at hang.py:12"
    _, incidents = first.run(10)
    second = Worker()
    published = [Message("tw.incidents", 0, n, b"", encode(i), 0) for n, i in enumerate(incidents)]
    second.correlator.restore(published)
    second.health.take_over([*published, Message("tw.incidents", 0, 9, b"", b"torn", 0)])
    said, incidents = second.run(60)
    assert [(v.kind, v.entity.name, v.clears) for v in said] == [("detector_off", "worker:hang", True)]
    assert incidents[-1].status == "closed"


def test_nobody_takes_back_what_another_part_said() -> None:
    """A worker that begins knows nothing of the store, nor a unit of another one: to call them well would close what is open."""
    store, worker = Vitals("lab"), Worker()
    late = Vital("pipeline_late", "store", 90.0, 10.0, "s", "the store is behind", persist_s=0.0)
    for verdict in store.look(worker.clock.now_ns(), [late]):
        worker.correlator.take(Message("tw.verdicts", 0, 0, b"", encode(verdict), 0))
    worker.clock.sleep(10)
    published = [Message("tw.incidents", 0, 0, b"", o.value, 0) for o in worker.correlator.tick()]
    assert len(published) == 1
    worker.health.take_over(published)
    assert worker.run(60)[0] == []


def test_a_unit_answers_for_itself_and_its_own_detectors() -> None:
    lines = WorkerHealth(CONFIG, Metrics("worker"), "share/lines", lambda name: name == "dynamic_threshold")
    whole = WorkerHealth(CONFIG, Metrics("worker"), "", lambda name: name != "dynamic_threshold")
    names = ("worker", "worker:share/lines", "worker:dynamic_threshold", "worker:hang", "worker:block/1", "store")
    assert [name for name in names if lines._is_ours(name)] == ["worker:share/lines", "worker:dynamic_threshold"]
    assert [name for name in names if whole._is_ours(name)] == ["worker", "worker:hang"]


def test_a_unit_is_late_only_with_work_before_it() -> None:
    """One that waits for others says nothing: the whole is late once."""
    worker = Worker()
    worker.health = WorkerHealth(CONFIG, worker.metrics, "share/lines")
    worker.metrics.set("tw_tick_age_seconds", 90.0)
    assert worker.run(30)[0] == []
    worker.metrics.set("tw_lag_records", 4000, topic="tw.summaries")
    said, _ = worker.run(30)
    assert [(v.kind, v.entity.name) for v in said] == [("pipeline_late", "worker:share/lines")]
    assert "4000 records" in said[0].text
