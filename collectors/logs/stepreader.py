"""From step lines to rows: lines of one step joined, repeats dropped, restarts noticed, times worked out where no line says them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from collectors.logs.steplines import Bar, BatchSize, Losses, Pause, Said, StepLine
from trainwarden.clock import NS_PER_S

SETTLE_NS = NS_PER_S
MAX_STEP = 2**53
MAX_DURATION_MS = 86_400_000.0


@dataclass(frozen=True)
class Row:
    """A step that was told completely.

    Attributes
    ----------
    attempt
        Goes up by one each time the steps go back: a restart from a checkpoint.
    first
        The first step of its attempt, which compiles and warms up.
    skipped
        Steps that the loss scaler skipped since the row before.
    """

    line: StepLine
    attempt: int
    first: bool
    skipped: int


class StepReader:
    """The steps of one speaker.

    Parameters
    ----------
    attempt, step
        Where an earlier run stopped; step -1 = nothing was read yet.
    """

    def __init__(self, attempt: int = 0, step: int = -1) -> None:
        self.attempt = attempt
        self.step = step
        self._first = step < 0
        self._pending: StepLine | None = None
        self._pending_ns = 0
        self._last: StepLine | None = None
        self._begun: StepLine | None = None
        self._bar: Bar | None = None
        self._batch = 0
        self._paused = False
        self._skipped_in_all = -1
        self._skipped = 0

    def feed(self, said: Said, now_ns: int) -> list[Row]:
        """Rows that a line completes."""
        if isinstance(said, Bar):
            # the bar of an evaluation is shorter than that of the training
            if self._bar is None or said.total >= self._bar.total:
                self._bar = said
        elif isinstance(said, BatchSize):
            self._batch = said.samples
        elif isinstance(said, Pause):
            self._paused = True
        elif isinstance(said, Losses):
            if self._bar is not None:
                line = StepLine("hf", self._bar.step, self._bar.duration_ms, said.loss, said.grad_norm, said.finite)
                return list(self._step(line, now_ns))
        elif 0 <= said.step < MAX_STEP:
            return list(self._step(said, now_ns))
        return []

    def settle(self, now_ns: int, last: bool = False) -> list[Row]:
        """The row of a step of which nothing more was heard for a second; at the end (`last`) at once."""
        if self._pending is not None and (last or now_ns - self._pending_ns >= SETTLE_NS):
            return list(self._flush())
        return []

    def _step(self, said: StepLine, now_ns: int) -> Iterator[Row]:
        if said.begins:
            self._begun = said
            return
        said, self._paused = self._timed(said), False
        before = self._pending or self._last
        if self._pending is not None and said.step == self._pending.step and said.form != self._pending.form:
            self._pending = merged(self._pending, said)
            return
        if before is not None and said.step == before.step and (said.form != before.form or _same(said, before)):
            return  # a line that was written twice, or another kind of line that came late
        yield from self._flush()
        if said.step < self.step or (said.step == self.step and before is not None):
            self.attempt += 1
            self._first, self._skipped_in_all, self._last = True, -1, None
        elif said.step == self.step:
            return  # read before the agent was restarted
        self._pending, self._pending_ns, self.step = said, now_ns, said.step

    def _flush(self) -> Iterator[Row]:
        line, self._pending = self._pending, None
        if line is not None:
            yield Row(line, self.attempt, self._first, self._newly_skipped(line))
            self._last, self._first = line, False

    def _timed(self, said: StepLine) -> StepLine:
        duration_ms = said.duration_ms
        if math.isnan(duration_ms):
            duration_ms = self._from_rate(said)
        if math.isnan(duration_ms):
            duration_ms = self._from_times(said)
        if not 0 <= duration_ms <= MAX_DURATION_MS:
            duration_ms = math.nan
        return replace(said, duration_ms=duration_ms)

    def _from_rate(self, said: StepLine) -> float:
        return 1000 * self._batch / said.samples_per_s if self._batch and said.samples_per_s > 0 else math.nan

    def _from_times(self, said: StepLine) -> float:
        """From the time of the step's beginning, or of the line before; not over an evaluation or a checkpoint."""
        begun = self._begun
        if begun is not None and begun.form == said.form and begun.step == said.step:
            return 1000 * (said.at_s - begun.at_s)
        before = self._pending if self._pending is not None and self._pending.step < said.step else self._last
        if before is None or before.form != said.form or said.step <= before.step or self._paused:
            return math.nan
        return 1000 * (said.at_s - before.at_s) / (said.step - before.step)

    def _newly_skipped(self, line: StepLine) -> int:
        if not line.skipped_in_all:
            return line.skipped
        before, self._skipped_in_all = self._skipped_in_all, line.skipped
        return max(0, line.skipped - before) if before >= 0 else 0


def merged(first: StepLine, second: StepLine) -> StepLine:
    """Two kinds of lines about one step; where both say something, the one that times the step itself counts."""
    better, other = (second, first) if second.form in ("megatron", "nemo") else (first, second)

    def either(a: float, b: float) -> float:
        return b if math.isnan(a) else a

    return replace(
        better, duration_ms=either(better.duration_ms, other.duration_ms), loss=either(better.loss, other.loss),
        grad_norm=either(better.grad_norm, other.grad_norm), finite=better.finite and other.finite,
        skipped=better.skipped or (0 if other.skipped_in_all else other.skipped),
        at_s=either(better.at_s, other.at_s), wall_ns=better.wall_ns or other.wall_ns,
    )  # fmt: skip


def _same(a: StepLine, b: StepLine) -> bool:
    def equal(x: float, y: float) -> bool:
        return x == y or (math.isnan(x) and math.isnan(y))

    return (
        equal(a.loss, b.loss)
        and equal(a.grad_norm, b.grad_norm)
        and (equal(a.duration_ms, b.duration_ms) or equal(a.at_s, b.at_s))
    )
