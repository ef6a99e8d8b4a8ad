"""Finds the methods: every module of this folder that defines a subclass of `Method`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import benchmarks.detect.methods as folder
from benchmarks.detect.methods.base import Method

APART = frozenset({"base", "registry", "windows"})


class MethodError(ValueError):
    """A method that cannot be used as it is declared or asked for."""


def discover() -> dict[str, type[Method]]:
    """Every method by name, in alphabetical order."""
    found: dict[str, type[Method]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(folder.__path__)):
        if module in APART:
            continue
        for method in declared_in(f"{folder.__name__}.{module}"):
            if method.name in found:
                raise MethodError(
                    f"two methods are called {method.name!r}: {found[method.name].__module__} and {module}"
                )
            found[method.name] = method
    return dict(sorted(found.items()))


def declared_in(module: str) -> list[type[Method]]:
    """Concrete methods that the module itself defines."""
    loaded = importlib.import_module(module)
    return [
        kind
        for kind in vars(loaded).values()
        if isinstance(kind, type) and issubclass(kind, Method) and kind.__module__ == module and hasattr(kind, "name")
    ]


def pick(known: dict[str, type[Method]], names: Iterable[str]) -> dict[str, type[Method]]:
    """The methods named, or all when none is."""
    wanted = list(names)
    if unknown := sorted(set(wanted) - set(known)):
        raise MethodError(f"no method is called {unknown[0]!r}: known are {', '.join(known)}")
    return {name: known[name] for name in wanted} if wanted else known


def missing(method: type[Method]) -> list[str]:
    """Packages the method needs that are not installed."""
    return [package for package in method.needs if importlib.util.find_spec(package) is None]


def version(method: type[Method]) -> str:
    """Twelve hex digits that change when the method's source, a module it depends on or a package it needs changes."""
    digest = hashlib.sha256()
    for source in sources(method):
        digest.update(meaning(source))
    for package in method.needs:
        digest.update(f"{package}={package_version(package)}".encode())
    return digest.hexdigest()[:12]


def meaning(source: Path) -> bytes:
    """A source file without its comments, layout and docstrings."""
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree).encode()


def sources(method: type[Method]) -> list[Path]:
    """Source files that decide what the method computes."""
    files = [module_path(kind.__module__) for kind in method.__mro__ if kind.__module__.startswith(folder.__name__)]
    for module in method.depends:
        path = module_path(module)
        files += sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    return [path for path in dict.fromkeys(files) if path.name != "base.py"]


def module_path(module: str) -> Path:
    """File of a module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise MethodError(f"a method depends on {module!r}, which cannot be found")
    return Path(spec.origin)


@cache
def distributions() -> Mapping[str, list[str]]:
    """Distribution names by import name; slow to find out."""
    return importlib.metadata.packages_distributions()


def package_version(package: str) -> str:
    """Version of an installed package, by import name; `absent` when it is not there."""
    for name in distributions().get(package, [package]):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "absent"
