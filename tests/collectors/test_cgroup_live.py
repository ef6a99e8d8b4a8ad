"""Throttling of a real process by a real control group, whichever version the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectors.base import Facts
from collectors.files import Files
from collectors.ranks import RankBoard
from collectors.sources.process import ProcessSource
from tests.collectors.kit import Kept, values
from trainwarden.clock import SystemClock
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_settings

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
NAME = "tw-test-throttle"

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that allows a twentieth of a core."""
    root = V1 if (V1 / "cpu.cfs_quota_us").exists() or (V1 / "cpu.stat").exists() else V2
    path = root / NAME
    try:
        path.mkdir(exist_ok=True)
        if root == V1:
            (path / "cpu.cfs_quota_us").write_text("5000")
        else:
            (path / "cpu.max").write_text("5000 100000")
    except OSError as error:
        pytest.skip(f"no control group with a processor quota can be made here: {error}")
    yield path
    path.rmdir()


def test_a_throttled_process_shows_it(group: Path, tmp_path: Path) -> None:
    from collectors.base import Context

    clock = SystemClock()
    ranks = RankBoard()
    context = Context("n0", clock, Files(Path("/"), clock), ranks, Kept(), Metrics("t"), tmp_path, tmp_path, Facts())
    source = ProcessSource(context, parse_settings(ProcessSource.Settings, {}, "process"))
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
        ranks.seen("j", 1, 0, pid=burner.pid)
        free = [values(source, source.sample(0), "process", "rank0")]
        (group / "cgroup.procs").write_text(str(burner.pid))
        throttled, cores = 0.0, 1.0
        for _ in range(100):
            clock.sleep(0.5)
            row = values(source, source.sample(0), "process", "rank0")
            throttled, cores = row.get("throttled_ratio", 0.0), row["cpu_cores"]
            if throttled > 0.2 and cores < 0.2:
                break
        burner.kill()
        burner.wait()
    assert free[0]["alive"] == 1
    assert throttled > 0.2
    assert cores < 0.2
    assert not os.path.exists(f"/proc/{burner.pid}")
