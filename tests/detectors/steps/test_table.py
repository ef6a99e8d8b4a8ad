"""Columns are what a loop over rows would read."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from detectors.base import Frame
from detectors.steps.assembly import DURATION, LOCAL, Assembly
from detectors.steps.table import StepTable, tables_of
from tests.detectors.steps.jobs import JOB, frames, local_times, topology_of
from trainwarden.records import StepReport, StepRow


def report(rank: int, steps: tuple[int, ...], world: int = 2, attempt: int = 0, job: str = JOB) -> StepReport:
    rows = tuple(StepRow(step, "train", 1000 + step, 10.0 * step + rank, wait_ms=float(rank)) for step in steps)
    return StepReport(node=f"n{rank}", job=job, attempt=attempt, rank=rank, world=world, rows=rows)


def test_columns_hold_every_row_in_order() -> None:
    table = StepTable(JOB, [report(1, (4, 5)), report(0, (4,)), report(0, ())])
    assert table.rank.tolist() == [1, 1, 0]
    assert table.step.tolist() == [4, 5, 4]
    assert table.number("duration_ms").tolist() == [41.0, 51.0, 40.0]
    assert table.phase.tolist() == [2, 2, 2]
    assert not table.one_step


def test_a_whole_step_in_order_is_known_as_such() -> None:
    assert StepTable(JOB, [report(0, (4,)), report(1, (4,))]).one_step
    assert not StepTable(JOB, [report(1, (4,)), report(0, (4,))]).one_step
    assert not StepTable(JOB, [report(0, (4,)), report(1, (5,))]).one_step


def test_jobs_and_attempts_are_kept_apart() -> None:
    given = (report(0, (1,)), report(0, (2,), job="other"), report(1, (3,), attempt=1))
    tables = tables_of(Frame(0, (), given, (), topology_of(2)))
    assert {job: table.step.tolist() for job, table in tables.items()} == {JOB: [1, 3], "other": [2]}
    assert tables[JOB].attempts == (0, 1)
    assert tables[JOB].of_attempt(1).step.tolist() == [3]


def test_nodes_stay_the_same_list_until_they_change() -> None:
    known = ["n0", "n1"]
    table = StepTable(JOB, [report(0, (4,)), report(1, (4,))])
    assert table.nodes_by_rank(known) is known
    moved = StepTable(JOB, [replace(report(1, (4,)), node="spare")])
    assert moved.nodes_by_rank(known) == ["n0", "spare"]
    assert known == ["n0", "n1"]


@pytest.mark.parametrize("turned", [False, True])
def test_steps_come_together_whether_ranks_report_in_order_or_not(turned: bool) -> None:
    local = local_times(40, 5)
    assembly, found = Assembly(JOB), []
    for frame in frames(local, topology_of(5)):
        steps = frame.steps[::-1] if turned else frame.steps
        for table in tables_of(Frame(frame.now_ns, (), steps, (), frame.topology)).values():
            assembly.take(table, frame.now_ns)
        found += assembly.close(frame.now_ns)
    assert [step.step for step in found] == list(range(40))
    np.testing.assert_allclose(np.stack([step.values[LOCAL] for step in found]), local, rtol=1e-6)


def test_a_step_that_one_rank_never_reports_closes_late_and_without_it() -> None:
    local = local_times(30, 4)
    local[10, 2] = np.nan
    assembly, found = Assembly(JOB), []
    for frame in frames(local, topology_of(4)):
        for table in tables_of(frame).values():
            assembly.take(table, frame.now_ns)
        found += assembly.close(frame.now_ns)
    assert np.isnan(found[10].values[DURATION]).tolist() == [False, False, True, False]
    assert [step.step for step in found][:11] == list(range(11))
