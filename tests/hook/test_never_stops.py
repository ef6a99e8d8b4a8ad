"""Whoever is hung around a training process, its steps go on: collector, launcher, and both at once."""

from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import pytest
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job
from trainwarden_hook.lines import Link, Listener

STEPS = 3000


@pytest.mark.parametrize("launcher", ["reads nothing", "is gone"])
def test_nobody_listens(tmp_path: Path, launcher: str) -> None:
    collector = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    collector.bind(str(tmp_path / "collector.sock"))
    held: list[Link] = []
    listener = Listener(str(tmp_path / "mailbox.sock"), held.append)
    paths = (str(tmp_path / "collector.sock"), str(tmp_path / "mailbox.sock"))
    job = Job(Environment(uuid.uuid4().hex[:8], "n0", 1, 0, 0, 1, *paths, None, None, 60.0))
    job.open()
    if launcher == "is gone":
        listener.close()
    finished = threading.Event()

    def train() -> None:
        for number in range(STEPS):
            with job.step(number) as s:
                for _ in job.shares([1, 2], micro_batches=2):
                    pass
                s.report(loss=0.5)
        finished.set()

    threading.Thread(target=train, daemon=True).start()
    assert finished.wait(120)
    assert job.recorder.step == STEPS - 1
    assert sum(job.errors.values()) == 0
    assert job.recorder.outbox.flush(60)
    assert job.sender.dropped > 0, "a collector that reads nothing costs its datagrams"
    job.mailbox.close()
    listener.close()


def test_a_launcher_that_never_answers_ends_the_asking(tmp_path: Path) -> None:
    """A step that broke off asks where to meet; without an answer the process ends by its own error, in bounded time."""
    held: list[Link] = []
    listener = Listener(str(tmp_path / "mailbox.sock"), held.append)
    job = Job(Environment("j", "n0", 1, 0, 0, 1, None, str(tmp_path / "mailbox.sock"), None, None, 0.2))
    job.open()
    assert job.mailbox.ask({"regroup": {"step": 3}}, 0.2) is None
    from trainwarden_hook.regroup import Regroup

    job.regroup = Regroup(job, lambda: None)
    with pytest.raises(RuntimeError, match="connection closed by peer"), job.step(3):
        raise RuntimeError("connection closed by peer")
    assert not job.regrouped
    job.mailbox.close()
    listener.close()
