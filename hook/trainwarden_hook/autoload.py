"""Puts our callbacks into trainers when a script imports them; the launcher switches it on in its workers.

``TRAINWARDEN_CALLBACKS=0`` leaves everything as it is.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from trainwarden_hook.importing import Finder

log = logging.getLogger("trainwarden.hook")
SWITCH = "TRAINWARDEN_CALLBACKS"


def _into_transformers(module: ModuleType) -> None:
    def add(trainer: Any) -> None:
        from trainwarden_hook.callbacks import transformers_callback

        trainer.add_callback(transformers_callback(trainer))

    _after_init(module.Trainer, add)


def _into_lightning(module: ModuleType) -> None:
    package = module.__name__.removesuffix(".trainer.trainer")

    def add(trainer: Any) -> None:
        from trainwarden_hook.callbacks import lightning_callback

        # the progress bar and ModelCheckpoint keep their places: the latter must stay last
        trainer.callbacks.insert(0, lightning_callback(sys.modules[package].Callback))

    _after_init(module.Trainer, add)


TRAINERS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.trainer": _into_transformers,
    "lightning.pytorch.trainer.trainer": _into_lightning,
    "pytorch_lightning.trainer.trainer": _into_lightning,
}


def _after_init(kind: Any, then: Callable[[Any], None]) -> None:
    """Let ``then(instance)`` follow the constructor; what fails in it is logged, the trainer works without."""
    plain = kind.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        try:
            then(self)
        except Exception:
            log.exception("no callback was added to %s; training goes on without it", kind.__name__)

    kind.__init__ = init


def install() -> None:
    """Watch imports from now on; trainers that are imported already get their callback at once."""
    if os.environ.get(SWITCH) == "0":
        return
    if any(isinstance(finder, Finder) and finder.names == set(TRAINERS) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder(TRAINERS))
    for name, into in TRAINERS.items():
        if name in sys.modules:
            into(sys.modules[name])
