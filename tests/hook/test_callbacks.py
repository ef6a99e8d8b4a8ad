"""A trainer that a script imports gets our callback without a line of the script; what fails in that is the trainer's luck."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainwarden_hook import autoload
from trainwarden_hook.mailbox import Mailbox

TRANSFORMERS = """
class Trainer:
    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)
        self.model_wrapped = object()
    def add_callback(self, callback):
        self.callbacks.append(callback)
class Special(Trainer):
    def __init__(self):
        super().__init__("own")
"""
LIGHTNING = """
class Trainer:
    def __init__(self):
        self.callbacks = ["checkpoint last"]
        self.global_step = 0
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand-ins of both packages, and the finder."""
    for path, text in {
        "transformers/__init__.py": "class TrainerCallback: pass",
        "transformers/trainer.py": TRANSFORMERS,
        "pytorch_lightning/__init__.py": "class Callback: pass",
        "pytorch_lightning/trainer/__init__.py": "",
        "pytorch_lightning/trainer/trainer.py": LIGHTNING,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("transformers", "pytorch_lightning")
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in names}
    for name in kept:
        del sys.modules[name]
    before = list(sys.meta_path)
    autoload.install()
    yield tmp_path
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(kept)


class Heard:
    """Stands for the recorder's socket side."""

    def __init__(self, watch: Any) -> None:
        self.steps: list[int] = []
        self.kinds: list[str] = []
        job, recorder = watch.job, watch.job.recorder
        end = recorder.end

        def note() -> None:
            self.steps.append(recorder.step)
            end()

        recorder.end = note
        recorder.send_phase = self.kinds.append
        recorder.send_evaluation = lambda wall, length: self.kinds.append("evaluated")
        job.finish = lambda: self.kinds.append("finished")


def test_a_transformers_trainer(packages: Path) -> None:
    module = importlib.import_module("transformers.trainer")
    trainer = module.Special()
    own, ours = trainer.callbacks
    assert own == "own"
    heard = Heard(ours.watch)
    args = SimpleNamespace(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    control = SimpleNamespace(should_save=False)
    state = SimpleNamespace(global_step=0)
    ours.on_train_begin(args, state, control)
    mailbox: Mailbox = ours.watch.job.mailbox
    told: list[dict[str, Any]] = []
    mailbox.tell_saved = told.append  # type: ignore[method-assign, assignment]
    for number in range(4):
        state.global_step = number
        ours.on_step_begin(args, state, control)
        if number == 1:
            assert mailbox.handle(None, {"cmd": "arm"}) == {"step": 1, "step_ms": mailbox.step_ms, "refused": ""}
            mailbox.handle(None, {"cmd": "commit", "step": 3})
        state.global_step = number + 1
        ours.on_step_end(args, state, control)
        if control.should_save:
            ours.on_save(args, state, control)
            control.should_save = False
        if number == 1:
            ours.on_prediction_step(args, state, control)
            ours.on_prediction_step(args, state, control)
            ours.on_evaluate(args, state, control)
    ours.on_train_end(args, state, control)
    assert heard.steps == [0, 1, 2, 3]
    assert heard.kinds == ["eval", "evaluated", "finished"]
    assert [(report["step"], report["ok"]) for report in told] == [(3, True)]


def test_a_lightning_trainer(packages: Path) -> None:
    module = importlib.import_module("pytorch_lightning.trainer.trainer")
    trainer = module.Trainer()
    ours, last = trainer.callbacks
    assert last == "checkpoint last"
    heard = Heard(ours.watch)
    trainer.strategy, trainer.sanity_checking = SimpleNamespace(model=object()), True
    ours.on_train_start(trainer, None)
    ours.on_validation_start(trainer, None)
    for batch in range(4):
        ours.on_train_batch_start(trainer, None, None, batch)
        trainer.global_step += batch % 2
        ours.on_train_batch_end(trainer, None, {"loss": 0.5}, None, batch)
    ours.on_train_end(trainer, None)
    assert heard.steps == [0, 1], "a step is what the optimizer does, not a batch"
    assert heard.kinds == ["finished"], "the sanity check is no evaluation"
    assert "ModelCheckpoint" in (ours.watch.job.mailbox.handle(None, {"cmd": "arm"}) or {})["refused"]


def test_what_fails_leaves_the_trainer_alone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwarden_hook.callbacks.transformers_callback", lambda trainer: 1 / 0)
    assert importlib.import_module("transformers.trainer").Trainer("a").callbacks == ["a"]


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autoload.SWITCH, "0")
    before = list(sys.meta_path)
    autoload.install()
    assert sys.meta_path == before
