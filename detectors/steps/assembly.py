"""Step reports of all ranks, put together again: one matrix per step with every rank in it."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array, nan_array
from detectors.steps.table import PLAIN_PHASES, StepTable
from trainwarden.clock import NS_PER_S

LOCAL, WAIT, DATA, DURATION, WORK, FORWARD, BACKWARD = range(7)
"""Rows of `JointStep.values`: milliseconds, and the samples (or tokens) of the step, NaN where the job does not say."""
_UP_TO_WORK = 5

MAX_VICTIMS = 64
"""A verdict names no more of those that wait: who waits in a large job is the job."""
_LATENESS_NS = 3 * NS_PER_S
_MAX_PENDING = 4096


class JointStep(msgspec.Struct):
    """One step over all ranks.

    `values` is rows × world (local, wait, data, duration, work, and where asked for forward, backward; NaN where a rank did not say), to be
    read only; `usual` false for steps that are not plain training on every rank (first, evaluation, checkpoint).
    """

    step: int
    started_at_ns: int
    heard_at_ns: int
    usual: bool
    values: Array
    seen: int = 0


class Assembly(msgspec.Struct):
    """Open steps of one job. A step closes when every rank reported it or a later one, or 3 s after it was first heard of.

    `newest` is the last step that each rank reported, -1 for none; `rows` how many of the rows of `JointStep.values` are kept.
    """

    job: str
    attempt: int = -1
    world: int = 0
    nodes: list[str] = []
    newest: Array = msgspec.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    open_steps: dict[int, JointStep] = {}
    closed_up_to: int = -1
    last_heard_ns: int = 0
    rows: int = _UP_TO_WORK

    def take(self, table: StepTable, now_ns: int, pipelined: bool = False) -> bool:
        """Take a frame's reports in; True when they began a newer attempt (or a world of another size), and open steps were forgotten.

        Reports of older attempts, repeats and rows of closed steps change nothing. With `pipelined` a rank's local time is what it says
        of its own work, see `joint_columns`.
        """
        newest = table.attempts[-1]
        if newest < self.attempt:
            return False
        present = table.of_attempt(newest)
        anew = newest > self.attempt or (present.world != self.world and max(present.worlds) > 0)
        if anew:
            self._restart(newest, present.world)
        mine = table.of_attempt(self.attempt, self.world)
        if mine.reports:
            self.nodes = mine.nodes_by_rank(self.nodes)
            self.last_heard_ns = now_ns
            self._fill(mine, joint_columns(mine, pipelined), now_ns)
        return anew

    def close(self, now_ns: int) -> list[JointStep]:
        """Steps that are complete or too old to wait for, in order; a step never closes before an earlier one."""
        done: list[JointStep] = []
        for step in sorted(self.open_steps):
            joint = self.open_steps[step]
            due = (
                joint.seen >= self.world
                or (self.newest[np.isnan(joint.values[DURATION])] > step).all()
                or now_ns - joint.heard_at_ns > _LATENESS_NS
                or len(self.open_steps) > _MAX_PENDING
            )
            if not due:
                break
            done.append(self.open_steps.pop(step))
            self.closed_up_to = step
        return done

    def _restart(self, attempt: int, world: int) -> None:
        self.attempt, self.world = attempt, world
        self.nodes = [""] * world
        self.newest = np.full(world, -1, dtype=np.int64)
        self.open_steps, self.closed_up_to = {}, -1

    def _fill(self, table: StepTable, columns: JointColumns, now_ns: int) -> None:
        if table.one_step and len(table.rows) == self.world and int(table.step[0]) not in self.open_steps:
            step = int(table.step[0])
            self.newest = np.maximum(self.newest, step)
            if step > self.closed_up_to:
                self.open_steps[step] = _whole(step, table, columns, self.rows, now_ns)
            return
        fits = (table.step > self.closed_up_to) & (table.rank >= 0) & (table.rank < self.world)
        np.maximum.at(self.newest, table.rank[fits], table.step[fits])
        for step, rows in rows_by_step(table.step, fits):
            joint = self.open_steps.get(step)
            if joint is None:
                joint = self.open_steps[step] = JointStep(
                    step, 2**63 - 1, now_ns, True, nan_array(self.rows, self.world)
                )
            fresh = rows[np.isnan(joint.values[DURATION, table.rank[rows]])]
            if not fresh.size:
                continue
            joint.values[:, table.rank[fresh]] = columns.values[: self.rows, fresh]
            joint.usual &= bool(columns.plain[fresh].all())
            joint.started_at_ns = min(joint.started_at_ns, int(table.whole("started_at_ns")[fresh].min()))
            joint.seen = int(np.isfinite(joint.values[DURATION]).sum())


def _whole(step: int, table: StepTable, columns: JointColumns, rows: int, now_ns: int) -> JointStep:
    """A step that all ranks report at once, in order: the columns are its matrix, nothing is copied."""
    started_ns, seen = int(table.started_ns.min()), int(np.isfinite(columns.values[DURATION]).sum())
    return JointStep(step, started_ns, now_ns, bool(columns.plain.all()), columns.values[:rows], seen)


class JointColumns(msgspec.Struct):
    """A table's rows in the order of `JointStep.values`, and which of them are plain training."""

    values: Array
    plain: Array


