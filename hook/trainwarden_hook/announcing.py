"""Saves and evaluations that a script makes by itself are told of when they begin: no step comes meanwhile, and that is no hang.

``torch.save``, ``torch.distributed.checkpoint``, the saves of trainers and a model's switch to evaluation are looked at from the moment
a job is attached. Each does what it did; what fails here is logged once. ``TRAINWARDEN_ANNOUNCE=0`` leaves all of them as they are.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainwarden_hook.importing import Finder

if TYPE_CHECKING:
    from types import ModuleType

    from trainwarden_hook.pauses import Pauses

log = logging.getLogger("trainwarden.hook")
SWITCH = "TRAINWARDEN_ANNOUNCE"
SAVES: dict[str, tuple[str, ...]] = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save", "save_state_dict"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save", "save_state_dict"),
    "safetensors.torch": ("save_file", "save_model"),
    "accelerate.accelerator": ("Accelerator.save_state",),
    "transformers.trainer": ("Trainer._save_checkpoint", "Trainer.save_model"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint", "DeepSpeedEngine.save_16bit_model"),
    "megatron.training.checkpointing": ("save_checkpoint",),
    "megatron.training.training": ("save_checkpoint",),
    "megatron.checkpointing": ("save_checkpoint",),
    "megatron.training": ("save_checkpoint",),
}
"""Functions and methods that save, by module; a module that imported one by name has it under its own name too."""
EVALUATIONS: dict[str, tuple[str, ...]] = {
    "megatron.training.training": ("evaluate_and_print_results",),
    "megatron.training": ("evaluate_and_print_results",),
    "deepspeed.runtime.pipe.engine": ("PipelineEngine.eval_batch",),
}
MODULES = frozenset({*SAVES, *EVALUATIONS})
_OURS = "__trainwarden_announces__"


class _Ear:
    """Who is told: the newest job of this process, as long as it lives, and the models whose switches count."""

    def __init__(self) -> None:
        self.pauses: Callable[[], Pauses | None] = lambda: None
        self.models: dict[int, weakref.ref[Any]] = {}
        self.failed = False

    def tell(self, what: Callable[[Pauses], Any]) -> None:
        """Tell; a failure is logged once."""
        pauses = self.pauses()
        if pauses is None:
            return
        try:
            what(pauses)
        except Exception:
            if not self.failed:
                self.failed = True
                log.exception("a save or an evaluation could not be announced; training goes on")


_ear = _Ear()


def listen(pauses: Pauses) -> None:
    """Tell ``pauses`` from now on, whatever is imported by now or later."""
    if os.environ.get(SWITCH) == "0":
        return
    _ear.pauses = weakref.ref(pauses)
    if not any(isinstance(finder, Finder) and finder.names == MODULES for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(dict.fromkeys(MODULES, look_at)))
    for name in MODULES & set(sys.modules):
        look_at(sys.modules[name])


def watch_model(model: Any) -> None:
    """A model that switches to evaluation between steps evaluates until it is switched back, or the next step begins."""
    if os.environ.get(SWITCH) == "0":
        return
    from torch.nn import Module

    parts = [part for part in (model, getattr(model, "module", None)) if isinstance(part, Module)]
    _ear.models = {id(part): weakref.ref(part) for part in parts}
    if not hasattr(Module.train, _OURS):
        Module.train = _switching(Module.train)  # type: ignore[method-assign]


def look_at(module: ModuleType) -> None:
    """Put ourselves around what saves or evaluates in a module."""
    for paths, begin, end in (
        (SAVES.get(module.__name__, ()), _save_begins, _save_ends),
        (EVALUATIONS.get(module.__name__, ()), _evaluation_begins, _evaluation_ends),
    ):
        for path in paths:
            *outer, name = path.split(".")
            place: Any = module
            for part in outer:
                place = getattr(place, part, None)
            plain = getattr(place, name, None)
            if callable(plain) and not hasattr(plain, _OURS):
                setattr(place, name, _around(plain, begin, end))


def _save_begins(pauses: Pauses) -> None:
    pauses.save_begins()


def _save_ends(pauses: Pauses) -> None:
    pauses.save_ends()


def _evaluation_begins(pauses: Pauses) -> None:
    pauses.evaluation_begins()


def _evaluation_ends(pauses: Pauses) -> None:
    pauses.evaluation_ends()


_wrapped: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _around(plain: Any, begin: Callable[[Pauses], None], end: Callable[[Pauses], None]) -> Any:
    """The same function, told of before and after; one wrapper for all the names that it goes by."""
    known = _wrapped.get(plain)
    if known is not None:
        return known

    @functools.wraps(plain)
    def call(*args: Any, **named: Any) -> Any:
        _ear.tell(begin)
        try:
            return plain(*args, **named)
        finally:
            _ear.tell(end)

    setattr(call, _OURS, True)
    _wrapped[plain] = call
    return call


def _switching(plain: Any) -> Any:
    @functools.wraps(plain)
    def train(self: Any, mode: bool = True) -> Any:
        # asked for each module of a model, by trainers in each step: a dictionary costs a tenth of a weak set
        known = _ear.models.get(id(self))
        if known is not None and known() is self:
            _ear.tell(_evaluation_ends if mode else _evaluation_begins)
        return plain(self, mode)

    setattr(train, _OURS, True)
    return train
