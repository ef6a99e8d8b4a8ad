"""Reading Prometheus and OpenMetrics text.

Only lines of the metrics that are asked for are taken apart; the rest of the page costs a look at its names. A line that breaks the
format is left out and counted: one bad line must not cost a device, and a guess at what it meant must not become a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from collectors.base import NAN, SourceError

MAX_PAGE_BYTES = 16 * 1024 * 1024
MAX_LABEL_SETS = 4096
NO_TEXT = (b"<", b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")  # HTML, gzip, UTF-16

_SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})?[ \t]++'
    r"([^ \t#]++)(?:[ \t]++(-?[0-9][0-9.eE+-]*+))?[ \t]*+(?:#[ \t]*+\{.*)?"
)
_LABEL = re.compile(r'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+(,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"\\": "\\", '"': '"', "n": "\n"}
_BAD_BYTES = re.compile("[\udc80-\udcff]")

Labels = Mapping[str, str]


class PageError(SourceError):
    """A page, or a tool's answer, that cannot be had or read.

    Parameters
    ----------
    reason
        Code of the gap: ``refused``, ``timeout``, ``too_large``, ``truncated``, ``not_metrics``, ``stale``...
    """


class Point(NamedTuple):
    """One sample of a page. `at_ms` is the time that the page gives it, unix milliseconds; None when it gives none."""

    labels: Labels
    value: float
    at_ms: int | None


@dataclass(frozen=True)
class Page:
    """What a page says of the metrics that were asked for.

    Attributes
    ----------
    points
        Samples by metric name, in the order of the page, each series once.
    kinds, helps
        Texts of the ``# TYPE`` and ``# HELP`` lines.
    fault_count, first_fault
        Lines left out because they break the format, and a sentence about the first.
    truncated
        The page ends in the middle: what is missing is not known.
    """

    points: Mapping[str, tuple[Point, ...]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)
    fault_count: int = 0
    first_fault: str = ""
    truncated: bool = False

    def kind(self, name: str) -> str:
        """``counter``, ``gauge``... or an empty string; OpenMetrics leaves ``_total`` out of a counter's name."""
        return self.kinds.get(name) or self.kinds.get(name.removesuffix("_total"), "")

    def help(self, name: str) -> str:
        """What the page says that the metric is."""
        return self.helps.get(name) or self.helps.get(name.removesuffix("_total"), "")


