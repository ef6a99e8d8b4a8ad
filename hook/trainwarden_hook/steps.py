"""One training step as a context: phases, times, the step datagram."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from trainwarden_hook.environment import Environment
from trainwarden_hook.gradients import GradientTap
from trainwarden_hook.scalars import Scalar, here, is_bad, read, scalar
from trainwarden_hook.wire import Sender

MAX_PENDING = 8
NS_PER_MS = 1e6
PHASES = ("data", "forward", "backward", "optimizer")


class Phase:
    """A reusable context that adds its time to one part of the step."""

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._entered_ns = 0

    def __enter__(self) -> None:
        self._entered_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.close_phase(self._name, self._entered_ns, time.perf_counter_ns())


@dataclass(slots=True)
class Row:
    """A finished step whose device numbers may still be on their way."""

    fields: dict[str, object]
    late: dict[str, Scalar] = field(default_factory=dict)

    def ready(self) -> bool:
        """Whether all numbers have arrived."""
        return all(here(value) for value in self.late.values())

    def complete(self) -> dict[str, object]:
        """All fields; a number that has not arrived is absent."""
        return {**self.fields, **{key: read(value) for key, value in self.late.items()}}


class StepRecorder:
    """Measures steps and sends them; used by the training thread only.

    Times between steps belong to the data part when the script marks no data phase itself:
    an unmarked loop fetches its batch there.
    """

    def __init__(self, sender: Sender, environment: Environment, tap: GradientTap | None) -> None:
        self._sender = sender
        self._identity = environment.identity()
        self.tap = tap
        self._parts: dict[str, float] = {}
        self._backward_ns: tuple[int, int] | None = None
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
        self.step_ns = 0.0
        self.step = -1
        self.phases = {name: Phase(self, name) for name in PHASES}

    # -- called around a step

    def begin(self, step: int, checkpoint_ns: int, entered_ns: int) -> None:
        """Open a step; ``checkpoint_ns`` was spent on a save at its boundary."""
        self.step = step
        self._parts = {"checkpoint": checkpoint_ns} if checkpoint_ns else {}
        self._backward_ns = None
        self._loss = self._norm = self._norm_local = None
        self._samples = None
        self._entered_ns = entered_ns
        self._began_ns = self._ended_ns or entered_ns
        self._cpu_ns = self._cpu_ns or time.process_time_ns()
        if self.tap is not None:
            self.tap.begin()
        self._own_ns = time.perf_counter_ns() - entered_ns - checkpoint_ns

    def forget_gap(self) -> None:
        """What lies between the last step and now was no fetching of data (an evaluation, for example)."""
        self._ended_ns = 0
        self._cpu_ns = 0

    def close_phase(self, name: str, entered_ns: int, left_ns: int) -> None:
        """Account for a marked phase."""
        self._parts[name] = self._parts.get(name, 0) + left_ns - entered_ns
        if name == "backward":
            self._backward_ns = (entered_ns, left_ns)
            self._measure_reduced()
        self._own_ns += time.perf_counter_ns() - left_ns

    def report(self, loss: Any, samples: int | None) -> None:
        """Take what the script says about the step."""
        started = time.perf_counter_ns()
        if loss is not None:
            self._loss = scalar(loss)
        if samples is not None:
            self._samples = samples
        self._own_ns += time.perf_counter_ns() - started

    def end(self) -> None:
        """Close the step and send what is ready."""
        now_ns = time.perf_counter_ns()
        wall_ns = time.time_ns()
        self._measure_reduced()
        if self.tap is not None:
            self._norm_local = scalar(self.tap.local_norm(self.step_ns))
        self._pending.append(self._row(now_ns, wall_ns))
        self._smooth(now_ns)
        self._ended_ns = now_ns
        self._flush()
        self._steps += 1
        self._carried_ns = time.perf_counter_ns() - now_ns

    def last_is_bad(self) -> str:
        """Why the state after the last step must not be saved; empty if it may."""
        for name, value in (("loss", self._loss), ("gradient norm", self._norm), ("local gradient norm", self._norm_local)):
            if is_bad(value):
                return f"the {name} of step {self.step} is not finite"
        return ""

    # -- inside

    def _measure_reduced(self) -> None:
        if self.tap is not None and self._norm is None:
            self._norm = scalar(self.tap.reduced_norm(self.step_ns))

    def _smooth(self, now_ns: int) -> None:
        duration_ns = now_ns - self._began_ns
        self.step_ns = duration_ns if self.step_ns == 0 else 0.9 * self.step_ns + 0.1 * duration_ns

    def _row(self, now_ns: int, wall_ns: int) -> Row:
        tap = self.tap
        start_wall_ns = wall_ns - (now_ns - self._began_ns)
        cpu_now_ns = time.process_time_ns()
        fields: dict[str, object] = {
            **self._identity, "step": self.step, "phase": self._kind(), "start_ns": start_wall_ns,
            "duration_ms": (now_ns - self._began_ns) / NS_PER_MS, **self._split(now_ns),
            "arrived_ns": start_wall_ns + tap.handed_ns - self._began_ns if tap and tap.handed_ns else None,
            "cpu_ms": (cpu_now_ns - self._cpu_ns) / NS_PER_MS, "samples": self._samples,
            "hook_us": (self._own_ns + self._carried_ns + (tap.own_ns if tap else 0)) / 1e3,
        }
        self._cpu_ns = cpu_now_ns
        return Row(fields, {"loss": self._loss, "grad_norm_local": self._norm_local, "grad_norm": self._norm})

    def _kind(self) -> str:
        if self._steps == 0:
            return "first"
        return "checkpoint" if "checkpoint" in self._parts else "train"

    def _split(self, now_ns: int) -> dict[str, float]:
        parts = dict(self._parts)
        if "data" not in parts:
            gap_ns = self._entered_ns - self._began_ns
            parts["data"] = gap_ns
        handed_ns = self.tap.handed_ns if self.tap is not None else 0
        if handed_ns:
            self._split_backward(parts, handed_ns)
        return {f"{name}_ms": value / NS_PER_MS for name, value in parts.items()}

    def _split_backward(self, parts: dict[str, float], handed_ns: int) -> None:
        tap = self.tap
        if self._backward_ns is not None:
            entered_ns, left_ns = self._backward_ns
            parts["wait"] = max(0, left_ns - handed_ns)
            parts["backward"] = max(0, parts["backward"] - parts["wait"])
        elif tap is not None:
            # Unmarked: all local time up to the hand-over that no mark has claimed is called backward.
            claimed = sum(parts.get(name, 0) for name in ("data", "forward", "checkpoint"))
            parts["backward"] = max(0, handed_ns - self._began_ns - claimed)
            parts["wait"] = max(0, tap.reduced_ns - handed_ns)

    def _flush(self) -> None:
        while self._pending and (self._pending[0].ready() or len(self._pending) > MAX_PENDING):
            self._sender.send("step", self._pending.popleft().complete())

    def send_evaluation(self, start_wall_ns: int, duration_ns: int) -> None:
        """One datagram for a finished evaluation."""
        self._sender.send("step", {
            **self._identity, "step": self.step, "phase": "eval", "start_ns": start_wall_ns,
            "duration_ms": duration_ns / NS_PER_MS,
        })

    def send_phase(self, phase: str) -> None:
        """Announce that something slower than a training step begins."""
        self._sender.send("phase", {**self._identity, "step": self.step, "phase": phase, "at_ns": time.time_ns()})

    def drain(self) -> None:
        """Send what is left, complete or not."""
        while self._pending:
            self._sender.send("step", self._pending.popleft().complete())
