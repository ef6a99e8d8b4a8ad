"""Coordinated saves: arm, commit, late, refused, silent; the training thread only looks at a variable."""

from __future__ import annotations

import json
import math
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainwarden_hook import segments
from trainwarden_hook.attaching import _restore
from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job
from trainwarden_hook.mailbox import Mailbox
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.offers import Holdings
from trainwarden_hook.restore import find
from trainwarden_hook.supervisor import margin_step
from trainwarden_hook.trainers import Trainers, commit_failure


class Ranks:
    """Two trainers in this process, attached to a real mailbox socket."""

    def __init__(self, folder: Path) -> None:
        self.name = f"t{uuid.uuid4().hex[:8]}"
        self.trainers = Trainers(str(folder / "mailbox.sock"))
        self.jobs = [self._job(rank) for rank in range(2)]
        for _ in range(100):
            if len(self.trainers.peers()) == 2:
                break
            threading.Event().wait(0.05)

    def _job(self, rank: int) -> Job:
        job = Job(Environment(self.name, "n0", 1, rank, rank, 2, None, self.trainers.path, None, None, 60.0))
        job.open()
        saver = Saver(Buffers(self.name, "n0", rank), None, Stamp(2, rank, 1, 5), job.on_save)
        job.use_saver(saver, lambda: {"model": {"w": torch.ones(10)}}, 0)
        return job

    def step(self, number: int, losses: tuple[float, float] = (1.0, 1.0)) -> None:
        for job, loss in zip(self.jobs, losses, strict=True):
            with job.step(number) as s:
                s.report(loss=loss)

    def commit(self, step: int, deadline_s: float = 5.0) -> tuple[threading.Thread, dict[str, Any]]:
        """Commit in a thread, as the launcher does; returns when both ranks have heard of it."""
        result: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: result.update(self.trainers.commit([0, 1], step, deadline_s)))
        thread.start()
        return thread, result

    def wait_heard(self, step: int) -> None:
        for _ in range(200):
            if all(job.mailbox.save_at == step for job in self.jobs):
                return
            threading.Event().wait(0.01)
        raise AssertionError("the ranks did not hear of the commit")

    def close(self) -> None:
        for job in self.jobs:
            job.mailbox.close()
        self.trainers.close()
        segments.unlink_all(self.name, "n0")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_arm_tells_where_every_rank_is(ranks: Ranks) -> None:
    ranks.step(7)
    armed = ranks.trainers.arm([0, 1])
    assert armed["steps"] == {"0": 7, "1": 7}
    assert armed["silent"] == []
    assert armed["step_ms"] > 0


def test_all_ranks_save_the_same_step(ranks: Ranks) -> None:
    ranks.step(7)
    thread, result = ranks.commit(9)
    ranks.wait_heard(9)
    ranks.step(8)
    ranks.step(9)
    thread.join(60)
    assert result["steps"] == {"0": 9, "1": 9}
    assert commit_failure(result) == ""
    for rank in range(2):
        assert find(Buffers(ranks.name, "n0", rank), None, 5, None).step == 9


def test_a_rank_that_hears_late_says_so(ranks: Ranks) -> None:
    ranks.step(7)
    with ranks.jobs[1].step(8):
        pass
    thread, result = ranks.commit(8)
    with ranks.jobs[0].step(8):
        pass
    thread.join(60)
    assert result["late"]["1"] == 8
    assert "arm again" in commit_failure(result)


def test_a_state_after_a_bad_loss_is_refused_with_the_reason(ranks: Ranks) -> None:
    ranks.step(7)
    thread, result = ranks.commit(9)
    ranks.wait_heard(9)
    ranks.step(8, losses=(math.nan, 1.0))
    ranks.step(9)
    thread.join(60)
    assert result["steps"] == {"1": 9}
    assert commit_failure(result) == "rank 0 refused to save: the loss of step 8 is not finite"


def test_a_hung_rank_is_silent_at_the_deadline(ranks: Ranks) -> None:
    ranks.step(7)
    thread, result = ranks.commit(9, deadline_s=0.5)
    ranks.wait_heard(9)
    for number in (8, 9):
        with ranks.jobs[0].step(number):
            pass
    thread.join(60)
    assert (result["steps"], result["silent"]) == ({"0": 9}, [1])
    assert "rank(s) 1" in commit_failure(result)


def test_a_dead_rank_is_not_waited_for(ranks: Ranks) -> None:
    ranks.step(7)
    thread, result = ranks.commit(9, deadline_s=60)
    ranks.wait_heard(9)
    ranks.jobs[1].mailbox.close()
    for number in (8, 9):
        with ranks.jobs[0].step(number):
            pass
    thread.join(60)
    assert not thread.is_alive()
    assert result["silent"] == [1]


