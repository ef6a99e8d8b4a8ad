"""The examples in docstrings are run: what a reader would try works as it stands there."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "trainwarden",
    "collectors",
    "detectors",
    "models",
    "streams",
    "actions",
    "hook/trainwarden_hook",
    "benchmarks",
)


def with_examples() -> list[str]:
    """Modules that have one which can be run anywhere (some need a broker or a store: marked to be skipped)."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    own = [path.relative_to(ROOT) for path in paths if can_run(path.read_text())]
    return [".".join(path.with_suffix("").parts).removeprefix("hook.").removesuffix(".__init__") for path in own]


def can_run(source: str) -> bool:
    """Whether an example is not marked to be skipped."""
    return any(line.lstrip().startswith(">>> ") and "+SKIP" not in line for line in source.splitlines())


@pytest.mark.parametrize("name", with_examples())
def test_examples_say_what_happens(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0, "no example was run"
    assert not found.failed


def test_there_are_examples() -> None:
    assert len(with_examples()) > 20
