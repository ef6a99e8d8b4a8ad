from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base import AlignedTick, Frame
from streams.align import Aligner, AlignSettings
from streams.matrices import pack, unpack
from tests.streams.synthetic import HOST, HOST_MORE, START_NS, host_catalog, tick
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import (
    Block,
    Catalog,
    Gap,
    LogEvent,
    Metric,
    Placement,
    Record,
    StepReport,
    StepRow,
    Tick,
    TopologyEvent,
    catalog_id_of,
    pack_floats,
)
from trainwarden.selfmetrics import Metrics


class Bench:
    """An aligner with a hand on its clock and running offsets."""

    def __init__(self, **dials: float) -> None:
        self.metrics = Metrics("test")
        self.aligner = Aligner(AlignSettings(**dials), self.metrics)  # type: ignore[arg-type]
        self.offsets: dict[tuple[str, int], int] = {}
        self.closed: list[AlignedTick] = []
        self.add("tw.catalog", host_catalog())

    def add(self, topic: str, record: Record, partition: int = 0) -> None:
        offset = self.offsets.get((topic, partition), 0)
        self.offsets[topic, partition] = offset + 1
        self.aligner.add(topic, partition, offset, record)

    def cut(self, at_s: float) -> Frame | None:
        frame = self.aligner.cut(START_NS + int(at_s * NS_PER_S))
        self.closed.extend(frame.ticks if frame else ())
        return frame

    def seconds(self) -> list[int]:
        return [(t.at_ns - START_NS) // NS_PER_S for t in self.closed]


def same_ticks(left: list[AlignedTick], right: list[AlignedTick]) -> bool:
    def plain(t: AlignedTick) -> object:
        families = {name: (f.entities, f.metrics, f.values.tobytes()) for name, f in t.families.items()}
        return t.at_ns, t.nodes, t.present.tolist(), families, t.gaps

    return [plain(t) for t in left] == [plain(t) for t in right]


def test_a_tick_closes_as_soon_as_everybody_is_in() -> None:
    bench = Bench()
    for node in ("n0", "n1"):
        bench.add("tw.ticks", tick(node, 0))
    bench.cut(0.1)
    bench.add("tw.ticks", tick("n0", 1))
    frame = bench.cut(1.1)
    assert frame is not None
    assert frame.ticks == ()
    bench.add("tw.ticks", tick("n1", 1))
    bench.cut(1.3)
    assert bench.seconds() == [0, 1]
    assert bench.closed[1].nodes == ("n0", "n1")
    assert bench.closed[1].present.all()


def test_a_silent_node_is_waited_for_then_absent_then_not_waited_for_then_forgotten() -> None:
    bench = Bench(forget_s=20)
    for second in range(40):
        bench.add("tw.ticks", tick("n0", second))
        if second < 5:
            bench.add("tw.ticks", tick("n1", second))
        bench.cut(second + 0.1)
        if second == 5:
            assert bench.seconds() == [0, 1, 2, 3, 4], "it is waited for at first"
    by_second = dict(zip(bench.seconds(), bench.closed, strict=True))
    assert bench.seconds() == list(range(40))
    assert by_second[5].nodes == ("n0", "n1")
    assert by_second[5].present.tolist() == [True, False]
    assert by_second[23].nodes == ("n0", "n1")
    assert by_second[39].nodes == ("n0",), "after forget_s nobody expects it"


def test_absent_node_reported_after_lateness_and_not_before() -> None:
    bench = Bench(lateness_ms=2000)
    for node in ("n0", "n1"):
        bench.add("tw.ticks", tick(node, 0))
    bench.cut(0.1)
    for second in (1, 2):
        bench.add("tw.ticks", tick("n0", second))
        bench.cut(second + 0.05)
    bench.cut(2.9)
    assert bench.seconds() == [0]
    bench.add("tw.ticks", tick("n0", 3))
    bench.cut(3.05)
    assert bench.seconds() == [0, 1]
    assert bench.closed[1].present.tolist() == [True, False]


def slept_through(bench: Bench, seq_after: int) -> None:
    """n1 has no tick for second 3 and speaks again in second 4; n0 misses nothing."""
    for second in range(5):
        bench.add("tw.ticks", tick("n0", second))
        if second != 3:
            bench.add("tw.ticks", tick("n1", second, seq=second if second < 3 else seq_after))
        bench.cut(second + 0.1)


def test_a_tick_that_a_collector_slept_through_is_not_waited_for() -> None:
    bench = Bench(lateness_ms=2000)
    slept_through(bench, seq_after=3)
    assert bench.seconds() == [0, 1, 2, 3, 4], "its next number follows its last: there was none between"
    assert bench.closed[3].present.tolist() == [True, False]


def test_a_tick_that_is_on_its_way_is_waited_for() -> None:
    bench = Bench(lateness_ms=2000)
    slept_through(bench, seq_after=4)
    assert bench.seconds() == [0, 1, 2], "number 3 may still come"
    bench.add("tw.ticks", tick("n1", 3))
    bench.cut(4.3)
    assert bench.seconds() == [0, 1, 2, 3, 4]
    assert bench.closed[3].present.all()


@pytest.mark.parametrize("word", [("b2", 0), ("b1", 1), ("", 4)], ids=["started again", "numbered anew", "no boot id"])
def test_numbers_that_prove_nothing_close_nothing(word: tuple[str, int]) -> None:
    bench = Bench(lateness_ms=2000)
    for second in range(5):
        bench.add("tw.ticks", tick("n0", second))
        if second != 3:
            boot, seq = word if second > 3 else (word[0] and "b1", second)
            bench.add("tw.ticks", tick("n1", second, boot=boot, seq=seq))
        bench.cut(second + 0.1)
    assert bench.seconds() == [0, 1, 2]


@pytest.mark.parametrize("older", [False, True])
def test_what_numbers_told_is_taken_over_and_a_state_without_it_can_be_read(older: bool) -> None:
    bench = Bench(lateness_ms=2000)
    for second in range(5):
        if second == 4:
            state = unpack(bench.aligner.snapshot())
            if older:
                del state["grid"]["words"]
            bench.aligner = Aligner(bench.aligner.settings, bench.metrics)
            bench.aligner.restore(pack(state))
        bench.add("tw.ticks", tick("n0", second))
        if second != 3:
            bench.add("tw.ticks", tick("n1", second, seq=min(second, 3)))
        bench.cut(second + 0.1)
    assert bench.seconds() == ([0, 1, 2] if older else [0, 1, 2, 3, 4])


def test_everybody_silent_is_not_closed_until_the_stall_is_over() -> None:
    bench = Bench()
    bench.add("tw.ticks", tick("n0", 0))
    bench.cut(0.1)
    bench.cut(9.0)
    assert len(bench.closed) <= 2, "a pause of the broker is not the end of the cluster"
    bench.cut(12.0)
    assert len(bench.closed) > 5
    assert not bench.closed[-1].present.any()


def nobody_is_heard_until(second: int, bench: Bench) -> None:
    """Three nodes for five seconds, then only the clock; the first two come back with what they kept."""
    for earlier in range(5):
        for node in ("n0", "n1", "n2"):
            bench.add("tw.ticks", tick(node, earlier))
        bench.cut(earlier + 0.1)
    for half in range(10, 2 * second):
        bench.cut(half / 2 + 0.1)
    for node in ("n0", "n1"):
        for kept in range(5, second + 1):
            bench.add("tw.ticks", tick(node, kept))


@pytest.mark.parametrize(("pause_s", "later_s"), [(6, 4), (30, 8)])
def test_after_a_pause_of_the_broker_each_node_has_time_to_come_back(pause_s: int, later_s: int) -> None:
    bench, back = Bench(), 5 + pause_s
    nobody_is_heard_until(back, bench)
    for second in range(back, back + later_s):
        if second > back:
            for node in ("n0", "n1"):
                bench.add("tw.ticks", tick(node, second))
        bench.cut(second + 0.1)
    for kept in range(5, back + later_s):
        bench.add("tw.ticks", tick("n2", kept))
    bench.cut(back + later_s)
    after = [t for t in bench.closed if t.present.any()]
    assert [t.present.tolist() for t in after] == [[True] * 3] * len(after), "n2 was not called silent"
    assert after[-1].at_ns == START_NS + (back + later_s - 1) * NS_PER_S
    if pause_s < 10:
        assert [t.at_ns for t in after] == [START_NS + s * NS_PER_S for s in range(back + later_s)], "all came in time"


@pytest.mark.parametrize("taken_over", [False, True])
def test_who_does_not_come_back_after_a_pause_is_silent_after_as_much_time_again(taken_over: bool) -> None:
    bench, back = Bench(), 11
    nobody_is_heard_until(back, bench)
    bench.cut(back + 0.1)
    if taken_over:
        state, bench.aligner = bench.aligner.snapshot(), Aligner(AlignSettings(), bench.metrics)
        bench.aligner.restore(state)
    for second in range(back + 1, back + 9):
        for node in ("n0", "n1"):
            bench.add("tw.ticks", tick(node, second))
        bench.cut(second + 0.1)
        if second < back + 7:
            assert bench.seconds()[-1] == 4, f"n2 is waited for at {second}"
    assert bench.seconds() == list(range(back + 9))
    assert bench.closed[-1].present.tolist() == [True, True, False]


@pytest.mark.parametrize("resumed_s", [6.75, 7.25, 8.5, 14.0])
@pytest.mark.parametrize("before", [0, 130, 290])
def test_a_pause_of_the_bus_makes_nobody_late(resumed_s: float, before: int) -> None:
    """It comes before a second's first tick, in the midst of them, or before the last; one partition comes back later than the other."""
    bench, seconds, nodes = Bench(), 18, 300
    arriving: dict[int, list[tuple[int, int]]] = {}
    for second in range(seconds):
        for number in range(nodes):
            held = second > 5 or (second == 5 and number >= before)
            at_s = max(second, resumed_s + number % 2 / 2) if held else second
            arriving.setdefault(math.ceil(4 * at_s) + 1, []).append((second, number))
    for quarter in range(4 * seconds + 8):
        for second, number in arriving.get(quarter, ()):
            bench.add("tw.ticks", tick(f"n{number:03}", second), number % 2)
        bench.cut(quarter / 4)
    assert bench.metrics.total("tw_ticks_late_total") == 0
    assert bench.seconds() == list(range(seconds))
    assert all(tick.present.all() for tick in bench.closed)


def late_ticks(bench: Bench, behind_s: float, seconds: int) -> list[int]:
    """Seconds in which a tick of the one node of 200 came late whose clock is behind; it ticks by it."""
    found = []
    for second in range(seconds):
        before = bench.metrics.total("tw_ticks_late_total")
        for number in range(1, 200):
            bench.add("tw.ticks", tick(f"n{number:03}", second))
        bench.add("tw.ticks", tick("n000", second, shift_ns=-int(behind_s * NS_PER_S)))
        for quarter in range(4):
            bench.cut(second + quarter / 4 + 0.125)
        if bench.metrics.total("tw_ticks_late_total") > before:
            found.append(second)
    return found


@pytest.mark.parametrize("behind_s", [0.3, 0.5, 0.9])
def test_a_node_whose_clock_is_behind_is_late_once_then_waited_for_then_moved(behind_s: float) -> None:
    bench = Bench()
    assert len(late_ticks(bench, behind_s, 100)) == 1
    assert len(bench.closed) > 95
    assert sum(not tick.present.all() for tick in bench.closed[1:]) == 2, "once late, once moved on"


@pytest.mark.parametrize(
    ("nodes", "absent", "closes_s"), [(200, 1, 5.75), (400, 2, 5.75), (200, 2, 7.0), (199, 1, 7.0)]
)
@pytest.mark.parametrize("taken_over", [False, True])
def test_for_one_node_in_two_hundred_nobody_waits_longer_than_half_a_second(
    nodes: int, absent: int, closes_s: float, taken_over: bool
) -> None:
    bench = Bench()
    for second in range(6):
        for number in range(nodes if second < 5 else nodes - absent):
            bench.add("tw.ticks", tick(f"n{number:03}", second))
        bench.cut(second + 0.25)
    if taken_over:
        state, bench.aligner = bench.aligner.snapshot(), Aligner(AlignSettings(), bench.metrics)
        bench.aligner.restore(state)
    for quarter in range(2, 12):
        for number in range(nodes - absent if quarter % 4 == 1 else 0):
            bench.add("tw.ticks", tick(f"n{number:03}", 5 + quarter // 4))
        bench.cut(5 + quarter / 4)
        if 5 + quarter / 4 < closes_s:
            assert bench.seconds()[-1] == 4
        elif 5 + quarter / 4 == closes_s:
            assert bench.seconds()[-1] == 5
    assert bench.closed[5].present.sum() == nodes - absent


def test_late_ticks_are_counted_and_change_nothing() -> None:
    bench = Bench()
    for second in range(8):
        bench.add("tw.ticks", tick("n0", second))
        if second == 0:
            bench.add("tw.ticks", tick("n1", second))
        bench.cut(second + 0.1)
    before = len(bench.closed)
    bench.add("tw.ticks", tick("n1", 1))
    bench.cut(8.0)
    assert bench.metrics.value("tw_ticks_late_total", node="n1") == 1
    assert [t.at_ns for t in bench.closed[before:]] == []


def test_repeats_are_dropped_and_counted_in_every_kind() -> None:
    bench = Bench()
    step = StepReport(
        node="n0", seq=1, boot_id="b1", observed_at_ns=START_NS, job="j", rows=(StepRow(1, "train", START_NS, 60.0),)
    )
    line = LogEvent(node="n0", seq=1, boot_id="b1", observed_at_ns=START_NS, line="x")
    for _ in range(2):
        bench.add("tw.ticks", tick("n0", 0))
        bench.add("tw.steps", step)
        bench.add("tw.logs", line)
    frame = bench.cut(0.1)
    assert frame is not None
    assert (len(frame.steps), len(frame.logs)) == (1, 1)
    bench.add("tw.logs", line)
    again = bench.cut(0.3)
    assert again is not None
    assert again.logs == ()
    assert bench.metrics.value("tw_duplicates_total", topic="tw.logs") == 2
    assert bench.metrics.value("tw_duplicates_total", topic="tw.ticks") == 1


def test_lines_that_come_long_after_the_events_told_with_them_are_no_repeats() -> None:
    """A collector numbers both in one row; behind a flood its lines come when hundreds of its events were seen already."""
    bench = Bench()
    said = [LogEvent(node="n0", seq=number, boot_id="b1", observed_at_ns=START_NS + number) for number in range(400)]
    for event in said[::2]:
        bench.add("tw.events", event)
    frames = [bench.cut(0.1)]
    for line in said[1::2]:
        bench.add("tw.logs", line)
    bench.add("tw.events", said[398])
    frames.append(bench.cut(0.3))
    assert [len(frame.logs) for frame in frames if frame is not None] == [200, 200]
    assert bench.metrics.value("tw_duplicates_total", topic="tw.events") == 1
    assert bench.metrics.value("tw_duplicates_total", topic="tw.logs") == 0


def test_same_number_after_a_restart_of_the_collector_is_new() -> None:
    bench = Bench()
    for boot in ("b1", "b2"):
        bench.add("tw.logs", LogEvent(node="n0", seq=1, boot_id=boot, observed_at_ns=START_NS))
    frames = [bench.cut(0.1), bench.cut(2.1)]
    assert [event.boot_id for frame in frames if frame is not None for event in frame.logs] == ["b1", "b2"]


def test_of_two_ticks_in_one_cell_the_last_wins() -> None:
    bench = Bench()
    bench.add("tw.ticks", tick("n0", 0, seq=1, value=0.1))
    bench.add("tw.ticks", tick("n0", 0, seq=2, shift_ns=300 * NS_PER_MS, value=0.9))
    bench.cut(0.5)
    family = bench.closed[0].family("host")
    assert family is not None
    assert family.column("cpu_busy_ratio")[0] == np.float32(0.9)


def test_columns_are_merged_by_name_when_nodes_have_different_catalogues() -> None:
    bench = Bench()
    bench.add("tw.catalog", host_catalog(HOST_MORE))
    other = Block("host", catalog_id_of("host", HOST_MORE), ("host",), pack_floats([7.0, 0.25]))
    bench.add("tw.ticks", tick("n0", 0, value=0.5))
    bench.add("tw.ticks", Tick(node="n1", seq=0, boot_id="b", observed_at_ns=START_NS, blocks=(other,)))
    bench.cut(0.1)
    family = bench.closed[0].family("host")
    assert family is not None
    assert set(family.metrics) == {"cpu_busy_ratio", "load1", "psi_cpu_some_ratio"}
    assert family.entities == (("n0", "host"), ("n1", "host"))
    assert family.column("load1").tolist() == [0.0, 7.0]
    assert np.isnan(family.column("psi_cpu_some_ratio")[0])
    assert np.isnan(family.column("cpu_busy_ratio")[1])


def unknown_layout_tick() -> Tick:
    metrics = (Metric("x", "1"),)
    block = Block("new", catalog_id_of("new", metrics), ("d",), pack_floats([1.0]))
    return Tick(node="n0", seq=0, boot_id="b", observed_at_ns=START_NS, blocks=(block,))


def test_a_tick_waits_for_its_catalogue() -> None:
    bench = Bench()
    bench.add("tw.ticks", unknown_layout_tick())
    bench.cut(0.1)
    assert bench.closed == []
    catalog = host_catalog((Metric("x", "1"),))
    bench.add(
        "tw.catalog",
        type(catalog)(catalog_id=catalog_id_of("new", catalog.metrics), family="new", metrics=catalog.metrics),
    )
    bench.cut(0.3)
    assert bench.closed[0].family("new") is not None


def test_a_tick_whose_catalogue_never_comes_is_a_dead_letter() -> None:
    bench = Bench(parked_s=10)
    bench.add("tw.ticks", unknown_layout_tick())
    bench.cut(0.1)
    bench.cut(10.0)
    assert bench.aligner.take_rejected() == []
    bench.cut(11.0)
    (rejected,) = bench.aligner.take_rejected()
    assert "did not come within 10 s" in rejected.reason
    assert (rejected.topic, rejected.offset) == ("tw.ticks", 0)


def test_parking_is_bounded() -> None:
    bench = Bench(parked_limit=3)
    for seq in range(5):
        bench.add(
            "tw.ticks",
            Tick(node="n0", seq=seq, boot_id="b", observed_at_ns=START_NS, blocks=unknown_layout_tick().blocks),
        )
    bench.cut(0.1)
    assert len(bench.aligner.take_rejected()) == 2


def test_a_block_of_the_wrong_size_is_a_dead_letter_with_numbers() -> None:
    bench = Bench()
    bad = Block("host", catalog_id_of("host", HOST), ("host",), pack_floats([1.0]))
    bench.add("tw.ticks", Tick(node="n0", seq=0, boot_id="b", observed_at_ns=START_NS, blocks=(bad,)))
    bench.cut(0.1)
    (rejected,) = bench.aligner.take_rejected()
    assert "4 bytes, expected 1 devices x 2 metrics" in rejected.reason


@pytest.mark.parametrize("offset_s", [30, -30])
def test_a_skewed_clock_is_corrected_on_the_grid_and_shown_as_a_gap(offset_s: int) -> None:
    bench = Bench()
    for second in range(20):
        for node in ("n0", "n1", "n2"):
            bench.add("tw.ticks", tick(node, second))
        bench.add("tw.ticks", tick("n3", second, shift_ns=offset_s * NS_PER_S))
        bench.cut(second + 0.1)
    last = bench.closed[-1]
    assert (last.at_ns - START_NS) // NS_PER_S == 19
    assert last.nodes == ("n0", "n1", "n2", "n3")
    assert last.present.all()
    assert last.gaps == {"n3": (Gap("clock", "skew"),)}
    assert bench.metrics.value("tw_ticks_skewed_total", node="n3") >= 15


def test_a_worker_that_lags_blames_no_clock() -> None:
    bench = Bench()
    for second in range(20):
        for node in ("n0", "n1", "n2"):
            bench.add("tw.ticks", tick(node, second))
        bench.cut(second + 25.0)
    assert bench.metrics.value("tw_ticks_skewed_total", node="n0") == 0
    assert bench.seconds() == list(range(20))


def test_steps_and_logs_come_sorted_whatever_their_partitions() -> None:
    bench = Bench()
    for node, at in (("n2", 3), ("n0", 3), ("n1", 1)):
        bench.add("tw.logs", LogEvent(node=node, seq=at, boot_id="b", observed_at_ns=START_NS + at), partition=at)
    frame = bench.cut(0.1)
    assert frame is not None
    assert [event.node for event in frame.logs] == ["n1", "n0", "n2"]


def test_placements_in_ticks_and_steps_become_topology_below_what_the_hook_says() -> None:
    bench = Bench()
    bench.add(
        "tw.ticks",
        Tick(node="n0", seq=0, boot_id="b", observed_at_ns=START_NS, placements=(Placement("j", 1, 0, "gpu0"),)),
    )
    bench.add(
        "tw.steps", StepReport(node="n1", seq=0, boot_id="b", observed_at_ns=START_NS, job="j", attempt=1, rank=1)
    )
    frame = bench.cut(0.1)
    assert frame is not None
    layout = frame.topology.job("j")
    assert layout is not None
    assert layout.ranks == {0: ("n0", "gpu0"), 1: ("n1", "")}
    bench.add("tw.topology", TopologyEvent(entity="job:j", origin="hook", attempt=1, ranks=((0, "n9", "gpu3"),)))
    later = bench.cut(0.4)
    assert later is not None
    assert later.topology.job("j").ranks[0] == ("n9", "gpu3")  # type: ignore[union-attr]
    assert layout.ranks[0] == ("n0", "gpu0"), "the picture handed out earlier does not change"
    assert frame.topology.job("j").ranks[0] == ("n0", "gpu0")  # type: ignore[union-attr]


def test_a_removed_node_is_expected_no_longer() -> None:
    bench = Bench()
    for node in ("n0", "n1"):
        bench.add("tw.ticks", tick(node, 0))
    bench.cut(0.1)
    bench.add("tw.topology", TopologyEvent(entity="node:n1", origin="operator", removed=True))
    bench.add("tw.ticks", tick("n0", 1))
    bench.cut(1.1)
    assert bench.closed[-1].nodes == ("n0",)


def test_a_restored_aligner_knows_how_a_job_is_parallel_and_reads_what_older_ones_wrote() -> None:
    bench = Bench()
    ranks = tuple((rank, f"n{rank}", "gpu0") for rank in range(4))
    bench.add(
        "tw.topology", TopologyEvent(entity="job:j", origin="hook", attempt=1, ranks=ranks, attributes={"pp": "2"})
    )
    bench.add("tw.ticks", tick("n0", 0))
    bench.cut(0.1)
    state = bench.aligner.snapshot()
    resumed = Bench()
    resumed.aligner.restore(state)
    resumed.add("tw.ticks", tick("n0", 1), 1)
    frame = resumed.cut(1.1)
    assert frame is not None
    layout = frame.topology.job("j")
    assert layout is not None
    assert layout.attributes == {"pp": "2"}
    older = unpack(state)
    older["topology"]["_jobs"] = [job[:3] for job in older["topology"]["_jobs"]]
    resumed.aligner.restore(pack(older))


def test_an_idle_cluster_makes_no_frames() -> None:
    aligner = Aligner(AlignSettings())
    assert aligner.cut(START_NS) is None
    aligner.skip("tw.ticks", 0, 7)
    assert aligner.cut(START_NS + NS_PER_S) is None
    assert aligner.positions == {"tw.ticks/0": 8}


# --- properties -----------------------------------------------------------------------------------------------------------

NODES = ("n0", "n1", "n2", "n3", "n4")


def arrivals(seconds: int, missing: set[tuple[int, int]]) -> list[list[tuple[int, Tick]]]:
    """Per second: (partition, tick) of the nodes that report."""
    return [
        [
            (i % 3, tick(node, second, shift_ns=i * NS_PER_MS))
            for i, node in enumerate(NODES)
            if (second, i) not in missing
        ]
        for second in range(seconds)
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), missing=st.sets(st.tuples(st.integers(1, 11), st.integers(0, 4)), max_size=12))
def test_any_interleaving_with_repeats_closes_the_same_ticks(seed: int, missing: set[tuple[int, int]]) -> None:
    plain, shuffled = Bench(), Bench()
    dice = random.Random(seed)
    for second, batch in enumerate(arrivals(12, missing)):
        for partition, one in batch:
            plain.add("tw.ticks", one, partition)
        mixed = [*batch, *dice.choices(batch, k=3)] if batch else []
        dice.shuffle(mixed)
        for partition, one in mixed:
            shuffled.add("tw.ticks", one, partition)
        for bench in (plain, shuffled):
            bench.cut(second + 0.2)
    assert plain.closed
    assert same_ticks(plain.closed, shuffled.closed)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_delays_within_the_lateness_change_no_closed_tick(seed: int) -> None:
    """Each tick arrives up to 1.5 s late, in any order of nodes: the matrices are those of punctual arrival."""
    dice = random.Random(seed)
    punctual, delayed = Bench(), Bench()
    due: list[tuple[float, int, Tick]] = []
    for second, batch in enumerate(arrivals(15, set())):
        for partition, one in batch:
            punctual.add("tw.ticks", one, partition)
            due.append((second + (dice.uniform(0.0, 1.5) if second else 0.0), partition, one))
        punctual.cut(second + 0.1)
    for quarter in range(4 * 18):
        now_s = quarter / 4 + 0.1
        for item in [item for item in due if item[0] <= now_s]:
            due.remove(item)
            delayed.add("tw.ticks", item[2], item[1])
        delayed.cut(now_s)
    assert punctual.seconds() == list(range(15))
    assert same_ticks(punctual.closed, delayed.closed[:15])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stop_at=st.integers(1, 11),
    missing=st.sets(st.tuples(st.integers(1, 11), st.integers(0, 4)), max_size=10),
)
def test_a_snapshot_anywhere_continues_exactly(seed: int, stop_at: int, missing: set[tuple[int, int]]) -> None:
    dice = random.Random(seed)
    whole, resumed = Bench(), Bench()
    for second, batch in enumerate(arrivals(12, missing)):
        dice.shuffle(batch)
        if second == stop_at:
            payload = resumed.aligner.snapshot()
            resumed.aligner = Aligner(AlignSettings(), resumed.metrics)
            resumed.aligner.restore(payload)
            assert resumed.aligner.snapshot() == payload
        for bench in (whole, resumed):
            for partition, one in batch:
                bench.add("tw.ticks", one, partition)
            bench.cut(second + 0.2)
    assert same_ticks(whole.closed, resumed.closed)
    assert whole.aligner.positions == resumed.aligner.positions


WILD_TIMES_NS = (0, -5 * 10**18, 9 * 10**18, 2**64 - 1, START_NS + 7200 * NS_PER_S, START_NS - 90_000 * NS_PER_S)


@pytest.mark.parametrize("at_ns", WILD_TIMES_NS)
@pytest.mark.parametrize("first", [True, False])
def test_a_spooled_tick_with_a_wild_time_is_a_dead_letter_and_moves_nobodys_grid(at_ns: int, first: bool) -> None:
    bench = Bench()
    wild = Tick(node="wild", boot_id="w", observed_at_ns=at_ns, spooled=True)
    if first:
        bench.add("tw.ticks", wild)
    for second in range(6):
        bench.add("tw.ticks", tick("n0", second))
        if second == 2 and not first:
            bench.add("tw.ticks", wild)
        bench.cut(second + 0.1)
    assert bench.seconds() == [0, 1, 2, 3, 4, 5]
    assert [rejected.reason.rpartition(": ")[2] for rejected in bench.aligner.take_rejected()] == [
        "set the clock of wild"
    ]


def test_a_long_hole_costs_no_more_than_a_node_is_remembered() -> None:
    bench = Bench(forget_s=30.0)
    bench.add("tw.ticks", Tick(node="n0", boot_id="b", observed_at_ns=START_NS, spooled=True))
    bench.cut(0.1)
    hole_s = 20 * 3600
    for second in range(hole_s, hole_s + 5):
        bench.add("tw.ticks", tick("n1", second))
        bench.cut(second + 0.1)
    assert bench.seconds()[-1] == hole_s + 4
    assert len(bench.seconds()) < 60


def test_a_catalogue_that_names_a_column_twice_is_a_dead_letter_per_tick_and_the_rest_goes_on() -> None:
    twice = (Metric("load1", "1"), Metric("load1", "1"))
    identity = catalog_id_of("host", twice)
    bench = Bench()
    bench.add("tw.catalog", Catalog(catalog_id=identity, family="host", metrics=twice))
    bad = Tick(
        node="n1", observed_at_ns=START_NS, blocks=(Block("host", identity, ("host",), pack_floats([1.0, 2.0])),)
    )
    bench.add("tw.ticks", bad)
    bench.add("tw.ticks", tick("n0", 0))
    bench.cut(0.1)
    bench.cut(5)
    assert [t.nodes for t in bench.closed][:1] == [("n0",)]
    (letter,) = bench.aligner.take_rejected()
    assert "names load1 twice" in letter.reason


def test_a_block_without_devices_beside_another_layout_is_an_empty_one() -> None:
    bench = Bench()
    bench.add("tw.catalog", Catalog(catalog_id=catalog_id_of("host", HOST_MORE), family="host", metrics=HOST_MORE))
    empty = Block("host", catalog_id_of("host", HOST_MORE), (), b"")
    bench.add("tw.ticks", tick("n0", 0))
    bench.add("tw.ticks", Tick(node="n1", observed_at_ns=START_NS, blocks=(empty,)))
    bench.cut(0.1)
    family = bench.closed[0].family("host")
    assert family is not None
    assert [node for node, _ in family.entities] == ["n0"]


def test_of_a_node_whose_collector_is_not_believed_yet_it_is_not_said_that_it_is_silent() -> None:
    """Somebody lied in its name, so a collector that starts again without a proof waits for long; `present=False` would accuse the node."""
    bench = Bench()
    for second in range(20):
        bench.add("tw.ticks", tick("n0", second))
        bench.add("tw.ticks", tick("n1", second, boot="b1" if second < 4 else "b2"))
        if second == 2:
            bench.add("tw.ticks", tick("n1", second, boot="liar"))
        bench.cut(second + 0.2)
    there = {
        cell: dict(zip(t.nodes, t.present.tolist(), strict=True))
        for cell, t in zip(bench.seconds(), bench.closed, strict=True)
    }
    assert [there[cell].get("n1") for cell in range(4)] == [True] * 4
    assert len(there) >= 15
    assert all(there[cell] == {"n0": True} for cell in there if cell >= 4), there
