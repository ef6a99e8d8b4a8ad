"""Ledger and topic together: every row reaches the topic, however many wait and whoever looks meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from actions.journal import Journal
from actions.ledger import Row
from tests.actions.builders import leading, plan
from trainwarden.clock import SimulatedClock
from trainwarden.records import ActionResult, ActionStatus, decode
from trainwarden.selfmetrics import Metrics


class Collecting:
    """A publisher that keeps what it gets."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.rows: list[int] = []
        self.before = before

    def publish(self, topic: str, key: bytes, value: bytes) -> None:
        del topic, key
        record = decode(value)
        if isinstance(record, ActionResult):
            self.before()
            self.rows.append(record.seq)

    def flush(self, timeout_s: float) -> None:
        del timeout_s

    def close(self) -> None:
        return None


def test_more_rows_than_one_reading_are_all_sent_again(tmp_path: Path) -> None:
    clock, publisher = SimulatedClock(), Collecting()
    with leading(tmp_path / "ledger", clock) as ledger:
        made = plan(clock)
        ledger.add_plan(made, "s", [Row.of(made, ActionStatus.DONE, str(number)) for number in range(1200)])
        journal = Journal(ledger, publisher, Metrics("t"), "c", clock)
        journal.resend()
        assert publisher.rows == list(range(1, 1201))
        journal.settle(1.0)
        assert ledger.marked("published") == 1200


def test_a_row_counts_as_published_only_after_it_was(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with leading(tmp_path / "ledger", clock) as ledger:
        publisher = Collecting()
        journal = Journal(ledger, publisher, Metrics("t"), "c", clock)
        marks: list[int] = []

        def another_thread_settles() -> None:
            journal.settle(1.0)
            marks.append(ledger.marked("published"))

        publisher.before = another_thread_settles
        made = plan(clock)
        journal.add_plan(made, "s", [Row.of(made, ActionStatus.STARTED)])
        assert marks == [0], "killed now, the row would never be told"
        journal.settle(1.0)
        assert ledger.marked("published") == 1
