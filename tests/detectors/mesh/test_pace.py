"""A job's pace by step reports: newest is newest in time, not the last to arrive."""

from __future__ import annotations

from detectors.mesh.pace import Pace, PaceLimits, follow
from trainwarden.clock import NS_PER_MS
from trainwarden.records import StepReport, StepRow
from trainwarden.topology import Topology

LIMITS = PaceLimits(1.5, 150.0, 25.0)
STEP_NS = 100 * NS_PER_MS


def report(rank: int, steps: range, from_ns: int = 0, attempt: int = 1) -> StepReport:
    rows = tuple(StepRow(step, "train", from_ns + step * STEP_NS, 100.0) for step in steps)
    return StepReport(
        job="j", node=f"n{rank}", attempt=attempt, rank=rank, world=2, observed_at_ns=rows[-1].started_at_ns, rows=rows
    )


def after(*reports: StepReport) -> Pace:
    paces: dict[str, Pace] = {}
    for one in reports:
        paces = follow(paces, [one], Topology(), LIMITS)
    return paces["j"]


def test_what_a_hung_collector_says_when_it_wakes_is_no_standing_job() -> None:
    """Its node would look cut off while the job stands: probes to it were lost, and it would be isolated for being well."""
    pace = after(report(0, range(500)), report(1, range(150)))
    assert (pace.newest_step, pace.newest_ns) == (499, 500 * STEP_NS)


def test_a_job_that_goes_back_to_its_save_is_followed() -> None:
    pace = after(report(0, range(500)), report(0, range(300, 310), 300 * STEP_NS, attempt=2))
    assert (pace.newest_step, pace.newest_ns) == (309, 610 * STEP_NS)