def test_a_rank_without_a_model_refuses_at_once() -> None:
    job = Job(Environment("t", "n0", 1, 0, 0, 1, None, None, None, None, 60.0))
    answer = job.mailbox.handle(None, {"cmd": "arm"})
    assert answer is not None
    assert "no model" in answer["refused"]


def test_a_step_that_was_passed_over_is_no_save(ranks: Ranks) -> None:
    ranks.step(7)
    thread, result = ranks.commit(9)
    ranks.wait_heard(9)
    ranks.step(12)
    thread.join(60)
    assert result["steps"] == {}
    assert "passed over" in commit_failure(result)


def test_periodic_saves_skip_a_bad_state() -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    job = Job(Environment(name, "n0", 1, 0, 0, 1, None, None, None, None, 60.0))
    reports: list[Any] = []
    saver = Saver(Buffers(name, "n0", 0), None, Stamp(1, 0, 1, 5), reports.append)
    job.use_saver(saver, lambda: {"model": {"w": torch.ones(3)}}, every=2)
    try:
        for number, loss in enumerate([1.0, 1.0, 1.0, math.inf, 1.0, 1.0]):
            with job.step(number) as s:
                s.report(loss=loss)
            saver.wait_idle(5)
        assert [report.step for report in reports if report.ok] == [2]
    finally:
        saver.close()
        segments.unlink_all(name, "n0")


@pytest.mark.parametrize(("mailbox", "left"), [(None, 0), ("/nowhere/mailbox.sock", 2)])
def test_without_our_launcher_a_finished_script_gives_its_memory_back(mailbox: str | None, left: int) -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    job = Job(Environment(name, "n0", 1, 0, 0, 1, None, mailbox, None, None, 60.0))
    saver = Saver(Buffers(name, "n0", 0), None, Stamp(1, 0, 1, 5), job.on_save)
    job.use_saver(saver, lambda: {"model": {"w": torch.ones(3)}}, every=1)
    for number in range(2):
        with job.step(number):
            pass
    job.finish()
    assert segments.unlink_all(name, "n0") == left


def test_commit_publishes_before_it_looks() -> None:
    """Whichever way the two threads interleave, a step begun after the commit saves or the rank says late."""
    mailbox = Mailbox()
    mailbox.current = 4
    assert mailbox.handle(None, {"cmd": "commit", "step": 5}) == {"late": False, "step": 4}
    assert mailbox.save_at == 5
    mailbox.current = 6
    assert mailbox.handle(None, {"cmd": "commit", "step": 6}) == {"late": True, "step": 6}
    assert mailbox.save_at is None


def test_unknown_commands_are_answered() -> None:
    assert "unknown" in str(Mailbox().handle(None, {"cmd": "dance"}))
    assert "unknown" in str(Mailbox().handle(None, {"cmd": "commit", "step": "x"}))


@pytest.mark.parametrize(("step_ms", "expected"), [(0.0, 12), (10.0, 27), (60.0, 14), (500.0, 12), (0.1, 60)])
def test_the_margin_grows_with_short_steps(step_ms: float, expected: int) -> None:
    assert margin_step({"steps": {"0": 10, "1": 9}, "step_ms": step_ms}) == expected


def test_failures_inside_are_counted_and_training_goes_on() -> None:
    job = Job(Environment("t", "n0", 1, 0, 0, 1, None, None, None, None, 60.0))
    job.use_saver(None, lambda: json.loads("no"), every=1)  # type: ignore[arg-type]
    job.recorder.tap = object()  # type: ignore[assignment]
    for number in range(3):
        with job.step(number) as s:
            s.report(loss="no number")
    assert job.errors["begin"] == 3
    assert job.errors["report"] == 3
    assert job.errors["end"] == 3


def test_an_exception_of_the_script_passes_through() -> None:
    job = Job(Environment("t", "n0", 1, 0, 0, 1, None, None, None, None, 60.0))
    with pytest.raises(KeyError), job.step(0) as s, s.forward():
        raise KeyError("mine")


def test_what_was_restored_is_told_after_the_hello_and_by_the_same_thread() -> None:
    job = Job(Environment("j", "n0", 0, 0, 0, 1, None, None, None, None, 60.0))
    told: list[str] = []
    job.recorder.outbox.send = lambda kind, fields: told.append(kind)  # type: ignore[method-assign]
    job.open()
    _restore(job, Holdings(), torch.nn.Linear(1, 1), None, {})
    assert told == ["hello", "restore"]
