"""Step reports of all ranks, put together again: one row per step with every rank in it."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import Frame
from detectors.state import Array, nan_array
from trainwarden.clock import NS_PER_S
from trainwarden.records import StepReport, StepRow

LOCAL, WAIT, DATA, DURATION = range(4)
"""Rows of `JointStep.values`, milliseconds."""

_LATENESS_NS = 3 * NS_PER_S
_MAX_PENDING = 4096


class JointStep(msgspec.Struct):
    """One step over all ranks.

    `values` is 4 × world (local, wait, data, duration; ms, NaN where a rank did not say); `usual` false for steps that are not plain
    training on every rank (first, evaluation, checkpoint).
    """

    step: int
    started_at_ns: int
    heard_at_ns: int
    usual: bool
    values: Array
    seen: int = 0


class Assembly(msgspec.Struct):
    """Open steps of one job. A step closes when every rank reported it, or 3 s after it was first heard of."""

    job: str
    attempt: int = -1
    world: int = 0
    nodes: list[str] = []
    open_steps: dict[int, JointStep] = {}
    closed_up_to: int = -1
    last_heard_ns: int = 0

    def starts_anew(self, report: StepReport) -> bool:
        """Whether `report` belongs to a newer attempt (or a world of another size) than the one being put together."""
        return report.attempt > self.attempt or (
            report.attempt == self.attempt and report.world != self.world and report.world > 0
        )

    def restart(self, report: StepReport) -> None:
        """Forget open steps; what follows belongs to the report's attempt."""
        self.attempt, self.world = report.attempt, max(report.world, report.rank + 1)
        self.nodes = [""] * self.world
        self.open_steps, self.closed_up_to = {}, -1

    def add(self, report: StepReport, now_ns: int) -> None:
        """Take in a rank's rows; repeats and rows of closed steps change nothing."""
        if report.attempt < self.attempt or not 0 <= report.rank < self.world:
            return
        self.nodes[report.rank] = report.node
        self.last_heard_ns = now_ns
        for row in report.rows:
            if row.step > self.closed_up_to:
                self._fill(row, report.rank, now_ns)

    def close(self, now_ns: int) -> list[JointStep]:
        """Steps that are complete or too old to wait for, in order; a step never closes before an earlier one."""
        done: list[JointStep] = []
        for step in sorted(self.open_steps):
            joint = self.open_steps[step]
            due = (
                joint.seen >= self.world
                or now_ns - joint.heard_at_ns > _LATENESS_NS
                or len(self.open_steps) > _MAX_PENDING
            )
            if not due:
                break
            done.append(self.open_steps.pop(step))
            self.closed_up_to = step
        return done

    def _fill(self, row: StepRow, rank: int, now_ns: int) -> None:
        joint = self.open_steps.get(row.step)
        if joint is None:
            joint = self.open_steps[row.step] = JointStep(
                row.step, row.started_at_ns, now_ns, True, nan_array(4, self.world)
            )
        if np.isfinite(joint.values[DURATION, rank]):
            return
        checkpoint_ms = row.checkpoint_ms if row.checkpoint_ms > 0 else 0.0
        joint.values[:, rank] = (
            row.duration_ms - row.wait_ms - checkpoint_ms,
            row.wait_ms,
            row.data_ms,
            row.duration_ms,
        )
        joint.usual &= row.phase in ("train", "") and checkpoint_ms == 0.0
        joint.started_at_ns = min(joint.started_at_ns, row.started_at_ns)
        joint.seen += 1


def excess_over_peers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each column's distance from the median of the *other* columns, row by row.

    Parameters
    ----------
    values
        steps × ranks, NaN where unknown.

    Examples
    --------
    >>> excess_over_peers(np.array([[1.0, 1.0, 2.0, 9.0]]))
    array([[-1., -1.,  1.,  8.]])
    """
    if values.shape[1] < 2:
        return np.full_like(values, np.nan)
    result = values - _median_without_self(values)
    partial = np.isnan(values).any(axis=1)
    if partial.any():
        rows = values[partial]
        known = (~np.isnan(rows)).sum(axis=1, keepdims=True) >= 2
        median = np.nanmedian(np.where(known, rows, 0.0), axis=1, keepdims=True)
        result[partial] = np.where(known, rows - median, np.nan)
    return result


def _median_without_self(values: NDArray[np.float64]) -> NDArray[np.float64]:
    ordered = np.sort(values, axis=1)
    rank = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1, kind="stable")
    others = values.shape[1] - 1
    below, above = (others - 1) // 2, others // 2
    low = np.where(rank <= below, ordered[:, [below + 1]], ordered[:, [below]])
    high = np.where(rank <= above, ordered[:, [above + 1]], ordered[:, [above]])
    return np.asarray((low + high) / 2)


def reports_by_job(frame: Frame) -> dict[str, list[StepReport]]:
    """The frame's step reports, per job, in the frame's order."""
    grouped: dict[str, list[StepReport]] = {}
    for report in frame.steps:
        grouped.setdefault(report.job, []).append(report)
    return grouped
