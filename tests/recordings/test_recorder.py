"""The recorder writes what the recordings that we were given hold, and a run of it is read as these are."""

from __future__ import annotations

import csv
import errno
import fcntl
import gzip
import json
import random
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.recorder import delay, faults, stage
from benchmarks.recorder.__main__ import main, record
from benchmarks.recorder.delay import Line
from benchmarks.recorder.faults import FAULTS, SEVERAL, Orders, Plan, Scene, held, perform, ready_to_hold
from benchmarks.recorder.stage import CGROUPS, PREFIX, SWITCH, Node, Stage
from benchmarks.recorder.trainer import COLUMNS
from benchmarks.recorder.watch import HOST_COLUMNS, NODE_COLUMNS, probe_ms, process
from benchmarks.training.rail_stage import inside
from streams.recordings.real_faults import labels, read, runs
from trainwarden.records import StepReport, Tick

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    ("kind", "columns"), [("csv", COLUMNS), ("nodes.csv", NODE_COLUMNS), ("host.csv", HOST_COLUMNS)]
)
def test_the_columns_are_those_of_the_recordings_we_have(kind: str, columns: tuple[str, ...]) -> None:
    with gzip.open(DATA / f"clean1.{kind}.gz", "rt") as file:
        assert tuple(next(csv.reader(file))) == columns


def test_an_unknown_fault_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["recorder", str(tmp_path / "out"), "--faults", "cpu_throttle,gremlins"])
    with pytest.raises(SystemExit):
        main()
    assert "no fault is called 'gremlins': known are sigstop" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_process_that_is_not_there_and_an_address_that_answers() -> None:
    assert process(2**22 + 1) == ("-", -1.0)
    assert 0 <= probe_ms("127.0.0.1") < 1000


def test_two_recorders_at_once_do_not_end_each_others_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setattr(stage, "LOCK", lock)
    monkeypatch.setattr(
        stage, "require", lambda: None
    )  # what it asks of the machine comes before, and is not the question
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(stage.StageError, match="another recorder is at work"):
            stage.Stage(tmp_path)


def test_a_plan_is_one_fault_several_at_once_or_one_several_times() -> None:
    assert Plan.read("exits").faults == ("exits",)
    assert Plan.read("cpu_throttle+slow_loader").name == "cpu_throttle_and_slow_loader"
    assert (Plan.read("kill9:2").times, Plan.read("kill9:2").name) == (2, "kill9_2times")
    assert [Plan.read(spec).spec for spec in SEVERAL] == list(SEVERAL)
    for wrong in ("gremlins+exits", "exits:", "exits:0", "exits:twice", ""):
        with pytest.raises(ValueError, match=r"no fault is called|expected a fault"):
            Plan.read(wrong)


def _scene(folder: Path, node: int = 0) -> Scene:
    stage = cast(Stage, SimpleNamespace(nodes=[Node(number, folder) for number in range(4)]))
    return Scene(
        stage, folder, "x", stage.nodes[node], random.Random(1), Orders(folder / "orders.json"), wait=lambda _: None
    )


def test_a_flipped_bit_lasts_to_the_end_of_the_recording(tmp_path: Path) -> None:
    scene = _scene(tmp_path, node=2)
    FAULTS["sdc_bitflip"](scene)
    assert "end" not in scene.labels[0]
    (label,) = scene.close()
    assert (label["kind"], label["nodes"]) == ("sdc_bitflip", [2])
    assert label["end"] >= label["start"]


def test_two_faults_are_on_two_nodes_and_neither_takes_the_orders_of_the_other_away(tmp_path: Path) -> None:
    scene = _scene(tmp_path)
    scene.orders.give("9", {"nan": True})
    one, other = scene.stage.nodes[1], scene.stage.nodes[2]
    replace(scene, node=one).order(compute_times=2.0)
    replace(scene, node=other).order(save_s=1.0)
    replace(scene, node=one).order()
    assert json.loads((tmp_path / "orders.json").read_text()) == {"9": {"nan": True}, "1": {}, "2": {"save_s": 1.0}}


def test_at_the_same_time_means_on_different_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, both = _scene(tmp_path), threading.Barrier(2, timeout=30)

    def wait_for_the_other(mine: Scene) -> None:
        with mine.label("fault"):
            both.wait()

    monkeypatch.setattr(faults, "TOGETHER_S", (0.0, 0.0))
    monkeypatch.setitem(FAULTS, "cpu_hog", wait_for_the_other)
    monkeypatch.setitem(FAULTS, "disk_full", wait_for_the_other)
    perform(Plan.read("cpu_hog+disk_full"), scene)
    assert len({tuple(label["nodes"]) for label in scene.labels}) == 2


