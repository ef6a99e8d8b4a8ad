"""Puts our callbacks into trainers when a script imports them; the launcher switches it on in its workers.

``TRAINWARDEN_CALLBACKS=0`` leaves everything as it is.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

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


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        try:
            self._then(module)
        except Exception:
            log.exception("no callback can be added to %s; training goes on without it", module.__name__)


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and looks at what they load."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in TRAINERS or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, TRAINERS[name])
        return spec


def install() -> None:
    """Watch imports from now on; trainers that are imported already get their callback at once."""
    if os.environ.get(SWITCH) == "0" or any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder())
    for name, into in TRAINERS.items():
        if name in sys.modules:
            into(sys.modules[name])