class Reader:
    """Reads pages; knows label sets again, which repeat from line to line and from page to page."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted | {name.removesuffix("_total") for name in wanted}
        self._labels: dict[str, tuple[Labels, frozenset[tuple[str, str]]]] = {}

    def read(self, body: bytes) -> Page:
        """A page.

        Raises
        ------
        PageError
            ``empty``, ``too_large`` (over 16 MiB), ``not_metrics`` (HTML, or bytes that are no text).
        """
        _refuse(body)
        text = body.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
        return _Pass(text, self._wanted, self).page()

    def labels(self, text: str) -> tuple[Labels, frozenset[tuple[str, str]]]:
        """Labels between the braces, and the same as a set; raises `ValueError`."""
        known = self._labels.get(text)
        if known is None:
            labels = parse_labels(text)
            if len(self._labels) >= MAX_LABEL_SETS:
                self._labels.clear()  # pods come and go: a set that is still in use is soon back
            known = self._labels[text] = (labels, frozenset(labels.items()))
        return known


class _Pass:
    """One way through a page."""

    def __init__(self, text: str, wanted: frozenset[str], reader: Reader) -> None:
        lines = text.split("\n")
        self._open_end = lines.pop()  # what stands behind the last line feed: nothing, on a page that is whole
        self._lines = lines
        while lines and not lines[-1].strip():
            lines.pop()
        last = lines[-1] if lines else ""
        self._open_metrics = (self._open_end or last).rstrip("\r") == "# EOF"
        self._wanted = wanted
        self._reader = reader
        self._points: dict[str, list[Point]] = {}
        self._seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        self._kinds: dict[str, str] = {}
        self._helps: dict[str, str] = {}
        self._fault_count = 0
        self._first_fault = ""

    def page(self) -> Page:
        for number, line in enumerate(self._lines, start=1):
            if line[:1] == "#":
                self._remark(line)
            elif (name := line.partition("{")[0].partition(" ")[0].partition("\t")[0]) in self._wanted and name:
                try:
                    self._sample(line)
                except ValueError as error:
                    self._fault(number, line, str(error))
        points = {name: tuple(found) for name, found in self._points.items()}
        truncated = bool(self._open_end) and not self._open_metrics
        return Page(points, self._kinds, self._helps, self._fault_count, self._first_fault, truncated)

    def _remark(self, line: str) -> None:
        word, _, rest = line[2:].partition(" ")
        if line[:2] == "# " and word in ("TYPE", "HELP"):
            name, _, text = rest.strip().partition(" ")
            if name in self._wanted:
                (self._kinds if word == "TYPE" else self._helps).setdefault(name, text.strip())

    def _sample(self, line: str) -> None:
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise ValueError("is no sample")
        if not line.isascii() and _BAD_BYTES.search(line):
            raise ValueError("is not UTF-8")
        name, label_text, value_text, time_text = match.groups()
        labels, key = self._reader.labels(label_text or "")
        point = Point(labels, to_value(value_text), self._at_ms(time_text))
        if (name, key) in self._seen:
            raise ValueError("repeats a series of this page")
        self._seen.add((name, key))
        self._points.setdefault(name, []).append(point)

    def _at_ms(self, text: str | None) -> int | None:
        """Milliseconds in Prometheus text, seconds in OpenMetrics."""
        if text is None:
            return None
        return round(float(text) * 1000) if self._open_metrics else int(text)

    def _fault(self, number: int, line: str, why: str) -> None:
        self._fault_count += 1
        if not self._first_fault:
            shown = line[:80].encode("utf-8", "backslashreplace").decode("utf-8")
            self._first_fault = f"line {number} {why}: {shown!r}"


def _refuse(body: bytes) -> None:
    if len(body) > MAX_PAGE_BYTES:
        raise PageError("too_large", f"the page has {len(body)} bytes, at most {MAX_PAGE_BYTES} are read")
    start = body[:64].lstrip()
    if not start:
        raise PageError("empty", "the page is empty")
    if start.startswith(NO_TEXT) or b"\0" in start[:4]:
        raise PageError("not_metrics", f"the page begins with {start[:20]!r}: that is no metrics text")


def to_value(text: str) -> float:
    """A sample's number; raises `ValueError`. Python reads more than the format allows: ``1_000``, digits of other scripts."""
    if not text.isascii() or "_" in text:
        raise ValueError("has a value that is no number")
    try:
        value = float(text)
    except ValueError:
        raise ValueError("has a value that is no number") from None
    return NAN if math.isnan(value) else value  # one object for all, so that two equal pages compare equal


def parse_labels(text: str) -> dict[str, str]:
    r"""Labels of a series.

    Raises
    ------
    ValueError
        Bad syntax, an unknown escape, a name twice.

    Examples
    --------
    >>> parse_labels('gpu="0",path="C:\\\\",')
    {'gpu': '0', 'path': 'C:\\'}
    """
    labels: dict[str, str] = {}
    for name, value in _pairs(text):
        if name in labels:
            raise ValueError("names a label twice")
        labels[name] = _ESCAPE.sub(_unescaped, value) if "\\" in value else value
    return labels


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while text[at:].strip(" \t"):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError("has labels that cannot be read")
        yield match.group(1), match.group(2)
        at = match.end()


def _unescaped(match: re.Match[str]) -> str:
    try:
        return _ESCAPED[match.group(1)]
    except KeyError:
        raise ValueError("has an unknown escape") from None