def joint_columns(table: StepTable, pipelined: bool = False) -> JointColumns:
    """Local time, wait, data, duration, work, forward and backward of each row; made once per table.

    Local is what is left of a step without the wait for the reduction. In a pipeline that would still hold the wait for the neighbouring
    stages, which all ranks of a replica share: there it is input, forward and backward, where a row says how long they took.
    Work is left out (NaN) where it is the same for all rows that were asked.
    """
    return table.kept("pipelined" if pipelined else "joint", _pipelined_columns if pipelined else _joint_columns)


def _joint_columns(table: StepTable) -> JointColumns:
    duration, wait = table.number("duration_ms"), table.number("wait_ms")
    checkpoint = np.nan_to_num(np.maximum(table.number("checkpoint_ms"), 0.0))
    samples = np.full(len(table.rows), np.nan)
    if len(set(table.sampled("samples").tolist())) > 1:
        samples = table.whole("samples").astype(np.float64)
        samples[samples <= 0] = np.nan
    local, phases = duration - wait - checkpoint, (table.number("forward_ms"), table.number("backward_ms"))
    values = np.stack([local, wait, table.number("data_ms"), duration, samples, *phases])
    return JointColumns(values, np.isin(table.phase, PLAIN_PHASES) & (checkpoint == 0.0))


def _pipelined_columns(table: StepTable) -> JointColumns:
    usual = joint_columns(table)
    busy = np.nan_to_num(usual.values[DATA]) + table.number("forward_ms") + table.number("backward_ms")
    values = usual.values.copy()
    values[LOCAL] = np.where(np.isfinite(busy), busy, usual.values[LOCAL])
    values[WAIT] = usual.values[LOCAL] + usual.values[WAIT] - values[LOCAL]
    return JointColumns(values, usual.plain)


def rows_by_step(steps: NDArray[np.int64], wanted: NDArray[np.bool_]) -> list[tuple[int, NDArray[np.int64]]]:
    """(step, row numbers) of the wanted rows, steps ascending, rows in their order.

    Examples
    --------
    >>> [(step, rows.tolist()) for step, rows in rows_by_step(np.array([5, 4, 5]), np.array([True, True, True]))]
    [(4, [1]), (5, [0, 2])]
    """
    rows = np.flatnonzero(wanted)
    if not rows.size:
        return []
    if (steps[rows] == steps[rows[0]]).all():
        return [(int(steps[rows[0]]), rows)]
    order = rows[np.argsort(steps[rows], kind="stable")]
    edges = np.flatnonzero(np.diff(steps[order])) + 1
    return [(int(steps[part[0]]), part) for part in np.split(order, edges)]
