"""Questions that may never be answered: one thread at a time, stale answers are none, errors have their reason."""

from __future__ import annotations

import threading

from collectors.asking import Question
from trainwarden.clock import NS_PER_S, SimulatedClock


def test_an_answer_is_kept_until_it_is_stale_and_asked_again_when_it_is_time() -> None:
    clock, asked = SimulatedClock(), []
    block, begun = threading.Event(), threading.Event()

    def ask() -> int:
        asked.append(clock.monotonic_ns())
        begun.set()
        assert block.wait(60)
        return len(asked)

    question = Question("test", clock, 10.0, ask)
    assert question.newest() is None
    block.set()
    assert question.settle(60)
    first = question.newest()
    assert first is not None
    assert (first.value, len(asked)) == (1, 1)
    block.clear()
    begun.clear()
    clock.advance_ns(10 * NS_PER_S)
    assert question.newest() is first  # the next one is open
    assert begun.wait(60)
    clock.advance_ns(14 * NS_PER_S)
    assert question.newest() is first
    assert (question.waiting_s, len(asked)) == (14, 2)  # one question, one thread
    clock.advance_ns(2 * NS_PER_S)
    assert question.newest() is None  # older than 2.5 periods
    block.set()
    assert question.settle(60)
    newest = question.newest()
    assert newest is not None
    assert newest.value >= 2  # the answer that came late, or that of the question just begun
    assert question.settle(60)


def test_an_error_leaves_no_answer_and_the_next_question_mends_it() -> None:
    clock = SimulatedClock()
    answers: list[int] = []

    def ask() -> int:
        return answers.pop()

    question = Question("test", clock, 1.0, ask)
    question.newest()
    assert question.settle(60)
    assert isinstance(question.error, IndexError)
    assert question.newest() is None
    answers.append(7)
    question.soon()
    question.newest()
    assert question.settle(60)
    answer = question.newest()
    assert answer is not None
    assert answer.value == 7
    assert question.error is None
