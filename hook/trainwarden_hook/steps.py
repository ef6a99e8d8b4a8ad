"""One training step as a context: phases, times, the step datagram.

This is the hot path: a step of 60 ms may pay 180 us for all of it, in caches that the model has just
emptied. So it collects numbers only; an `Outbox` makes datagrams of them beside the training thread.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from trainwarden_hook.checksums import Checksums
from trainwarden_hook.environment import Environment
from trainwarden_hook.gradients import GradientTap
from trainwarden_hook.outbox import Outbox
from trainwarden_hook.pauses import Pauses
from trainwarden_hook.rows import NS_PER_MS, Row
from trainwarden_hook.scalars import Scalar, is_bad, scalar
from trainwarden_hook.wire import Sender, encode

DATA, FORWARD, BACKWARD, OPTIMIZER = range(4)
PHASES = ("data", "forward", "backward", "optimizer")
now_ns = time.perf_counter_ns


class Phase:
    """A reusable context that adds its time to one part of the step."""

    __slots__ = ("_entered_ns", "_index", "_recorder")

    def __init__(self, recorder: StepRecorder, index: int) -> None:
        self._recorder = recorder
        self._index = index
        self._entered_ns = 0

    def __enter__(self) -> None:
        self._entered_ns = now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left_ns = now_ns()
        self._recorder.parts[self._index] += left_ns - self._entered_ns
        if self._index == BACKWARD:
            self._recorder.backward_left(left_ns)


class StepRecorder:
    """Measures steps and sends them; used by the training thread only.

    Times between steps belong to the data part when the script marks no data phase itself:
    an unmarked loop fetches its batch there.
    """

    def __init__(self, sender: Sender, environment: Environment, tap: GradientTap | None) -> None:
        self.outbox = Outbox(sender)
        self._identity = environment.identity()
        self._head = encode("step", self._identity)[:-1].decode()
        self.tap = tap
        self.checksums: Checksums | None = None
        self.parts = [0, 0, 0, 0]
        self.phases = tuple(Phase(self, index) for index in range(len(PHASES)))
        self._checkpoint_ns = 0
        self._backward_left_ns = 0
        self._carried_ns = 0
        self._ended_ns = 0
        self._cpu_ns = 0
        self._own_ns = 0
        self._began_ns = 0
        self._entered_ns = 0
        self._loss: Scalar = None
        self._norm: Scalar = None
        self._norm_local: Scalar = None
        self._checksum: Scalar = None
        self._samples: int | None = None
        self._steps = 0
        self._saved_before_ns = 0
        self.step_ns = 0.0
        self.step = -1
        self.in_step = False
        self.pauses = Pauses(self)

    def renew(self, environment: Environment) -> None:
        """The same process in another generation; the gap is no step."""
        self._identity = environment.identity()
        self._head = encode("step", self._identity)[:-1].decode()
        self._steps = 0
        self.in_step = False
        self.forget_gap()

    # -- called around a step

    def begin(self, step: int, checkpoint_ns: int, entered_ns: int, save_follows: bool = False) -> None:
        """Open a step.

        Parameters
        ----------
        checkpoint_ns
            Time spent on a save at this step's boundary.
        save_follows
            A save is due right after this step, so its gradient norms must be known.
        """
        saved_ns = self.pauses.step_begins()
        self.step = step
        self.in_step = True
        self.parts = [0, 0, 0, 0]
        self._checkpoint_ns = checkpoint_ns
        self._backward_left_ns = 0
        self._loss = self._norm = self._norm_local = self._samples = None
        self._entered_ns = entered_ns
        self._began_ns = self._ended_ns or entered_ns
        self._saved_before_ns = min(saved_ns, entered_ns - self._began_ns) if saved_ns else 0
        if not self._cpu_ns:
            self._cpu_ns = time.process_time_ns()
        if self.tap is not None:
            self.tap.begin(save_follows)
        self._own_ns = now_ns() - entered_ns - checkpoint_ns

    def forget_gap(self) -> None:
        """What lies between the last step and now was no fetching of data (an evaluation, for example)."""
        self._ended_ns = 0
        self._cpu_ns = 0

    def begin_gap(self) -> None:
        """The same, and what comes from now on belongs to the next step."""
        self._ended_ns = now_ns()
        self._cpu_ns = 0

    def backward_left(self, left_ns: int) -> None:
        """The backward has returned: the gradients are averaged and not yet cleared."""
        self._backward_left_ns = left_ns
        tap = self.tap
        if tap is not None and tap.reduced_due:
            self._norm = scalar(tap.reduced_norm())
        self._own_ns += now_ns() - left_ns

    def report(self, loss: Any, samples: int | None) -> None:
        """Take what the script says about the step."""
        started = now_ns()
        if loss is not None:
            self._loss = scalar(loss)
        if samples is not None:
            self._samples = samples if type(samples) is int else int(samples)
        self._own_ns += now_ns() - started

    def end(self) -> None:
        """Close the step and send what is ready."""
        ended_ns = now_ns()
        wall_ns = time.time_ns()
        tap = self.tap
        if tap is not None:
            if tap.reduced_due:
                self._norm = scalar(tap.reduced_norm())
            self._norm_local = scalar(tap.local_norm())
        self._checksum = scalar(self.checksums.take(self.step)) if self.checksums is not None else None
        self.outbox.put(self._row(ended_ns, wall_ns))
        duration_ns = ended_ns - self._began_ns
        self.step_ns = 0.9 * self.step_ns + 0.1 * duration_ns if self.step_ns else float(duration_ns)
        self._ended_ns = ended_ns
        self.in_step = False
        self._steps += 1
        self._carried_ns = now_ns() - ended_ns
        if tap is not None:
            tap.settle(self.step_ns, self._own_ns + self._carried_ns)

    def last_times(self) -> tuple[int, int, int]:
        """Of the step that has just ended: its length, when the last gradient was handed over (0: not known), the wait after it."""
        tap = self.tap
        handed_ns, reduced_ns = (0, 0) if tap is None else (tap.handed_ns, tap.reduced_ns)
        returned_ns = self._backward_left_ns or reduced_ns
        wait_ns = max(0, returned_ns - handed_ns) if handed_ns else 0
        return self._ended_ns - self._began_ns, handed_ns, wait_ns

    def complete_norms(self) -> None:
        """Measure the averaged gradients of the last step if that has not been done: a save depends on them."""
        if self.tap is not None and self._norm is None:
            self._norm = scalar(self.tap.reduced_norm(must_measure=True))

    def last_is_bad(self) -> str:
        """Why the state after the last step must not be saved; empty if it may."""
        named = (("loss", self._loss), ("gradient norm", self._norm), ("local gradient norm", self._norm_local))
        for name, value in named:
            if is_bad(value):
                return f"the {name} of step {self.step} is not finite"
        return ""

    # -- inside

    def _row(self, ended_ns: int, wall_ns: int) -> Row:
        tap = self.tap
        cpu_ns = time.process_time_ns()
        spent_cpu_ns, self._cpu_ns = cpu_ns - self._cpu_ns, cpu_ns
        handed_ns, reduced_ns, own_ns = (0, 0, 0) if tap is None else (tap.handed_ns, tap.reduced_ns, tap.own_ns)
        return Row(
            self._head,
            self.step,
            not self._steps,
            self._began_ns,
            self._entered_ns,
            ended_ns,
            wall_ns,
            self._checkpoint_ns,
            handed_ns,
            reduced_ns,
            self._backward_left_ns,
            self.parts,
            spent_cpu_ns,
            self._own_ns + self._carried_ns + own_ns,
            self._samples,
            self._loss,
            self._norm_local,
            self._norm,
            tap is not None and tap.partial,
            self._checksum,
            self._saved_before_ns,
            self.pauses.step_ends(),
        )

    def send_evaluation(self, start_wall_ns: int, duration_ns: int) -> None:
        """One datagram for a finished evaluation."""
        self.outbox.send(
            "step",
            {
                **self._identity,
                "step": self.step,
                "phase": "eval",
                "start_ns": start_wall_ns,
                "duration_ms": duration_ns / NS_PER_MS,
            },
        )

    def send_phase(self, phase: str) -> None:
        """Announce that something slower than a training step begins."""
        self.outbox.send("phase", {**self._identity, "step": self.step, "phase": phase, "at_ns": time.time_ns()})
