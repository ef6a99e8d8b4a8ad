"""Failures that take many lines: tracebacks of Python, aborts of C++, fatal errors of the interpreter. One event each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainwarden.clock import NS_PER_S

HEADS = ("Traceback (most recent", "wing an instance of", "without an active", "Fatal Python error")
"""What the first line of a failure contains, from a rare letter on: see `collectors.patterns`."""
WAIT_NS = 2 * NS_PER_S
MOST_LINES = 500
MOST_OPEN = 64
MESSAGE_CHARS = 300

FRAME = re.compile(r'^[\s|+]{0,40}File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,100}))?')
FINAL = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,150})(?:: ?(?P<message>.*))?$")
THROWN = re.compile(r"terminate called (?:after throwing an instance of '(?P<type>[^']{1,200})'|without an active)")
WHAT = re.compile(r"^\s{1,8}what\(\):\s{1,8}(?P<message>.*)")
RAISED = re.compile(r"^Exception raised from (?P<function>\S{1,200}) at (?P<file>[^ ]{1,300}):(?P<line>\d{1,9})")
FATAL = re.compile(r"Fatal Python error: (?P<message>.*)")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
CPP_GOES_ON = (
    "Exception raised from",
    "frame #",
    "CUDA ",
    "For debugging",
    "Compile with",
    "Device-side",
    "Search for",
)
PYTHON_DUMP = ("Thread 0x", "Current thread", "Python runtime state", "Extension modules")
LEVELS = frozenset({"INFO", "WARNING", "ERROR", "DEBUG", "CRITICAL", "WARN", "NOTE", "FATAL", "TRACE"})


@dataclass
class Failure:
    """A failure as far as it was told.

    Attributes
    ----------
    kind
        ``python``, ``cpp`` or ``interpreter``.
    frame
        The innermost place that is named, ``file:line in function``.
    last
        The line that names the exception.
    prefix
        Who said it, as the launcher put it.
    told
        Its last line was so grave that it was published already.
    """

    kind: str
    head: str
    started_ns: int
    exception: str = ""
    message: str = ""
    frame: str = ""
    last: str = ""
    prefix: str = ""
    lines: int = 1
    complete: bool = False
    told: bool = False

    def text(self) -> str:
        """Head, place and exception in one line."""
        return " | ".join(part for part in (self.head.strip(), self.frame, self.last.strip()) if part)


class FailureReader:
    """Collects the failures of one stream of lines, by speaker: ranks that share a file speak at the same time."""

    def __init__(self) -> None:
        self._open: dict[str, Failure] = {}

    @property
    def is_open(self) -> bool:
        """Whether lines that follow may belong to a failure."""
        return bool(self._open)

    def feed(self, speaker: str, text: str, now_ns: int) -> tuple[Failure | None, Failure | None]:
        """Take a line.

        Returns
        -------
        tuple
            A failure that is over; and the one that this line belongs to. Either may be None.
        """
        failure = self._open.get(speaker)
        over = None
        if failure is not None:
            if failure.lines < MOST_LINES and _belongs(failure, text):
                failure.lines += 1
                return None, failure
            if not _ends(failure, text):
                return None, None
            over = self._open.pop(speaker)
        begun = _begin(text, now_ns)
        if begun is not None and len(self._open) < MOST_OPEN:
            begun.prefix = speaker.rpartition("\x1f")[2]
            self._open[speaker] = begun
        return over, begun

    def overdue(self, now_ns: int) -> Iterator[Failure]:
        """Failures of which nothing more was heard for long enough."""
        for speaker in [s for s, failure in self._open.items() if now_ns - failure.started_ns >= WAIT_NS]:
            yield self._open.pop(speaker)

    def rest(self) -> Iterator[Failure]:
        """Whatever is open, because the reader ends."""
        while self._open:
            yield self._open.popitem()[1]


def _begin(text: str, now_ns: int) -> Failure | None:
    if "Traceback (most recent call last)" in text:
        return Failure("python", text, now_ns)
    if found := THROWN.search(text):
        return Failure("cpp", text, now_ns, exception=found["type"] or "terminate", last=text)
    if found := FATAL.search(text):
        return Failure(
            "interpreter", text, now_ns, exception="Fatal Python error", message=found["message"][:MESSAGE_CHARS]
        )
    return None


def _ends(failure: Failure, text: str) -> bool:
    """Whether a line that does not belong to a failure ends it; others speak in between where prefixes are missing."""
    return failure.complete or failure.kind != "python" or failure.lines >= MOST_LINES or _begin(text, 0) is not None


def _belongs(failure: Failure, text: str) -> bool:
    return {"python": _python, "cpp": _cpp, "interpreter": _interpreter}[failure.kind](failure, text)


def _python(failure: Failure, text: str) -> bool:
    if not text.strip():
        return True
    if text.startswith(CHAINED):
        failure.complete = False
        return True
    if failure.complete:
        return False
    if text[0] in " \t|+" or text.startswith("Traceback (most recent call last)"):
        if found := FRAME.match(text):
            failure.frame = _place(found)
        return True
    found = FINAL.match(text)
    if found is None or not _names_a_type(found["type"]):
        return False
    failure.exception, failure.message = found["type"], (found["message"] or "")[:MESSAGE_CHARS]
    failure.last, failure.complete = text, True
    return True


def _cpp(failure: Failure, text: str) -> bool:
    if found := WHAT.match(text):
        failure.message, failure.last = found["message"][:MESSAGE_CHARS], text
        return True
    if found := RAISED.match(text):
        failure.frame = _place(found)
        return True
    return not text.strip() or text[0] in " \t" or text.startswith(CPP_GOES_ON)


def _interpreter(failure: Failure, text: str) -> bool:
    if (found := FRAME.match(text)) and not failure.frame:
        failure.frame = _place(found)  # most recent call first
    return not text.strip() or text[0] in " \t" or text.startswith(PYTHON_DUMP)


def _names_a_type(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last[:1].isupper() and last not in LEVELS


def _place(found: re.Match[str]) -> str:
    function = found["function"]
    return f"{found['file']}:{found['line']}" + (f" in {function}" if function else "")
