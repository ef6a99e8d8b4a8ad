"""Kinds of fault: one row each, in modules by family. A new row in a `ROWS` tuple, or a new module with one, is a new kind."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from collectors.simulated.faults.base import FaultKind
from trainwarden.errors import UsageError


@cache
def kinds() -> dict[str, FaultKind]:
    """Every kind by name, sorted."""
    found: dict[str, FaultKind] = {}
    for info in pkgutil.iter_modules(__path__):
        for row in getattr(importlib.import_module(f"{__name__}.{info.name}"), "ROWS", ()):
            if row.name in found:
                raise UsageError(
                    f"fault kind {row.name!r} is defined twice, once in {info.name}: give one another name"
                )
            found[row.name] = row
    return dict(sorted(found.items()))


def kind_named(name: str) -> FaultKind:
    """The kind called `name`; raises `UsageError` naming what is near."""
    if name not in kinds():
        near = [known for known in kinds() if name.split("_", maxsplit=1)[0] in known] or list(kinds())[:6]
        raise UsageError(
            f"--faults: no fault kind is called {name!r}, near are {', '.join(near[:6])}; --list-faults shows all"
        )
    return kinds()[name]
