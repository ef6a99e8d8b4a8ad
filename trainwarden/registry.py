"""Plugins: a file in a package is the registration. Adding a source, detector, rail, backend or notifier is adding one file.

A plugin module defines exactly one class (or instance factory) carrying a `name`; configuration keys, command-line flags,
documentation and self-metrics are derived from it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Generic, TypeVar

from trainwarden.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """All subclasses of `base` found in modules under `package`, by their `name`.

    Parameters
    ----------
    package
        Dotted name, for example ``"detectors"``; sub-packages are searched too.
    base
        The class whose concrete subclasses are plugins. A plugin has a class attribute ``name: str``.

    Raises
    ------
    ConfigError
        From `get` for an unknown name (the message lists the known ones), and on loading when two plugins share a name.
    """

    def __init__(self, package: str, base: type[T]) -> None:
        self._package = package
        self._base = base
        self._found: dict[str, type[T]] | None = None

    def all(self) -> dict[str, type[T]]:
        """Plugins by name, sorted; modules are imported on the first call."""
        if self._found is None:
            self._found = dict(sorted(self._load().items()))
        return self._found

    def get(self, name: str) -> type[T]:
        """The plugin called `name`."""
        found = self.all()
        if name not in found:
            raise ConfigError(f"no {self._base.__name__} is called {name!r}: known are {', '.join(found)}")
        return found[name]

    def _load(self) -> dict[str, type[T]]:
        found: dict[str, type[T]] = {}
        for module in _modules(self._package):
            for plugin in _plugins_of(module, self._base):
                name = _name_of(plugin)
                if name in found:
                    raise ConfigError(
                        f"{self._base.__name__} {name!r} is defined twice: {found[name].__module__} and {module.__name__}"
                    )
                found[name] = plugin
        return found


def _modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, prefix=f"{package}."):
        yield importlib.import_module(info.name)


def _plugins_of(module: ModuleType, base: type[T]) -> Iterator[type[T]]:
    for _, member in inspect.getmembers(module, inspect.isclass):
        own = member.__module__ == module.__name__
        if own and issubclass(member, base) and not inspect.isabstract(member) and _name_of(member):
            yield member


def _name_of(plugin: type) -> str:
    name = plugin.__dict__.get("name", "")
    return name if isinstance(name, str) else ""