@pytest.mark.parametrize("spec", ["cpu_hog+disk_full", "disk_full+cpu_hog"])
def test_what_fails_beside_another_fault_ends_both(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Scene) -> None:
        raise stage.StageError("no such device")

    monkeypatch.setitem(FAULTS, "cpu_hog", fails)
    monkeypatch.setitem(FAULTS, "disk_full", lambda mine: mine.wait(3600.0))
    with pytest.raises(stage.StageError, match="no such device"):
        perform(Plan.read(spec), _scene(tmp_path))


def test_packets_go_in_their_order_and_not_before_their_time() -> None:
    line = Line(0.010, 0.009, random.Random(3))
    for packet in range(100):
        line.add(packet, 0.001 * packet)
    gone = [(line.due(0.001 * now), 0.001 * now) for now in range(140)]
    last = [(packet, at_s) for packet, at_s in gone if packet is not None]
    assert [packet for packet, _ in last] == sorted(packet for packet, _ in last)
    assert last[-1][0] == 99
    assert all(at_s >= 0.001 * packet + 0.001 for packet, at_s in last)
    assert line.wait_s(1.0) is None


def test_the_queue_says_which_packets_wait_and_what_it_could_not_do() -> None:
    header = delay.attribute(delay.PACKET_HEADER, struct.pack("!IHB", 71, 0x0800, 3))
    mark = delay.attribute(3, b"\0\0\0\1")
    both = delay.message(delay.PACKET, 0, mark + header) + delay.message(delay.PACKET, 0, header)
    assert list(delay.packets(both)) == [71, 71]
    assert list(delay.packets(struct.pack("=IHHIIi", 20, delay.ERROR, 0, 1, 0, 0))) == []
    with pytest.raises(OSError, match="queue of packets: Operation not permitted"):
        list(delay.packets(struct.pack("=IHHIIi", 20, delay.ERROR, 0, 1, 0, -errno.EPERM)))


@pytest.mark.root
def test_what_a_node_sends_is_held_back(tmp_path: Path) -> None:
    made = Stage(tmp_path)
    try:
        node = made.nodes[1]
        with ready_to_hold([node], 30.0, random.Random(1)):
            with held([node]):
                probes = [inside(SWITCH, lambda: probe_ms(node.address)) for _ in range(5)]
            rules = subprocess.run(node.command("iptables", "-S"), check=True, capture_output=True, text=True).stdout
        assert min(probes) >= 24.0, "held 30 +- 6 ms"
        assert "NFQUEUE" not in rules
        assert any(0 <= inside(SWITCH, lambda: probe_ms(node.address)) < 24.0 for _ in range(20))
    finally:
        made.close()


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This machine for one recorder: tests that run side by side take turns, and a person's recorder is waited for."""
    with (tmp_path_factory.getbasetemp().parent / "recorder.lock").open("w") as turn, stage.LOCK.open("a") as others:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(others, fcntl.LOCK_EX)
        fcntl.flock(others, fcntl.LOCK_UN)
        yield


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.usefixtures("machine")
def test_a_job_whose_trainer_exits_begins_again_once_and_ends(tmp_path: Path) -> None:
    record(tmp_path, "exits_1", Plan.read("exits"), seed=1, rest_s=5.0, onset_s=(10.0, 10.0))
    events = [json.loads(line) for line in (tmp_path / "exits_1.events.jsonl").read_text().splitlines()]
    began = [event for event in events if event["kind"] == "first_step"]
    (label,) = labels(tmp_path, "exits_1")
    assert sum(event["kind"] == "proc_start" for event in events) == len(began) == 8
    assert label.kind == "kill9"
    assert label.end_ns >= max(event["t"] for event in began) * 1e9 - 1e6
    steps = [row for r in read(tmp_path, "exits_1") if isinstance(r, StepReport) for row in r.rows]
    assert max(row.started_at_ns for row in steps) > label.end_ns


@pytest.mark.root
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.usefixtures("machine")
def test_a_run_is_read_with_its_fault_and_leaves_nothing_behind(tmp_path: Path) -> None:
    record(tmp_path, "sigstop_1", Plan.read("sigstop"), seed=1, rest_s=5.0)
    assert runs(tmp_path) == ("sigstop_1",)
    (label,) = labels(tmp_path, "sigstop_1")
    records = read(tmp_path, "sigstop_1")
    assert {r.node for r in records if isinstance(r, StepReport)} == {"node0", "node1", "node2", "node3"}
    stopped = [
        r
        for r in records
        if isinstance(r, StepReport)
        for row in r.rows
        if row.started_at_ns + row.duration_ms * 1e6 > label.end_ns > row.started_at_ns
    ]
    assert stopped, "no step was stopped"
    assert max(r.observed_at_ns for r in records if isinstance(r, Tick)) > label.end_ns
    assert label.nodes
    assert label.end_ns - label.start_ns > 3e9
    assert not list(Path("/run/netns").glob(f"{PREFIX}*"))
    assert not list(CGROUPS.glob(f"*/{PREFIX}*"))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"sigstop_1.{kind}" for kind in ("csv", "nodes.csv", "host.csv", "events.jsonl", "labels.json")
    }
