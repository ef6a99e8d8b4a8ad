"""What a rank does between its steps or within one that is no training: saves and evaluations, told of when they begin and end."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwarden_hook.steps import StepRecorder

TOLD_EACH_STEP = 16
LEAST_NS, LEAST_SHARE = 20_000_000, 0.1
"""Saves shorter than this, or than this share of a step, do not make it a step with a save: scripts write metrics each step."""
now_ns = time.perf_counter_ns


class Pauses:
    """Saves and evaluations of one rank; those of other threads and of forked processes hold no training up, and are passed over.

    Of many saves between two steps only the first ones are told of one by one; the last of those lasts until the next step.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._mine = (os.getpid(), threading.get_ident())
        self._depth = 0
        self._told = 0
        self._began_ns = 0
        self._saved_ns = [0, 0]
        self._evaluating_ns = (0, 0)

    # -- saves

    def save_begins(self) -> None:
        """A save begins; one within another is part of it."""
        if not self._is_mine():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._told += 1
        self._began_ns = now_ns()
        if self._told <= TOLD_EACH_STEP:
            self._recorder.send_phase("checkpoint")

    def save_ends(self, counts: bool = True) -> None:
        """It has ended, well or badly; ``counts`` is whether its time is still to be found in a step."""
        if not self._is_mine() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        if counts:
            self._saved_ns[self._recorder.in_step] += now_ns() - self._began_ns
        if self._told < TOLD_EACH_STEP:
            self._recorder.send_phase("eval" if self._evaluating_ns[0] else "train")

    # -- evaluations

    def evaluation_begins(self) -> None:
        """Said once per evaluation, however often it is heard of."""
        if self._is_mine() and not self._evaluating_ns[0]:
            self._evaluating_ns = (time.time_ns(), now_ns())
            self._recorder.send_phase("eval")

    def evaluation_ends(self) -> None:
        """The counterpart; nothing when none was under way."""
        wall_ns, began_ns = self._evaluating_ns
        if not self._is_mine() or not wall_ns:
            return
        self._evaluating_ns = (0, 0)
        if self._recorder.in_step:
            self._recorder.send_phase("train")
            return
        self._saved_ns[0] = 0
        self._recorder.send_evaluation(wall_ns, now_ns() - began_ns)
        self._recorder.begin_gap()

    # -- for the step

    def step_begins(self) -> int:
        """What began between the steps is over; how long the script has saved since the last one, in nanoseconds."""
        if not self._evaluating_ns[0] and not self._told:
            return 0
        self.evaluation_ends()
        self._told = self._depth = 0
        return self._take(0)

    def step_ends(self) -> int:
        """How long the script has saved within the step, in nanoseconds."""
        return self._take(1) if self._saved_ns[1] else 0

    def _take(self, within: int) -> int:
        """Brief saves are nothing."""
        saved_ns, self._saved_ns[within] = self._saved_ns[within], 0
        return saved_ns if saved_ns >= max(LEAST_NS, LEAST_SHARE * self._recorder.step_ns) else 0

    def _is_mine(self) -> bool:
        return self._mine == (os.getpid(), threading.get_ident())
