"""Something to be done with a module as soon as a script imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

log = logging.getLogger("trainwarden.hook")
Then = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, then: Then) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            # who reads a module's source or resources asks its loader, which is not us
            module.__loader__ = module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        try:
            self._then(module)
        except Exception:
            log.exception("%s is left as it is; training goes on without being told of it", module.__name__)


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the others find, and does what is wanted with what they load.

    Parameters
    ----------
    wanted
        What is to be done, by the full name of a module.
    """

    def __init__(self, wanted: Mapping[str, Then]) -> None:
        self._wanted = wanted
        self._asking: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """Modules that it waits for."""
        return frozenset(self._wanted)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._wanted or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._wanted[name])
        return spec
