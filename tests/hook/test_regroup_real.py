"""A rank is killed and the others keep their processes: same pids, no step lost, the same model everywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hook.cluster import Cluster

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WORLD = 4  # three are all neighbours in the ring; of four one is not told by the kernel that a peer has died


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Four launchers with a rank each."""
    made = Cluster(
        tmp_path, WORLD, ["--rows", str(tmp_path / "rows")], ["--nnodes", "4:4", "--in-process"], "steady.py"
    )
    try:
        for node in made.names:
            made.start_launcher(node)
        made.wait_rows(1, 20, WORLD)
        yield made
    finally:
        made.close()


def test_survivors_keep_their_processes_and_their_state(cluster: Cluster) -> None:
    pids = {rank: cluster.pid_of(rank, 1) for rank in range(WORLD)}
    for generation, killed in ((2, 1), (3, 0)):
        before = max(row["step"] for row in cluster.rows())
        os.kill(cluster.pid_of(killed, generation - 1), signal.SIGKILL)
        rows = cluster.wait_rows(generation, before + 20, WORLD)
        now = {rank: cluster.pid_of(rank, generation) for rank in range(WORLD)}
        assert {rank for rank in now if now[rank] != pids[rank]} == {killed}
        first = {rank: min(row["step"] for row in rows if row["rank"] == rank) for rank in range(WORLD)}
        assert len(set(first.values())) == 1, first
        done = max(row["step"] for row in cluster.rows_of(generation - 1))
        assert first[0] >= done, "a step is done again at most where some ranks had done it and others had not"
        common = min(max(row["step"] for row in rows if row["rank"] == rank) for rank in range(WORLD))
        weights = {row["rank"]: row["weights"] for row in rows if row["step"] == common}
        assert len(weights) == WORLD
        assert len(set(weights.values())) == 1, weights
        pids = now
