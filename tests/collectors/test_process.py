"""The process source: golden values, ends of processes, throttling in both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from collectors.sources.process import ProcessSource, ancestors, stat_fields, throttled_s
from tests.collectors.kit import Bench, bench, devices, values

PID = 26231
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def seen(board: Bench, generation: int = 1, pid: int = PID, **known: int | str) -> None:
    board.context.ranks.seen("job", generation, 2, pid=pid, **known)


def test_golden_values(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(ProcessSource)
    seen(board, last_step=41, phase="eval", seen_monotonic_ns=board.clock.monotonic_ns())
    first = values(source, source.sample(0), "process", "rank2")
    assert first["alive"] == 1
    assert first["state"] == 1  # R
    assert first["threads_count"] == 1
    assert first["rss_bytes"] == 1981 * os.sysconf("SC_PAGE_SIZE")
    assert "cpu_cores" not in first
    # utime 1677 + 150, stime 44 + 50 clock ticks
    board.edit("/proc/26231/stat", " 1677 44 ", " 1827 94 ")
    board.edit("/proc/26231/io", "\nread_bytes: 1024", "\nread_bytes: 5120")
    board.edit("/proc/26231/status", "voluntary_ctxt_switches:	4742839\n", "voluntary_ctxt_switches:	4742849\n")
    row = values(source, board.second(source, 4.0), "process", "rank2")
    assert row["cpu_cores"] == pytest.approx(200 / TICKS_PER_S / 4)
    assert row["read_bytes_per_s"] == pytest.approx(1024)
    assert row["write_bytes_per_s"] == 0
    assert row["voluntary_switches_per_s"] == pytest.approx(2.5)
    assert (row["last_step"], row["phase"]) == (41, 3)
    assert row["step_age_s"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("letter", "state", "alive"), [("T", 4, 1), ("t", 4, 1), ("D", 3, 1), ("S", 2, 1), ("Z", 5, 0), ("I", 6, 1)]
)
def test_states(tmp_path: Path, letter: str, state: float, alive: float) -> None:
    board = bench(tmp_path, "node")
    board.edit("/proc/26231/stat", "(vim) R", f"(v) (im) {letter}")
    seen(board)
    source = board.build(ProcessSource)
    row = values(source, source.sample(0), "process", "rank2")
    assert (row["state"], row["alive"]) == (state, alive)


def vanish(board: Bench) -> None:
    path = board.root / "proc" / str(PID)
    for file in sorted(path.rglob("*"), reverse=True):
        file.unlink()
    path.rmdir()
    # a descriptor of a dead process in /proc answers ESRCH; on a plain tree the file must be opened again
    board.context.files.close()


def test_a_vanished_process_is_reported_until_a_new_generation(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(ProcessSource)
    seen(board)
    source.sample(0)
    vanish(board)
    for _ in range(5):
        assert values(source, board.second(source), "process", "rank2")["alive"] == 0
    board.write("/proc/77/stat", stat_of(77))
    seen(board, generation=2, pid=77)
    assert values(source, board.second(source), "process", "rank2")["alive"] == 1


def stat_of(pid: int) -> str:
    return f"{pid} (python) S 1 1 1 0 -1 4194304 0 0 0 0 5 5 0 0 20 0 3 0 100 1000 10 0\n"


def test_a_vanished_process_is_forgotten_after_a_while(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(ProcessSource, report_gone_s=3.0)
    seen(board)
    vanish(board)
    assert values(source, board.second(source), "process", "rank2")["alive"] == 0
    assert devices(board.second(source, 4.0), "process") == ()
    assert board.context.ranks.all() == []


def test_a_clean_end_is_no_news(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(ProcessSource)
    seen(board)
    board.context.ranks.leaving("job", 1, 2)
    vanish(board)
    assert devices(board.second(source), "process") == ()


def test_a_rank_without_pid_shows_its_progress_only(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(ProcessSource)
    board.context.ranks.seen("job", 1, 0, last_step=3, phase="train", seen_monotonic_ns=0)
    row = values(source, source.sample(0), "process", "rank0")
    assert row["last_step"] == 3
    assert "alive" not in row


@pytest.mark.parametrize(
    ("membership", "path", "before", "after"),
    [
        (
            "0::/job/rank2\n",
            "/sys/fs/cgroup/job/cpu.stat",
            "usage_usec 1\nthrottled_usec 1000\n",
            "usage_usec 2\nthrottled_usec 501000\n",
        ),
        (
            "0::/job/rank2\n",
            "/sys/fs/cgroup/unified/job/rank2/cpu.stat",
            "throttled_usec 0\n",
            "throttled_usec 500000\n",
        ),
        (
            "3:cpu,cpuacct:/a\n",
            "/sys/fs/cgroup/cpu,cpuacct/a/cpu.stat",
            "throttled_time 7\n",
            "throttled_time 500000007\n",
        ),
        (
            "4:memory:/m\n3:cpu:/a\n0::/\n",
            "/sys/fs/cgroup/cpu/a/cpu.stat",
            "throttled_time 0\n",
            "throttled_time 500000000\n",
        ),
    ],
)
def test_throttling_in_both_versions(tmp_path: Path, membership: str, path: str, before: str, after: str) -> None:
    board = bench(tmp_path, "node")
    board.write("/proc/26231/cgroup", membership)
    board.write(path, before)
    source = board.build(ProcessSource)
    seen(board)
    assert "throttled_ratio" not in values(source, source.sample(0), "process", "rank2")
    board.write(path, after)
    assert values(source, board.second(source), "process", "rank2")["throttled_ratio"] == pytest.approx(0.5)


def test_moving_to_another_group_starts_anew(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write("/proc/26231/cgroup", "0::/free\n")
    board.write("/sys/fs/cgroup/free/cpu.stat", "throttled_usec 900000\n")
    board.write("/sys/fs/cgroup/tight/cpu.stat", "throttled_usec 100000\n")
    source = board.build(ProcessSource)
    seen(board)
    source.sample(0)
    board.write("/proc/26231/cgroup", "0::/tight\n")
    assert "throttled_ratio" not in values(source, board.second(source, 5.0), "process", "rank2")
    board.write("/sys/fs/cgroup/tight/cpu.stat", "throttled_usec 1000000\n")
    assert values(source, board.second(source), "process", "rank2")["throttled_ratio"] == pytest.approx(0.9)


def test_small_parsers() -> None:
    assert stat_fields("7 (a) b) S 1 2")[:2] == ["S", "1"]
    assert ancestors("/a/b/") == ["/a/b", "/a"]
    assert ancestors("/../../x") == []
    assert ancestors("/") == []
    assert throttled_s("nr_periods 3\n") is None


def test_own_process_on_the_real_tree(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.context.files.root = ""
    seen(board, pid=os.getpid())
    source = board.build(ProcessSource)
    row = values(source, source.sample(0), "process", "rank2")
    assert row["alive"] == 1
    assert row["state"] in (1, 2)
    assert row["rss_bytes"] > 1e6
