"""Callbacks for the trainers that people use, so that their scripts need no line of ours; `autoload` puts them in.

What they give: steps, the split by the gradient hook, evaluations, exits. State is saved and restored by the trainer itself;
a save by command becomes one of its own (Hugging Face), or is refused with a sentence (Lightning).
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

from trainwarden_hook.job import Job

log = logging.getLogger("trainwarden.hook")
LIGHTNING_SAVES = "Lightning saves by its own ModelCheckpoint"


def _number(value: Any) -> float | None:
    """A loss that may come as a tensor, a number or nothing."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


class Watched:
    """What both kinds share: one job, opened when training begins, told of steps and evaluations."""

    def __init__(self) -> None:
        self.job = Job()
        self._open = False
        self.loss: float | None = None

    def begin(self, model: Any) -> None:
        """Training begins; ``model`` is what the trainer has wrapped."""
        if not self._open:
            self._open = True
            self.job.guard("open", self.job.open)
        self.job.guard("hook", lambda: self.job.tap_gradients(model))

    def step_begins(self, step: int) -> None:
        """Step number ``step`` (so many are done) begins."""
        self.evaluation_ends()
        self.job.step(step).__enter__()

    def step_ends(self, samples: int | None = None) -> None:
        """It has ended."""
        self.job.guard("report", lambda: self.job.recorder.report(self.loss, samples))
        self.job.leave_step()

    def evaluation_begins(self) -> None:
        """Said once per evaluation, however often it is heard of."""
        self.job.guard("evaluation", self.job.recorder.pauses.evaluation_begins)

    def evaluation_ends(self) -> None:
        """The counterpart; nothing when none was under way."""
        self.job.guard("evaluation", self.job.recorder.pauses.evaluation_ends)

    def end(self) -> None:
        """Training has ended on this rank."""
        self.evaluation_ends()
        if self._open:
            self._open = False
            self.job.guard("finish", self.job.finish)


def transformers_callback(trainer: Any) -> Any:
    """A ``TrainerCallback`` for one ``transformers.Trainer``."""
    base: type = importlib.import_module("transformers").TrainerCallback
    watched = Watched()
    watched.job.mailbox.saves_elsewhere()

    class TrainwardenCallback(base):  # type: ignore[misc]
        """Tells Trainwarden of the trainer's steps and saves when told to."""

        watch = watched
        _asked: tuple[int, float] | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.begin(trainer.model_wrapped)

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.step_begins(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.step_ends(args.per_device_train_batch_size * args.gradient_accumulation_steps)
            wanted = watched.job.mailbox.save_at
            if wanted is not None and state.global_step >= wanted:
                watched.job.mailbox.save_at = None
                self._asked = (wanted, time.perf_counter())
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self._asked is not None:
                (wanted, began), self._asked = self._asked, None
                good = wanted == state.global_step
                error = "" if good else f"step {wanted} was passed over; the trainer is at {state.global_step}"
                stall_ms = (time.perf_counter() - began) * 1e3
                report = {"step": wanted, "ok": good, "error": error, "stall_ms": stall_ms}
                watched.job.guard("saved", lambda: watched.job.mailbox.tell_saved(report))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            watched.loss = _number((logs or {}).get("loss"))

        def on_prediction_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.evaluation_begins()

        def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.evaluation_ends()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watched.end()

    return TrainwardenCallback()


def lightning_callback(base: type) -> Any:
    """A Lightning ``Callback``; ``base`` is that class of the package in use (there are two names of it)."""
    watched = Watched()
    watched.job.mailbox.saves_elsewhere(LIGHTNING_SAVES)

    class TrainwardenCallback(base):  # type: ignore[misc]
        """Tells Trainwarden of the trainer's steps."""

        watch = watched
        _step = -1

        def on_train_start(self, trainer: Any, module: Any) -> None:
            watched.begin(trainer.strategy.model)

        def on_train_batch_start(self, trainer: Any, module: Any, *batch: Any) -> None:
            if trainer.global_step != self._step:
                self._step = trainer.global_step
                watched.step_begins(self._step)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *batch: Any) -> None:
            watched.loss = _number(outputs.get("loss") if isinstance(outputs, dict) else outputs)
            if trainer.global_step != self._step:
                watched.step_ends()

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                watched.evaluation_begins()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            watched.evaluation_ends()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            watched.end()

    return TrainwardenCallback()
