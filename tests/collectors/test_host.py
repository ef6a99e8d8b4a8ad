"""Golden values of the host source; every expected number is worked out by hand from the fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.sources.host import HostSource, cpu_shares, retransmits
from tests.collectors.kit import bench, values


def test_first_sample_has_gauges_but_no_rates(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(HostSource)
    row = values(source, source.sample(0), "host", "host")
    assert row["load1"] == pytest.approx(0.02)
    assert row["runnable_tasks"] == 1
    assert row["swap_used_ratio"] == 0.0
    assert not {"cpu_busy_ratio", "tcp_retrans_per_s", "psi_cpu_some_ratio", "disk_read_bytes_per_s"} & set(row)


def test_rates_and_shares_between_two_samples(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(HostSource)
    source.sample(0)
    # of 200 clock ticks: 60 user, 10 nice, 20 system, 90 idle, 10 iowait, 0 irq, 4 softirq, 6 steal
    board.edit(
        "/proc/stat", "cpu  301854 612 111922 8979004 3552 2 3944 0", "cpu  301914 622 111942 8979094 3562 2 3948 6"
    )
    board.edit("/proc/stat", "ctxt 38014093", "ctxt 38015093")
    board.edit("/proc/net/snmp", " 54915039 227 ", " 54915039 230 ")
    board.edit(
        "/proc/pressure/memory",
        "full avg10=0.20 avg60=3.00 avg300=4.95 total=25",
        "full avg10=0 avg60=0 avg300=0 total=500025",
    )
    # 2000 sectors of 512 bytes read and 1000 written on a whole disk; the mapper device above it is not counted again
    board.edit("/proc/diskstats", "sda 25354637 34367663 1003346126 18492372 28444756 11134226 505697032 63877960 0 9653880",
               "sda 25354637 34367663 1003348126 18492372 28444756 11134226 505698032 63877960 0 9654880")  # fmt: skip
    board.edit("/proc/diskstats", "dm-0 59910002 0 1003337218", "dm-0 59910002 0 1003339218")
    row = values(source, board.second(source, 2.0), "host", "host")
    assert row["cpu_busy_ratio"] == pytest.approx(100 / 200)
    assert row["cpu_user_ratio"] == pytest.approx(70 / 200)
    assert row["cpu_system_ratio"] == pytest.approx(24 / 200)
    assert row["cpu_iowait_ratio"] == pytest.approx(10 / 200)
    assert row["cpu_steal_ratio"] == pytest.approx(6 / 200)
    assert row["context_switches_per_s"] == pytest.approx(500)
    assert row["tcp_retrans_per_s"] == pytest.approx(1.5)
    assert row["psi_memory_full_ratio"] == pytest.approx(0.25)
    assert row["psi_memory_some_ratio"] == 0.0
    assert row["disk_read_bytes_per_s"] == pytest.approx(2000 * 512 / 2)
    assert row["disk_write_bytes_per_s"] == pytest.approx(1000 * 512 / 2)
    assert row["disk_busy_ratio"] == pytest.approx(0.5)


def test_memory_ratio_uses_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write(
        "/proc/meminfo",
        "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\nSwapTotal: 200 kB\nSwapFree: 150 kB\n",
    )
    source = board.build(HostSource)
    row = values(source, source.sample(0), "host", "host")
    assert row["mem_available_ratio"] == pytest.approx(0.4)
    assert row["mem_used_bytes"] == 600 * 1024
    assert row["swap_used_ratio"] == pytest.approx(0.25)


def test_a_counter_that_falls_has_no_rate(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(HostSource)
    source.sample(0)
    board.edit("/proc/stat", "ctxt 38014093", "ctxt 5")
    assert "context_switches_per_s" not in values(source, board.second(source), "host", "host")
    board.edit("/proc/stat", "ctxt 5\n", "ctxt 15\n")
    assert values(source, board.second(source), "host", "host")["context_switches_per_s"] == pytest.approx(10)


def test_without_pressure_files_only_their_columns_are_absent(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    for name in ("cpu", "memory", "io"):
        (board.root / "proc/pressure" / name).unlink()
    source = board.build(HostSource)
    source.sample(0)
    row = values(source, board.second(source), "host", "host")
    assert "psi_cpu_some_ratio" not in row
    assert "tcp_retrans_per_s" in row


def test_iowait_going_back_is_not_negative_time() -> None:
    shares = cpu_shares([100, 0, 0, 100, 50, 0, 0, 0], [110, 0, 0, 110, 49, 0, 0, 0])
    assert shares["cpu_iowait_ratio"] == 0.0
    assert shares["cpu_busy_ratio"] == pytest.approx(0.5)


def test_retransmits_of_a_kernel_with_other_columns() -> None:
    assert retransmits("Tcp: A RetransSegs\nTcp: 1 7\nUdp: RetransSegs\nUdp: 9\n") == 7
    assert retransmits("Udp: X\nUdp: 1\n") is None


def test_free_space_arrives_with_a_later_sample(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(HostSource)
    assert isinstance(source, HostSource)
    source.sample(0)
    assert source._space.settle(60)
    assert values(source, board.second(source), "host", "host")["run_dir_free_bytes"] > 0


def test_without_a_whole_disk_nothing_is_read_or_written_and_that_is_not_zero(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write("/proc/diskstats", "   7       0 loop0 1 2 3 4 5 6 7 8 0 9 10\n")
    board.write("/proc/loadavg", "odd 0.04 0.05 x/301 20109")
    source = board.build(HostSource)
    source.sample(0)
    row = values(source, board.second(source), "host", "host")
    assert "cpu_busy_ratio" not in row  # no tick passed in a tree that stands still
    assert not {"disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_busy_ratio", "load1", "runnable_tasks"} & set(
        row
    )
