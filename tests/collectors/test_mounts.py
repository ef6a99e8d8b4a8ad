"""The mounts source: a file system that hangs costs its own row and is told once; NFS by the kernel's record."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from collectors.base import Sample
from collectors.machine.mounts import lustre_client, parse_lustre, parse_mounts, parse_mountstats
from collectors.sources.mounts import MountsSource, Space
from tests.collectors.kit import FIXTURES, Bench, bench, devices, values

INFO = """21 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
22 21 0:42 / /mnt/nfs/test rw shared:144 - nfs4 192.168.1.1:/srv/test rw,vers=4.0
23 21 0:50 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw
24 21 8:1 /var/lib /bind rw - ext4 /dev/sda1 rw
25 21 0:60 / /mnt/my\\040data ro - ext4 /dev/sdb1 ro
26 21 0:4 / /proc rw - proc proc rw
27 21 0:70 / /var/lib/lxcfs rw - fuse.lxcfs lxcfs rw
"""
STATISTICS = (FIXTURES / "machine/proc/26231/mountstats").read_text()
SPACE = Space(4096, 1000, 300, 250, 100, 90)


def machine(tmp_path: Path) -> Bench:
    board = bench(tmp_path)
    board.write("/proc/1/mountinfo", INFO)
    board.write("/proc/1/mountstats", STATISTICS)
    board.write(
        "/proc/fs/lustre/llite/scratch-ffff8881/stats",
        "read_bytes 9 samples [bytes] 0 1048576 1000\nwrite_bytes 9 samples\n",
    )
    return board


def built(board: Bench, **settings: object) -> MountsSource:
    source = board.build(MountsSource, **{"every_s": 1.0, "local_every_s": 1.0, **settings})
    assert isinstance(source, MountsSource)
    source.ask = lambda path: SPACE
    return source


def later(board: Bench, source: MountsSource, seconds: float = 1.0) -> Sample:
    board.second(source, seconds)
    assert source.settle(60)
    return source.sample(0)


def test_space_and_kind_of_each_file_system(tmp_path: Path) -> None:
    board = machine(tmp_path)
    source = built(board)
    sample = later(board, source, 0.0)
    assert devices(sample, "mount") == (
        "/mnt/nfs/test",
        "/scratch",
        "/",
        "/mnt/my data",
    )  # /bind is the same disk again
    row = values(source, sample, "mount", "/mnt/my data")
    del row["answer_ms"]
    assert row == pytest.approx({
        "stalled": 0, "waiting_s": 0, "used_ratio": 700 / 950, "free_bytes": 250 * 4096, "inodes_used_ratio": 0.1, "read_only": 1,
        "remote": 0,
    })  # fmt: skip


def test_nfs_and_lustre_traffic(tmp_path: Path) -> None:
    board = machine(tmp_path)
    source = built(board)
    later(board, source, 0.0)
    board.edit("/proc/1/mountstats", "READ: 1298 1298 0 207680 1210292152 6 79386 79407",
               "READ: 1398 1400 3 207680 1210292252 106 80386 80607")  # fmt: skip
    board.write("/proc/fs/lustre/llite/scratch-ffff8881/stats", "read_bytes 9 samples [bytes] 0 1048576 3000\n")
    sample = later(board, source, 2.0)
    row = values(source, sample, "mount", "/mnt/nfs/test")
    assert (row["nfs_operations_per_s"], row["nfs_retransmits_per_s"], row["nfs_timeouts_per_s"]) == (50, 1, 1.5)
    assert (row["nfs_round_trip_ms"], row["nfs_queue_ms"], row["nfs_total_ms"]) == (10, 1, 12)
    assert row["read_bytes_per_s"] == 50
    row = values(source, sample, "mount", "/scratch")
    assert row["read_bytes_per_s"] == 1000
    assert "write_bytes_per_s" not in row


def test_a_mount_that_hangs_costs_its_row_and_is_told_once(tmp_path: Path) -> None:
    board = machine(tmp_path)
    source = built(board, deadline_s=5)
    release = threading.Event()
    asked: list[str] = []

    def ask(path: str) -> Space:
        asked.append(path)
        assert not path.endswith("/test") or release.wait(60)
        return SPACE

    source.ask = ask
    for _ in range(9):
        sample = board.second(source)
        for point, watched in source._watched.items():
            assert point == "/mnt/nfs/test" or watched.question.settle(60)
    row = values(source, sample, "mount", "/mnt/nfs/test")
    assert (row["stalled"], row["waiting_s"], "used_ratio" in row) == (1, 8, False)
    assert "nfs_operations_per_s" in row  # the kernel's record can be read all the while
    assert values(source, sample, "mount", "/scratch")["stalled"] == 0
    assert [gap.reason for gap in sample.gaps] == ["stalled"]
    assert [path for path in asked if path.endswith("/test")] == [
        f"{board.root}/mnt/nfs/test"
    ]  # one question, one thread
    assert board.outlet.codes == ["mount_stalled"]
    event, urgent = board.outlet.logs[0]
    assert (urgent, event.attributes) == (
        True,
        {"mount": "/mnt/nfs/test", "kind": "nfs4", "server": "192.168.1.1:/srv/test"},
    )
    release.set()
    assert source.settle(60)
    board.second(source)
    assert board.outlet.codes == ["mount_stalled", "mount_answers"]


def test_a_mount_that_fails_keeps_its_row(tmp_path: Path) -> None:
    board = machine(tmp_path)
    source = built(board)

    def refuse(path: str) -> Space:
        raise OSError(116, "Stale file handle", path)

    source.ask = refuse
    sample = later(board, source, 0.0)
    assert values(source, sample, "mount", "/scratch") == {"stalled": 0, "waiting_s": 0, "read_only": 0, "remote": 1}


def test_without_a_list_of_mounts_it_is_quiet(tmp_path: Path) -> None:
    board = bench(tmp_path)
    assert built(board).sample(0) == Sample()


def test_the_captured_list_of_mounts() -> None:
    mounts = parse_mounts((FIXTURES / "machine/proc/26231/mountinfo").read_text(), 10)
    assert [(mount.point, mount.kind) for mount in mounts] == [
        ("/mnt/nfs/test", "nfs"), ("/", "ext4"), ("/var/lib/containers/storage/overlay", "xfs"),
    ]  # fmt: skip
    assert len(parse_mounts("\n".join(f"1 1 0:{i} / /m{i} rw - nfs s:/{i} rw" for i in range(64)), 24)) == 24


def test_the_captured_statistics_of_nfs() -> None:
    counts = parse_mountstats(STATISTICS)["/mnt/nfs/test"]
    assert counts.operations == 1298 + 2927395007
    assert counts.transmissions == 1298 + 2927394995
    assert counts.queue_ms == 6  # the other stands near 2^64: it once went below zero
    assert (counts.bad_xids, counts.backlog) == (0, 0)


def test_shapes_of_lustre() -> None:
    assert lustre_client(["home-ffff1", "my-fs-ffff2"], "1@o2ib:/my-fs") == "my-fs-ffff2"
    assert lustre_client(["home-ffff1"], "junk") == ""
    assert parse_lustre("read_bytes x\n\nwrite_bytes 1 samples [bytes] 1 1 \u0663\n") == {}


def test_a_mount_that_is_covered_at_one_of_its_paths_stands_at_the_others() -> None:
    lines = (
        "194 21 0:42 / /mnt/data rw - nfs4 server:/data rw\n"
        "177 21 0:42 / /mnt/data-too rw - nfs4 server:/data rw\n"
        "198 21 0:44 / /mnt/data-too rw - nfs server:/old rw\n"
        "199 21 0:45 / /mnt/gone rw - nfs server:/gone rw\n"
        "200 21 0:46 / /mnt/gone rw - tmpfs tmpfs rw\n"
    )
    assert [(mount.point, mount.kind) for mount in parse_mounts(lines, 9)] == [
        ("/mnt/data", "nfs4"),
        ("/mnt/data-too", "nfs"),
    ]
