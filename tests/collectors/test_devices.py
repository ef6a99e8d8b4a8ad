"""Devices that hang: a file that never answers costs the row of its device, the agent says which, and it comes back by itself."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from collectors import devices as module
from collectors.base import Sample
from collectors.devices import Devices, Together
from collectors.sources.nic import NicSource
from collectors.sources.rdma import RdmaSource
from tests.collectors.kit import FIXTURES, Bench, bench, devices, values
from tests.collectors.waiting import LIMIT_S, until
from trainwarden.clock import NS_PER_S

IB = "sys/class/infiniband"


def hang(path: Path) -> bytes:
    """Make a file one that never answers; its content, to let it go again."""
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    return content


def let_go(path: Path, content: bytes) -> None:
    """Answer whoever waits, and those that come after from a plain file."""
    fifo = os.open(path, os.O_RDWR)
    os.write(fifo, content)
    path.unlink()
    path.write_bytes(content)
    os.close(fifo)


def ports(tmp_path: Path) -> Bench:
    board = bench(tmp_path, "h100")
    for number in (1, 2):
        shutil.copytree(FIXTURES / "h100" / IB / "mlx5_0", board.root / IB / f"mlx5_{number}")
    return board


def reasons(sample: Sample) -> list[str]:
    return [gap.reason for gap in sample.gaps]


def test_a_port_whose_state_hangs_costs_its_own_row_and_comes_back(tmp_path: Path) -> None:
    board = ports(tmp_path)
    state = board.root / IB / "mlx5_1/ports/1/state"
    content = hang(state)
    source = board.build(RdmaSource)
    before = threading.active_count()
    first = board.second(source)
    assert set(devices(first, "nic")) >= {"mlx5_0/1", "mlx5_1/1", "mlx5_2/1"}
    assert [values(source, first, "nic", f"mlx5_{n}/1").get("carrier") for n in range(3)] == [1, None, 1]
    assert "late:mlx5_1/1" in reasons(first)
    until(lambda: "hung:mlx5_1/1" in reasons(board.second(source, 0.0)))  # and no turn of these begins it a second time
    assert (
        threading.active_count() <= before + 5
    )  # of the states: the one that hangs and the one that went on; counters' three
    let_go(state, content)
    # a pipe cannot be read at a place, so that it fails once more, and a file that failed is left alone for a minute
    until(lambda: values(source, board.second(source, 61.0), "nic", "mlx5_1/1").get("carrier") == 1)
    assert not [reason for reason in reasons(board.second(source, 0.0)) if "mlx5_1" in reason]
    source.close()


def test_an_interface_that_hangs_keeps_its_traffic(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.edit("/proc/net/dev", "eth0: 874354587", "ens1: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 874354587")
    shutil.copytree(board.root / "sys/class/net/eth0", board.root / "sys/class/net/ens1")
    carrier = board.root / "sys/class/net/ens1/carrier"
    content = hang(carrier)
    source = board.build(NicSource)
    board.second(source)
    sample = board.second(source)
    row = values(source, sample, "nic", "ens1")
    assert ("carrier" in row, row["rx_bytes_per_s"]) == (False, 0)
    assert values(source, sample, "nic", "eth0")["carrier"] == 1
    assert reasons(sample) in (["late:ens1"], ["hung:ens1"])
    let_go(carrier, content)
    until(lambda: reasons(board.second(source, 0.0)) == [])
    source.close()


def test_a_port_whose_counters_hang_does_not_cost_those_of_the_others(tmp_path: Path) -> None:
    board = ports(tmp_path)
    counter = board.root / IB / "mlx5_2/ports/1/counters/port_rcv_data"
    content = hang(counter)
    source = board.build(RdmaSource, counters_every_s=1.0)
    source._counted._wait_s = 0.2  # type: ignore[attr-defined]
    for _ in range(4):
        sample = board.second(source)
        assert source.settle(LIMIT_S)  # type: ignore[attr-defined]
        source._counted._wait_s = LIMIT_S  # type: ignore[attr-defined]  # from now on nobody waits for the one that hangs
    row = values(source, sample, "nic", "mlx5_0/1")
    assert (row["rx_bytes_per_s"], row["carrier"]) == (0, 1)
    assert "rx_bytes_per_s" not in values(source, sample, "nic", "mlx5_2/1")
    assert set(reasons(sample)) <= {"counters_late:mlx5_2/1", "counters_hung:mlx5_2/1"} != set()
    let_go(counter, content)
    source.close()


def test_a_reader_that_fails_is_a_reason_and_no_crash() -> None:
    answers = {"good": 1, "bad": 0}
    found: Devices[float] = Devices(lambda name: lambda: 1 / answers[name])
    assert found.read(answers) == {"good": 1.0}
    assert [(gap.source, gap.reason) for gap in found.gaps("x")] == [("x", "error:bad")]
    assert found.read(["good"]) == {"good": 1.0}
    assert found.gaps("x") == ()
    assert Devices(lambda name: lambda: name).read([]) == {}
    found.close()


class Counted:
    """Devices that count how often each is read."""

    def __init__(self, together: Together) -> None:
        self.reads: dict[str, int] = {}
        self.devices: Devices[int] = Devices(lambda name: lambda: self.read(name), LIMIT_S, together)

    def read(self, name: str) -> int:
        self.reads[name] = self.reads.get(name, 0) + 1
        return self.reads[name]


def test_two_sources_have_their_devices_read_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_NS", 600 * NS_PER_S)
    together = Together()
    first, second = Counted(together), Counted(together)
    assert second.devices.read(["c"]) == {"c": 1}
    assert first.devices.read(["a", "b"]) == {"a": 1, "b": 1}
    assert second.reads == {"c": 2}, "with those of the first"
    assert second.devices.read(["c"]) == {"c": 2}, "what was read with them is the answer"
    assert second.devices.read(["c"]) == {"c": 3}, "but once only"
    assert second.devices.read(["c", "d"]) == {"c": 4, "d": 1}, "a device that is new is read"
    first.devices.close()
    second.devices.close()


def test_what_was_read_ahead_is_no_answer_a_tick_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_NS", 0)
    together = Together()
    first, second = Counted(together), Counted(together)
    second.devices.read(["c"])
    first.devices.read(["a"])
    assert second.devices.read(["c"]) == {"c": 3}


def test_a_device_that_hangs_beside_those_of_another_source_costs_only_itself() -> None:
    held, together = threading.Event(), Together()
    stuck: Devices[int] = Devices(lambda name: lambda: int(held.wait(LIMIT_S)), 0.05, together)
    other: Devices[int] = Devices(lambda name: lambda: 7, 0.05, together)
    assert stuck.read(["x"]) == {}
    until(lambda: other.read(["a", "b"]) == {"a": 7, "b": 7})
    assert [gap.reason for gap in stuck.gaps("s")] == ["late:x"]
    assert other.gaps("s") == ()
    held.set()
    until(lambda: stuck.read(["x"]) == {"x": 1})
    stuck.close()
    other.close()


def test_a_source_that_is_forgotten_is_read_no_more() -> None:
    together = Together()
    first, second = Counted(together), Counted(together)
    second.devices.read(["c"])
    reads = second.reads
    second.devices.close()
    first.devices.read(["a"])
    assert reads == {"c": 1}
    first.devices.close()
