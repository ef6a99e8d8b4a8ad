"""The benches of the stream path: what they count, and that they say what they leave out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import correlation, hops, linear, scale, scale_timeline
from benchmarks._stream import seconds
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.records import Entity, EntityKind, FrameCut, Tick, Verdict, encode
from trainwarden.selfmetrics import Metrics


def test_the_exponent_of_a_straight_line_is_one() -> None:
    rows = [{"nodes": nodes, "total": 0.3 * nodes, "detect": 0.1 * nodes**1.5} for nodes in (128, 512, 2048)]
    assert linear.exponent(rows, "total") == pytest.approx(1.0)
    assert linear.exponent(rows, "detect") == pytest.approx(1.5)


def test_every_message_of_a_second_is_in_one_cut() -> None:
    (sent, *_) = seconds(8, 1)
    parts = list(linear.quarters(sent))
    assert len(parts) == linear.CUTS
    assert sorted(one.number for part in parts for one in part) == sorted(one.number for one in sent)


def test_a_storm_is_a_few_incidents_and_noise_none() -> None:
    storm = correlation.correlate("storm", correlation.storm, 200, 4)
    assert storm.events == 800
    assert 0 < len(storm.incidents) < correlation.STRUCK
    assert correlation.correlate("noise", correlation.noise, 200, 1).revisions == 0


def test_an_interpreter_without_confluent_kafka_is_named(tmp_path: Path) -> None:
    assert "cannot be run" in hops.lacks_confluent(str(tmp_path / "python"))
    result = {"nodes": 1, "rounds": 1, "messages": 1, "bytes": 1, "plain_left_out": "No module named 'confluent_kafka'",
              "us": {"ours": {"producer": 1.0}, "plain": {}}}  # fmt: skip
    assert "LEFT OUT: No module named 'confluent_kafka'" in hops.table(
        {**result, "us": {"ours": dict.fromkeys(hops.HOPS, 1.0), "plain": {}}}
    )
    assert hops.lacks_confluent(sys.executable) == "" or "confluent_kafka" in hops.lacks_confluent(sys.executable)


def test_a_verdict_counts_from_the_tick_that_it_rests_on() -> None:
    clock = SimulatedClock(1_764_400_000 * NS_PER_S)
    bus, at_ns = MemoryBus(clock), clock.now_ns()
    bus.append("tw.cuts", b"c", encode(FrameCut(now_ns=at_ns + 10**15, positions={"tw.ticks/0": 0})))
    for node, late_ms in (("n0", 100), ("n1", 300), ("wild", 400)):
        clock.advance_ns(at_ns + late_ms * 1_000_000 - clock.now_ns())
        wild_ns = -3600 * NS_PER_S if node == "wild" else 0
        bus.append("tw.ticks", b"k", encode(Tick(node=node, observed_at_ns=at_ns + wild_ns + 50)))
    entities = (Entity(EntityKind.NODE, "n0"), Entity(EntityKind.JOB, "j"))
    heard = [Verdict(entity=entity, window_end_ns=at_ns, observed_at_ns=at_ns) for entity in entities]
    delays = scale.verdict_delays_ms(bus, [(verdict, at_ns + NS_PER_S) for verdict in heard])
    assert delays.verdicts_ms == [700.0, 900.0]
    assert delays.ticks_ms == [300.0]


def said(second: int, slow_ms: float) -> scale_timeline.Page:
    """A worker's page after so many seconds: grid points took 90 ms, `slow_ms` in the second minute; 7 ticks were late then."""
    metrics = Metrics("worker")
    for past in range(second):
        slow = 60 <= past < 120
        metrics.observe_spread_ms("tw_tick_delay_ms", slow_ms if slow else 90.0)
        metrics.observe_ms("tw_detector_ms", 400.0 if slow else 40.0, detector="lines")
        metrics.observe_ms("tw_detector_ms", 20.0, detector="hang")
    metrics.count("tw_ticks_late_total", 7 if second >= 90 else 0, node="n0")
    metrics.observe_ms("tw_snapshot_ms", 600.0 if second >= 100 else 0.0, times=int(second >= 100))
    return scale.numbers(metrics.page())


def course(slow_ms: float) -> list[scale_timeline.Sample]:
    return [
        scale_timeline.Sample(float(second), said(second, slow_ms), {"store": 0.2 * second}, {"store": 600.0 + second})
        for second in range(0, 181, 5)
    ]


def test_the_worst_minute_is_named_with_what_it_coincided_with() -> None:
    samples = course(slow_ms=3900.0)
    minutes = scale_timeline.by_minute(samples)
    bad = scale_timeline.worst(minutes)
    assert [minute["at_s"] for minute in minutes] == [60.0, 120.0, 180.0]
    assert bad["at_s"] == 120.0
    assert bad["p95_ms"] > 3000 > minutes[0]["p95_ms"]
    assert (bad["late"], bad["snapshots"]) == (7, 1)
    assert bad["above_median_ms_per_s"] == {"lines": 360.0, "snapshots": 10.0}
    assert scale_timeline.late_minutes(minutes) == {"120": 7}
    assert scale_timeline.growth(samples, "store") == {"whole": 1.3, "last_third": 1.083}
    rows = scale_timeline.by_sample(samples)
    assert len(rows) == 36
    assert rows[0].split() == ["5.0", "5", rows[0].split()[2], rows[0].split()[3], "0", "0", "605.0"]


def test_delays_of_verdicts_are_those_of_the_whole_run() -> None:
    heard = [(s * NS_PER_S, s * NS_PER_S + (1500 if 70 <= s < 80 else 500) * 1_000_000) for s in range(100)]
    told = scale_timeline.of_window_ms(heard, lambda values, share: values[int(share * len(values))])
    assert (told["verdicts"], told["p50_ms"], told["p95_ms"]) == (100, 500.0, 1500.0)
    assert told["worst_minute"] == {"at_s": 120.0, "p95_ms": 1500.0, "verdicts": 40}
