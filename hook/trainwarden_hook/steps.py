"""One training step as a context: phases, times, the step datagram.

This is the hot path: a step of 60 ms may pay 180 us for all of it, in caches that the model has just
emptied. So the datagram is put together as text by hand (a test holds it to `wire.encode`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from types import TracebackType
from typing import Any

from trainwarden_hook.environment import Environment
from trainwarden_hook.gradients import GradientTap
from trainwarden_hook.scalars import Scalar, here, is_bad, read, scalar
from trainwarden_hook.wire import Sender, encode, plain_number

MAX_PENDING = 8
NS_PER_MS = 1e6
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


class Row:
    """A finished step whose device numbers may still be on their way."""

    __slots__ = ("head", "loss", "norm", "norm_local")

    def __init__(self, head: str, loss: Scalar, norm_local: Scalar, norm: Scalar) -> None:
        self.head = head
        self.loss = loss
        self.norm_local = norm_local
        self.norm = norm

    def ready(self) -> bool:
        """Whether all numbers have arrived."""
        return here(self.loss) and here(self.norm_local) and here(self.norm)

    def body(self) -> bytes:
        """The datagram; a number that has not arrived is absent."""
        tail = (
            _number("loss", self.loss) + _number("grad_norm_local", self.norm_local) + _number("grad_norm", self.norm)
        )
        return f"{self.head}{tail}}}".encode()


def _number(key: str, value: Scalar) -> str:
    number = value if isinstance(value, float) else read(value)
    if number is None:
        return ""
    if math.isfinite(number):
        return f',"{key}":{number:.7g}'
    return f',"{key}":"{plain_number(number)}"'


class StepRecorder:
    """Measures steps and sends them; used by the training thread only.

    Times between steps belong to the data part when the script marks no data phase itself:
    an unmarked loop fetches its batch there.
    """

    def __init__(self, sender: Sender, environment: Environment, tap: GradientTap | None) -> None:
        self._sender = sender
        self._identity = environment.identity()
        self._head = encode("step", self._identity)[:-1].decode()
        self.tap = tap
        self.parts = [0, 0, 0, 0]
        self.phases = tuple(Phase(self, index) for index in range(len(PHASES)))
        self._checkpoint_ns = 0
        self._backward_left_ns = 0
        self._pending: deque[Row] = deque()
        self._carried_ns = 0
        self._ended_ns = 0
        self._cpu_ns = 0
        self._own_ns = 0
        self._began_ns = 0
        self._entered_ns = 0
        self._loss: Scalar = None
        self._norm: Scalar = None
        self._norm_local: Scalar = None
        self._samples: int | None = None
        self._steps = 0
        self._must_measure = False
        self.step_ns = 0.0
        self.step = -1

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
        self.step = step
        self.parts = [0, 0, 0, 0]
        self._checkpoint_ns = checkpoint_ns
        self._backward_left_ns = 0
        self._loss = self._norm = self._norm_local = self._samples = None
        self._must_measure = save_follows
        self._entered_ns = entered_ns
        self._began_ns = self._ended_ns or entered_ns
        if not self._cpu_ns:
            self._cpu_ns = time.process_time_ns()
        if self.tap is not None:
            self.tap.begin(save_follows)
        self._own_ns = now_ns() - entered_ns - checkpoint_ns

    def forget_gap(self) -> None:
        """What lies between the last step and now was no fetching of data (an evaluation, for example)."""
        self._ended_ns = 0
        self._cpu_ns = 0

    def backward_left(self, left_ns: int) -> None:
        """The backward has returned: the gradients are averaged and not yet cleared."""
        self._backward_left_ns = left_ns
        self._measure_reduced()
        self._own_ns += now_ns() - left_ns

    def report(self, loss: Any, samples: int | None) -> None:
        """Take what the script says about the step."""
        started = now_ns()
        if loss is not None:
            self._loss = scalar(loss)
        if samples is not None:
            self._samples = samples
        self._own_ns += now_ns() - started

    def end(self) -> None:
        """Close the step and send what is ready."""
        ended_ns = now_ns()
        wall_ns = time.time_ns()
        tap = self.tap
        if tap is not None:
            if not self._backward_left_ns:
                self._measure_reduced()
            self._norm_local = scalar(tap.local_norm())
        head = self._text(ended_ns, wall_ns)
        self._pending.append(Row(head, self._loss, self._norm_local, self._norm))
        duration_ns = ended_ns - self._began_ns
        self.step_ns = 0.9 * self.step_ns + 0.1 * duration_ns if self.step_ns else float(duration_ns)
        self._ended_ns = ended_ns
        self._flush()
        self._steps += 1
        self._carried_ns = now_ns() - ended_ns
        if tap is not None:
            tap.settle(self.step_ns, self._own_ns + self._carried_ns)

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

    def _measure_reduced(self) -> None:
        if self.tap is not None and self._norm is None:
            self._norm = scalar(self.tap.reduced_norm(self._must_measure))

    def _text(self, ended_ns: int, wall_ns: int) -> str:
        """All of the datagram but the three numbers that may come late."""
        tap = self.tap
        duration_ns = ended_ns - self._began_ns
        start_wall_ns = wall_ns - duration_ns
        cpu_ns = time.process_time_ns()
        spent_cpu_ns, self._cpu_ns = cpu_ns - self._cpu_ns, cpu_ns
        own_ns = self._own_ns + self._carried_ns + (tap.own_ns if tap is not None else 0)
        text = (
            f'{self._head},"step":{self.step},"phase":"{self._kind()}","start_ns":{start_wall_ns},'
            f'"duration_ms":{duration_ns / NS_PER_MS:.3f}{self._split()},'
            f'"cpu_ms":{spent_cpu_ns / NS_PER_MS:.3f},"hook_us":{own_ns / 1e3:.1f}'
        )
        if tap is not None and tap.handed_ns:
            text += f',"arrived_ns":{start_wall_ns + tap.handed_ns - self._began_ns}'
        if self._samples is not None:
            text += f',"samples":{self._samples}'
        return text

    def _kind(self) -> str:
        if not self._steps:
            return "first"
        return "checkpoint" if self._checkpoint_ns else "train"

    def _split(self) -> str:
        data_ns, forward_ns, backward_ns, optimizer_ns = self.parts
        if not data_ns:
            data_ns = self._entered_ns - self._began_ns
        tap = self.tap
        wait_ns = -1
        if tap is not None and tap.handed_ns:
            if self._backward_left_ns:
                wait_ns = max(0, self._backward_left_ns - tap.handed_ns)
                backward_ns = max(0, backward_ns - wait_ns)
            else:
                # Unmarked: all local time up to the hand-over that no mark has claimed is called backward.
                claimed_ns = data_ns + forward_ns + self._checkpoint_ns
                backward_ns = max(0, tap.handed_ns - self._began_ns - claimed_ns)
                wait_ns = max(0, tap.reduced_ns - tap.handed_ns)
        text = f',"data_ms":{data_ns / NS_PER_MS:.3f}'
        if forward_ns:
            text += f',"forward_ms":{forward_ns / NS_PER_MS:.3f}'
        if backward_ns:
            text += f',"backward_ms":{backward_ns / NS_PER_MS:.3f}'
        if wait_ns >= 0:
            text += f',"wait_ms":{wait_ns / NS_PER_MS:.3f}'
        if optimizer_ns:
            text += f',"optimizer_ms":{optimizer_ns / NS_PER_MS:.3f}'
        if self._checkpoint_ns:
            text += f',"checkpoint_ms":{self._checkpoint_ns / NS_PER_MS:.3f}'
        return text

    def _flush(self) -> None:
        while self._pending and (self._pending[0].ready() or len(self._pending) > MAX_PENDING):
            self._sender.send_body(self._pending.popleft().body())

    def send_evaluation(self, start_wall_ns: int, duration_ns: int) -> None:
        """One datagram for a finished evaluation."""
        self._sender.send(
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
        self._sender.send("phase", {**self._identity, "step": self.step, "phase": phase, "at_ns": time.time_ns()})

    def drain(self) -> None:
        """Send what is left, complete or not."""
        while self._pending:
            self._sender.send_body(self._pending.popleft().body())
