"""Every parser of the collectors, fed with damaged captures: it answers, or refuses with the error that it names. Nothing else, ever.

Some damages each by default, with ``-m long`` thousands; `python -m benchmarks.collector_fuzz` for as many as one likes. No parser is
forgotten: whatever takes text or bytes and is not in the table of `tests.collectors.parsers` has to be in the list below, with a reason.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import pytest

import collectors
from collectors.base import registry
from tests.collectors.fuzzing import cases, failures
from tests.collectors.kit import FIXTURES
from tests.collectors.parsers import PARSERS, WITHOUT_CAPTURE

SHORT, LONG = 40, 5000
CONTENT = frozenset({
    "text", "data", "payload", "body", "content", "line", "lines", "raw", "block", "piece", "message", "stat", "loadavg", "diskstats",
    "meminfo", "os_release", "cpu_stat", "membership", "output", "document", "page", "argv",
})  # fmt: skip
"""What parameters are called that hold something read."""
TEXTS = ("str", "bytes", "bytes | bytearray", "memoryview", "list[str]", "Sequence[str]", "Iterable[str]")
ELSEWHERE = {
    "cloud.services.Azure._events": "hands on to azure_events, which is fed",
    "nvidia.child.options_of": "reads what its own parent wrote",
    "nvidia.parent.Keeper.send": "sends",
    "nvidia.parent.Process.send": "sends",
    "nvidia.source.NvmlSource._take": "tells frames from facts; the readers of both are fed",
    "pages.command.Answer.__init__": "holds a program's answer",
    "pages.command.Command.run": "runs a program",
    "pages.command.Command._read": "reads what a program writes",
    "pages.command.Command._refuse_while_stuck": "counts",
    "pages.command.Command._start": "starts a program",
    "pages.reader.PageFeed._read": "hands on to the page's reader, which is fed",
    "sources.journal.JournalSource.take": "hands on to the journal's reader, which is fed",
    "sources.process.Cgroups._find": "looks for files by what Cgroups._groups says, which is fed",
    "sources.steps.StepsSource.handle": "hands on to parse, which is fed",
    "tail.Tail._complete": "pieces of files: test_tail cuts them everywhere",
    "verbs.port.Arrival.__init__": "holds a datagram; echo.parse and sender_of are fed",
}
"""Functions that take content and are not fed, and why."""


def candidates() -> Iterator[tuple[str, CodeType]]:
    """Functions and methods of all modules of the collectors that take content."""
    for module in pkgutil.walk_packages(collectors.__path__, "collectors."):
        if "simulated" in module.name:
            continue
        loaded = importlib.import_module(module.name)
        for found in vars(loaded).values():
            if getattr(found, "__module__", "") != module.name:
                continue
            methods = vars(found).values() if inspect.isclass(found) else (found,)
            for function in (getattr(method, "__func__", method) for method in methods):
                if inspect.isfunction(function) and takes_content(function):
                    yield f"{module.name}.{function.__qualname__}".removeprefix("collectors."), function.__code__


def takes_content(function: object) -> bool:
    """Whether the first parameter is text or bytes by its type and content by its name, or the name says that it parses."""
    assert inspect.isfunction(function)
    given = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    if not given or given[0].annotation not in TEXTS:
        return False
    return given[0].name in CONTENT or function.__name__.lstrip("_").startswith(("parse", "decode"))


def called() -> set[CodeType]:
    """What runs while all parsers are fed a little."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call":
            seen.add(frame.f_code)

    sys.setprofile(note)
    try:
        for name in PARSERS:
            for data in cases(name, 0):
                try:
                    PARSERS[name].parse(data)
                except PARSERS[name].refuses:
                    continue
    finally:
        sys.setprofile(None)
    return seen


def test_no_parser_is_forgotten() -> None:
    """A function that reads something and is fed by none of the table has a reason here; a reason without such a function goes."""
    seen = called()
    missed = {name for name, code in candidates() if code not in seen}
    assert missed == set(ELSEWHERE)


def test_every_source_is_looked_at() -> None:
    walked = {module.name for module in pkgutil.walk_packages(collectors.__path__, "collectors.")}
    assert {kind.__module__ for kind in registry().all().values()} <= walked


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_parser_answers_or_refuses(name: str) -> None:
    assert list(failures(name, SHORT)) == []


@pytest.mark.parametrize("name", sorted(set(PARSERS) - WITHOUT_CAPTURE))
def test_a_whole_capture_is_not_refused(name: str) -> None:
    for seed in PARSERS[name].seeds:
        PARSERS[name].parse(seed if isinstance(seed, bytes) else (FIXTURES / seed).read_bytes())


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_parser_answers_or_refuses_whatever_comes(name: str) -> None:
    assert list(failures(name, LONG)) == []
