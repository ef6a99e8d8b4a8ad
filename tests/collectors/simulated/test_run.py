"""Whole simulations: the same seed is the same bytes, however it is cut; healthy runs have nothing to answer; bytes add up."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from collectors.simulated.encode import Encoder, Sent
from collectors.simulated.engine import Simulator
from collectors.simulated.families import FAMILIES, columns
from collectors.simulated.marginals import table
from collectors.simulated.run import Pace, build, chunks, run, write_truth
from collectors.simulated.spec import Spec
from collectors.simulated.state import Interval
from collectors.simulated.truth import truth
from tests.collectors.simulated.kit import healthy, simulated
from trainwarden import topics
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.errors import UsageError
from trainwarden.records import LogEvent, StepReport, Tick, TopologyEvent, catalog_id_of, decode
from trainwarden.topology import Topology

SMALL = Spec(nodes=12, seed=4, jobs="4:ddp,4:pipeline", light_share=0.1)
FAULTS = "gpu_thermal@n00001/gpu3:10+30,rank_killed@n00005/gpu0:20+20,messages_late@n00009:5+20x7,leaf_congestion:15+30"


def told(spec: Spec, faults: str, count: int) -> list[Sent]:
    found: list[Sent] = []
    run(build(spec, faults, count), count, found.extend, Pace(SimulatedClock(), 0))
    return found


def digest(messages: Sequence[Sent]) -> str:
    whole = hashlib.sha256()
    for m in messages:
        whole.update(b"%s|%s|%d|" % (m.topic.encode(), m.key, round(m.arrives_s * NS_PER_S)) + m.value)
    return whole.hexdigest()


def test_the_same_seed_is_the_same_bytes() -> None:
    assert digest(told(SMALL, FAULTS, 60)) == digest(told(SMALL, FAULTS, 60))


def test_another_seed_is_not() -> None:
    other = Spec(nodes=12, seed=5, jobs=SMALL.jobs, light_share=0.1)
    assert digest(told(SMALL, "none", 10)) != digest(told(other, "none", 10))


@pytest.mark.parametrize("size", [1, 7, 40])
def test_how_it_is_cut_changes_nothing(size: int) -> None:
    whole = list(build(SMALL, FAULTS, 40).intervals(40))
    cut = [interval for chunk in chunks(build(SMALL, FAULTS, 40), 40, size) for interval in chunk]
    assert [c.number for c in cut] == list(range(40))
    for ours, theirs in zip(cut, whole, strict=True):
        assert all(np.array_equal(ours.family(name), theirs.family(name), equal_nan=True) for name in FAMILIES)
        assert [log.event for log in ours.logs] == [log.event for log in theirs.logs]
        assert [s.past.number for s in ours.steps] == [s.past.number for s in theirs.steps]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    assert digest(told(SMALL, FAULTS, 60)[:200]) == digest(told(SMALL, FAULTS, 30)[:200])


def test_a_healthy_run_has_no_ground_truth() -> None:
    simulator = build(SMALL, "none", 60)
    list(simulator.intervals(60))
    assert truth(simulator, "none", 60)["faults"] == []


def test_the_ground_truth_says_what_where_when_and_what_to_do(tmp_path: Path) -> None:
    simulator = build(SMALL, FAULTS, 60)
    list(simulator.intervals(60))
    sheet = write_truth(tmp_path / "answers.json", simulator, FAULTS, 60)
    assert json.loads((tmp_path / "answers.json").read_text())["faults"] == sheet["faults"]
    by_kind = {fault["kind"]: fault for fault in sheet["faults"]}
    thermal = by_kind["gpu_thermal"]
    assert thermal["culprits"] == [
        {"kind": "node", "name": "n00001", "nodes": ["n00001"], "device": "gpu3", "job": "job-000", "rank": 11}
    ]
    assert thermal["victims"] == ["job-000"]
    assert (thermal["end_ns"] - thermal["start_ns"]) == 30 * NS_PER_S
    assert thermal["decision"] == "rebalance"
    assert thermal["slowdown"]["job-000"] > 1.1
    assert by_kind["leaf_congestion"]["shared"]
    assert not by_kind["leaf_congestion"]["bad_node"]
    assert by_kind["rank_killed"]["fails_ns"] == sheet["start_ns"] + 20 * NS_PER_S


def test_nothing_in_the_messages_gives_the_answer_away() -> None:
    blob = b"".join(m.value for m in told(SMALL, FAULTS, 60))
    for word in (b"gpu_thermal", b"leaf_congestion", b"rank_killed", b"messages_late", b"fault"):
        assert word not in blob.replace(b"Fault", b"")


def test_what_ports_send_other_ports_receive() -> None:
    whole = healthy()
    at, rails = columns("nic"), whole.simulator.spec.rails
    for grid in whole.simulator.placement.grids:
        sent, received = (
            np.nansum([i.family("nic")[grid.span, :rails, at[f"{way}_bytes_per_s"]] for i in whole.intervals])
            for way in ("tx", "rx")
        )
        assert sent > 0
        assert received == pytest.approx(sent, rel=0.01)


def test_lost_packets_are_sent_but_not_received() -> None:
    lossy = simulated(SMALL, "packet_loss@n00001/mlx5_2/1:5+50x0.1", 60)
    at = columns("nic")
    sent, received = (
        np.nansum([i.family("nic")[:4, 2, at[f"{way}_bytes_per_s"]] for i in lossy.intervals[10:50]])
        for way in ("tx", "rx")
    )
    assert 0.01 < 1 - received / sent < 0.1


def test_every_record_can_be_read_and_is_in_order_of_its_speaker() -> None:
    seen: dict[tuple[str, str, str], int] = {}
    for message in told(SMALL, "rank_killed@n00005/gpu0:20+20", 60):
        record = decode(message.value)
        key = (record.node, type(record).__name__, record.boot_id)
        assert record.seq == seen.get(key, -1) + 1
        seen[key] = record.seq
    kinds = Counter(kind for _, kind, _ in seen)
    assert kinds["Tick"] == 12
    assert {"StepReport", "LogEvent", "TopologyEvent", "Catalog"} <= set(kinds)


def test_ticks_are_shaped_like_those_of_the_collector() -> None:
    ticks = [decode(m.value) for m in told(SMALL, "none", 3) if m.topic == topics.TICKS.name]
    tick = next(t for t in ticks if t.node == "n00002")
    assert isinstance(tick, Tick)
    blocks = {block.family: block for block in tick.blocks}
    assert set(blocks) == set(FAMILIES)
    for name, block in blocks.items():
        assert block.catalog_id == catalog_id_of(name, FAMILIES[name].metrics)
        assert len(block.rows()[0][1]) == len(FAMILIES[name].metrics)
    assert blocks["process"].devices[0] == "rank16"
    assert set(blocks["mesh"].devices) <= {f"n{i:05d}" for i in range(12)} - {"n00002"}
    assert [p.rank for p in tick.placements] == list(range(16, 24))
    idle = next(t for t in ticks if t.node == "n00011")
    assert "process" not in {block.family for block in idle.blocks}


def test_topology_tells_racks_and_parallel_groups() -> None:
    topology = Topology()
    events = [decode(m.value) for m in told(SMALL, "none", 2) if m.topic == topics.TOPOLOGY.name]
    for event in events:
        assert isinstance(event, TopologyEvent)
        assert topology.apply(event) is None
    assert topology.attributes("n00009")["rack"] == "rack-001"
    layout = topology.job("job-001")
    assert layout is not None
    assert len(layout.ranks) == 32
    assert layout.parallel is not None
    assert layout.stage_of(31) == 3


def test_step_rows_add_up() -> None:
    reports = [decode(m.value) for m in told(SMALL, "none", 40) if m.topic == topics.STEPS.name]
    rows = [
        row
        for r in reports
        if isinstance(r, StepReport) and r.job == "job-000"
        for row in r.rows
        if row.phase == "train"
    ]
    assert len(rows) > 300
    for row in rows:
        parts = row.data_ms + row.forward_ms + row.backward_ms + row.wait_ms + row.optimizer_ms
        assert parts == pytest.approx(row.duration_ms, rel=0.02)
        assert row.started_at_ns < row.arrived_at_ns < row.started_at_ns + row.duration_ms * 1e6


def test_late_messages_arrive_late_and_are_not_lost() -> None:
    messages = told(SMALL, "messages_late@n00009:5+20x7", 60)
    ticks = [(m.arrives_s, decode(m.value)) for m in messages if m.topic == topics.TICKS.name]
    ours = [(at, t) for at, t in ticks if t.node == "n00009"]
    delays = [at - (t.observed_at_ns - SMALL.start_ns) / NS_PER_S for at, t in ours]
    assert max(delays) > 6.5
    assert len({t.seq for _, t in ours}) >= 58
    assert [m.arrives_s for m in messages] == sorted(m.arrives_s for m in messages)


def test_a_dead_node_is_silent_and_a_peer_sees_its_probes_lost() -> None:
    dead = simulated(SMALL, "power_loss@n00002:10+40", 40)
    at = columns("mesh")
    after = dead.intervals[20]
    assert not after.heard[2]
    to_dead = dead.simulator.layout.peers == 2
    lost = after.family("mesh")[..., at["lost_count"]][to_dead]
    assert np.nanmin(lost) == 4
    codes = [log.event for i in dead.intervals for log in i.logs if log.node == 2 and i.number > 11]
    assert all(isinstance(event, LogEvent) for event in codes)


def test_disorder_of_zero_is_perfectly_orderly() -> None:
    calm = Spec(nodes=6, seed=4, jobs="4:dense", disorder=0.0)
    intervals = list(build(calm, "none", 60).intervals(60))
    assert all(i.heard.all() for i in intervals)
    assert not [log for i in intervals for log in i.logs]
    assert np.ptp([s.past.finish - s.past.begin for i in intervals for s in i.steps]) < 0.02 * 3


def test_disorder_of_one_has_gaps_skew_pauses_saves_and_evaluations() -> None:
    usual = Spec(nodes=60, seed=4, jobs="20:recsys")
    simulator = build(usual, "none", 500)
    intervals = list(simulator.intervals(500))
    assert sum((~i.heard).sum() for i in intervals) > 0
    assert np.abs(intervals[0].offset_ms).max() > 5
    assert {s.past.phase for i in intervals for s in i.steps} >= {"train", "eval", "checkpoint"}
    assert np.isnan(np.stack([i.family("gpu") for i in intervals[:20]])).mean() == pytest.approx(2e-4, rel=0.3)


@pytest.mark.parametrize(
    ("name", "family", "column", "bound"),
    [
        ("gpu_power_w", "gpu", "power_w", 0.12), ("gpu_temp_c", "gpu", "temp_c", 0.12), ("memory_temp_c", "gpu", "memory_temp_c", 0.12),
        ("sm_active_ratio", "gpu", "sm_active_ratio", 0.15), ("tensor_active_ratio", "gpu", "tensor_active_ratio", 0.15),
        ("fb_used_ratio", "gpu", "fb_used_ratio", 0.05), ("cpu_busy_ratio", "host", "cpu_busy_ratio", 0.08),
        ("server_power_w", "board", "server_power_w", 0.15),
    ],
)  # fmt: skip
def test_marginals_are_near_the_real_ones(name: str, family: str, column: str, bound: float) -> None:
    values = np.concatenate([i.family(family)[..., columns(family)[column]].ravel() for i in _default()])
    values = np.sort(values[~np.isnan(values)])
    grid = table()
    room = 0.01 * (grid[name][-2] - grid[name][1])
    below = np.searchsorted(values, grid[name] - room, side="right") / len(values)
    above = np.searchsorted(values, grid[name] + room, side="right") / len(values)
    far = np.maximum(below - grid["quantile"], grid["quantile"] - above)[1:-1].max()
    assert far < bound


@cache
def _default() -> list[Interval]:
    return list(Simulator(Spec(nodes=300, seed=1)).intervals(30))[::6]


def test_what_getting_ready_took_is_made_up_for() -> None:
    clock = SimulatedClock()
    pace = Pace(clock, 1.0, begun_ns_ago=3 * NS_PER_S)
    began_ns = clock.monotonic_ns()
    assert [pace.wait(at_s) for at_s in (0.0, 2.0, 3.0, 4.5)] == [3.0, 1.0, 0.0, 0.0]
    assert clock.monotonic_ns() - began_ns == 1_500_000_000


def test_pace_keeps_to_the_speed() -> None:
    clock = SimulatedClock()
    pace = Pace(clock, 10.0)
    assert pace.wait(30.0) == 0.0
    assert clock.monotonic_ns() == 3 * NS_PER_S
    clock.sleep(2.0)
    assert pace.wait(40.0) == pytest.approx(1.0)


def test_a_stop_ends_the_run_between_two_ticks() -> None:
    found: list[Sent] = []
    turns = iter([False, False, True])
    result = run(build(SMALL, "none", 60), 60, found.extend, Pace(SimulatedClock(), 0), lambda: next(turns))
    assert result.intervals == 2
    assert result.messages == len(found)


def test_encoding_is_of_the_arrays_and_changes_nothing() -> None:
    simulator = build(SMALL, "none", 5)
    interval = simulator.advance()
    before = {name: values.copy() for name, values in interval.values.items()}
    Encoder(simulator).messages(interval)
    assert all(np.array_equal(before[name], interval.values[name], equal_nan=True) for name in before)


def test_the_truth_must_be_writable(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose another file"):
        write_truth(tmp_path / "nowhere" / "x.json", build(SMALL, "none", 5), "none", 5)


def test_hooks_tell_of_saves_and_restores() -> None:
    spec = Spec(nodes=4, seed=2, jobs="2:ddp", light_share=0.0, idle_share=0.0)
    run_of_job = simulated(spec, "rank_killed@n00001/gpu0:30+20", 500)
    told = [log.event for i in run_of_job.intervals for log in i.logs if log.event.code in ("save_ok", "restored")]
    saved = sum(s.past.phase == "checkpoint" for i in run_of_job.intervals for s in i.steps)
    assert [event.code for event in told].count("save_ok") == saved > 0
    assert next(event.attempt for event in told if event.code == "restored") == 1
    failing = simulated(spec, "checkpoint_failing@job-000:5+490", 500)
    codes = [log.event.code for i in failing.intervals for log in i.logs]
    assert "save_ok" not in codes
    assert "save_failed" in codes
