"""A real job of three ranks: the shares change on one step, the model stays that of even shares, a flipped bit names its rank."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from collectors.sources.steps import parse, to_row
from detectors.base import Frame
from detectors.steps.corruption import CorruptionDetector
from tests.detectors.steps.jobs import topology_of
from tests.hook.cluster import Cluster, wait_for
from tests.hook.jobs.shared import global_batch, loss_of, make_model
from trainwarden.records import StepReport, StepRow, Verdict

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WORLD, TOTAL = 3, 12


class Collector:
    """Keeps the rows of steps that the ranks send."""

    def __init__(self, path: Path) -> None:
        self.rows: list[tuple[int, StepRow]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            datagram = parse(self._socket.recv(65536))
            if datagram.t == "step":
                self.rows.append((datagram.rank, to_row(datagram)))


def weights_of_one_process(steps: int) -> list[float]:
    """The model after so many steps on the whole global batch in one process."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, global_batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Cluster, Collector]]:
    collector = Collector(tmp_path / "collector.sock")
    flags = ["--nnodes", "1:1", "--nproc-per-node", str(WORLD)]
    cluster = Cluster(tmp_path, 1, ["--folder", str(tmp_path), "--flip", "1"], flags, "shared.py")
    cluster.env["TRAINWARDEN_SOCKET"] = str(tmp_path / "collector.sock")
    try:
        cluster.start_warden("n0")
        yield cluster, collector
    finally:
        cluster.close()


def change(cluster: Cluster, shares: list[int]) -> int:
    """Order the shares as the action service does; the step from which they hold."""
    for phase in ("prepare", "go"):
        args = {"phase": phase, "id": f"c{shares}", "shares": shares, "deadline_ms": 20_000}
        code, answer = cluster.command("n0", "shares", args, expires_at_ns=2**62)
        assert (code, answer["status"]) == (200, "done"), answer
    return int(answer["result"]["step"])


def verdicts_on(rows: list[tuple[int, StepRow]]) -> list[Verdict]:
    """What the detector says when each step's rows come in a frame of their own."""
    detector, topology, found = CorruptionDetector(), topology_of(WORLD), list[Verdict]()
    for step in sorted({row.step for _, row in rows}):
        at_ns = max(row.started_at_ns for _, row in rows if row.step == step) + 10**9
        reports = tuple(
            StepReport(
                node=f"n{rank}", observed_at_ns=at_ns, boot_id="b", job="job", rank=rank, world=WORLD, rows=(row,)
            )
            for rank, row in sorted(rows, key=lambda item: item[0])
            if row.step == step
        )
        found += detector.update(Frame(at_ns, (), reports, (), topology))
    return found


def test_shares_change_together_the_model_does_not_and_a_flipped_bit_is_named(
    running: tuple[Cluster, Collector], tmp_path: Path
) -> None:
    cluster, collector = running
    cluster.wait_rows(1, 10, WORLD)
    steps = [change(cluster, [6, 2, 4])]
    cluster.wait_rows(1, steps[0], WORLD)
    steps.append(change(cluster, [1, 10, 1]))
    rows = cluster.wait_rows(1, steps[1] + 25, WORLD)
    for rank in range(WORLD):
        mine = {row["step"]: row["share"] for row in rows if row["rank"] == rank}
        expected = {
            step: [4, 4, 4] if step < steps[0] else [6, 2, 4] if step < steps[1] else [1, 10, 1] for step in mine
        }
        assert mine == {step: shares[rank] for step, shares in expected.items()}
    assert {place for row in rows for place, count in row["errors"].items() if count} == set()

    shown = max(row["step"] for row in rows if row["weights"])
    assert shown > steps[1], "weights are shown every 20 steps"
    alone = weights_of_one_process(shown + 1)
    for row in rows:
        if row["step"] == shown:
            differences = [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(row["weights"], alone, strict=True)]
            assert max(differences) < 1e-12

    def sums() -> dict[int, list[float]]:
        """Of every step whose checksum all ranks told, by rank."""
        told: dict[int, dict[int, float]] = {}
        for rank, row in list(collector.rows):
            if not math.isnan(row.param_checksum):
                told.setdefault(row.step, {})[rank] = row.param_checksum
        return {step: [found[rank] for rank in range(WORLD)] for step, found in told.items() if len(found) == WORLD}

    wait_for("a check", sums)
    (tmp_path / "flip").touch()
    wait_for("the flip", (tmp_path / "flipped").exists)
    flipped = int((tmp_path / "flipped").read_text())
    wait_for("a check after it", lambda: max(sums()) > flipped)
    checked = sums()
    assert all(len(set(found)) == 1 for step, found in checked.items() if step < flipped)
    first = checked[min(step for step in checked if step > flipped)]
    assert first[1] != first[0] == first[2]
    verdicts = wait_for("a word of the detector, which looks twice", lambda: verdicts_on(list(collector.rows)))
    said: list[Any] = [(v.kind, v.entity.name, v.rank) for v in verdicts]
    assert said == [("silent_corruption", "n1", 1)]
