"""Full disks under spool, store and ledger: told, survived, and nothing lost that had a place anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.theatre import Theatre, wait_for
from trainwarden.records import StepReport

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root"),
]


@contextmanager
def small_disk(directory: Path, size_kb: int) -> Iterator[Path]:
    """A disk of so many kilobytes holds what was in the directory; what is there at the end is moved back."""
    kept = directory.with_name(directory.name + ".kept")
    directory.rename(kept)
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(directory)], check=True)
    shutil.copytree(kept, directory, symlinks=True, dirs_exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(kept)
        shutil.copytree(directory, kept, symlinks=True)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        directory.rmdir()
        kept.rename(directory)


def fill(directory: Path) -> Path:
    """Take the last byte; once more when something was freed."""
    ballast = directory / "ballast"
    with ballast.open("ab", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 4096)
        except OSError:
            return ballast


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def rows(play: Theatre) -> int:
    """Steps that the store has; 0 while it does not answer."""
    return int(play.cluster.ask_store("SELECT count() FROM steps") or 0)


def store_fills(play: Theatre) -> None:
    before = wait_for("the store to answer", lambda: rows(play))
    wait_for("rows to come in", lambda: rows(play) > before, alive=play.supervise)


def test_a_full_disk_under_the_spool_stops_nothing(play: Theatre) -> None:
    """The broker is away and a node's disk takes nothing: its newest records wait in memory, and steps come through whole."""
    play.cluster.children.stop("collector-n1")
    with small_disk(play.cluster.directory / "n1" / "spool", 64) as spool:
        fill(spool)
        play.cluster.start_collector(1)
        play.trains()
        pids = play.pids()
        play.kafka.kill()
        for number in (0, 2):
            wait_for(f"n{number} to spool", lambda n=number: play.spooled(n) > 65536)  # type: ignore[misc]
        play.kafka.start()
        play.drained((0, 2))
        play.trains()
        assert play.pids() == pids, "somebody ended or was started again"
        play.healed(play.hurt("kill", 1))
        play.cluster.children.stop("collector-n1")
        (spool / "ballast").unlink()
    play.cluster.start_collector(1)
    play.drained()
    play.assert_no_gaps(StepReport)


def test_a_full_disk_under_the_store_loses_no_row(play: Theatre) -> None:
    """What it has afterwards is compared with the topics at the end of this package."""
    play.cluster.children.stop("store")
    directory = play.cluster.directory / "clickhouse"
    with small_disk(directory, used_bytes(directory) // 1024 + 32 * 1024):
        play.cluster.start_service("store")
        store_fills(play)
        refused = "the store is not taking rows"
        wait_for("the writer to be refused", lambda: fill(directory) and refused in play.child("store").tail(3))
        play.healed(play.hurt("freeze", 2))
        play.trains()
        (directory / "ballast").unlink()
        play.supervise()
        store_fills(play)
        play.cluster.children.stop("store")
    play.cluster.start_service("store")
    store_fills(play)
