"""The tables of known log lines (`patterns.toml`, `patterns_*.toml`) and the matcher; adding a pattern is adding an entry there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwarden.errors import ConfigError

TABLE = Path(__file__).with_name("patterns.toml")
MORE = "patterns_*.toml"
GATE_CHARS = 4
RARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ*(<!#fgjkqvwxyz")
"""Characters of which logs have few: a search for literals that begin with them passes over nearly everything."""
SEVERITIES = ("info", "warning", "error", "critical")

STAMP = re.compile(
    r"""^(?:<\d+>)?\s*(?:
        \d+,\d+,\d+,[^;]*;                                    # /dev/kmsg record
      | \[\s*[0-9.]+\]\s*                                    # dmesg, seconds since boot
      | \[\w{3}\s+\w{3}\s+\d+\s[\d:]{8}\s\d{4}\]\s*          # dmesg -T
      | \w+\s*:\w+\s*:\s(?:\S+T\S+\s)?                       # dmesg -x
      | \w{3}\s+\d+\s[\d:]{8}\s\S+\s                         # syslog
      | \d{4}-\d\d-\d\d[T ][\d:.,]+\S*\s(?:\S+\s(?=kernel:))?  # ISO
    )""",
    re.VERBOSE,
)
LAUNCHER = re.compile(r"^(?:\[(?:rank|default)\d+\]:\s*)?(?:kernel:\s*(?:\[\s*[0-9.]+\]\s*)?)?")


@dataclass(frozen=True)
class Hit:
    """A known line. `fold_key` is equal for lines that say the same."""

    name: str
    code: str
    severity: str
    attributes: dict[str, str]
    fold_key: str


@dataclass(frozen=True)
class When:
    """A severity for lines that match `regex` (and, if given, for these values of the pattern's `by` group)."""

    regex: re.Pattern[str]
    severity: str
    only: frozenset[str]


@dataclass(frozen=True)
class Pattern:
    """One entry of the table."""

    name: str
    contains: str
    regex: re.Pattern[str]
    code: str
    severity: str
    by: str = ""
    levels: Mapping[str, str] = field(default_factory=dict)
    when: tuple[When, ...] = ()
    fold: tuple[str, ...] | None = None
    source: str = ""
    gate: tuple[str, ...] = ()

    def match(self, line: str) -> Hit | None:
        """The hit, if the line is of this kind."""
        if self.contains not in line:
            return None
        found = self.regex.search(line)
        return self.hit(line, found) if found else None

    def hit(self, line: str, found: re.Match[str]) -> Hit:
        """The hit of a match."""
        groups = clean(found.groupdict())
        key = message_of(line) if self.fold is None else "\x1f".join(groups.get(name, "") for name in self.fold)
        code = self.code.format_map(groups)
        severity = self._severity(line, groups)
        # the severity is part of the key: a fatal line is never folded into a harmless one of the same code
        return Hit(self.name, code, severity, groups, "\x1f".join((code, severity, key)))

    def _severity(self, line: str, groups: Mapping[str, str]) -> str:
        value = groups.get(self.by, "")
        for when in self.when:
            if (not when.only or value in when.only) and when.regex.search(line):
                return when.severity
        return self.levels.get(value, self.severity)


@dataclass(frozen=True)
class Pair:
    """An event that takes two lines."""

    opens: re.Pattern[str]
    closes: re.Pattern[str]
    within_lines: int
    pattern: Pattern


class PatternTable:
    """All patterns, with one combined test that most lines fail."""

    def __init__(self, patterns: tuple[Pattern, ...], pairs: tuple[Pair, ...]) -> None:
        self.patterns = patterns
        self.pairs = pairs
        self._any = re.compile(by_first_letter(self.gates()))
        self._opens = [pair.opens for pair in pairs]

    def gate(self, more: Iterable[str] = ()) -> re.Pattern[bytes]:
        """Finds places in a block of lines where a known one, or one that contains a literal of `more`, may be."""
        return re.compile(by_first_letter({*self.gates(), *more}).encode())

    def gates(self) -> set[str]:
        """Literals of which every known line has one."""
        opens = [literal_of(pair.opens.pattern) for pair in self.pairs]
        return {literal for p in self.patterns for literal in p.gate or (rare_end(p.contains),)} | set(opens)

    def opens_pair(self, line: str) -> bool:
        """Whether a line is the first of two."""
        return any(opens.search(line) for opens in self._opens)

    def interesting(self, line: str) -> bool:
        """Whether some pattern may match."""
        return self._any.search(line) is not None

    def match(self, line: str) -> Hit | None:
        """What is known of a line; None for most."""
        if not self.interesting(line):
            return None
        return next((hit for pattern in self.patterns if (hit := pattern.match(line))), None)


class PairMemory:
    """Open pairs of one file."""

    def __init__(self, table: PatternTable) -> None:
        self._table = table
        self._open: dict[int, tuple[re.Match[str], int]] = {}

    @property
    def is_open(self) -> bool:
        """Whether a second line is awaited."""
        return bool(self._open)

    def feed(self, line: str) -> Hit | None:
        """The event that `line` completes, if one."""
        completed: Hit | None = None
        for index, pair in enumerate(self._table.pairs):
            opened = self._open.get(index)
            if opened is not None:
                match, left = opened
                if pair.closes.search(line):
                    completed = pair.pattern.hit(f"{match.string.strip()} {line.strip()}", match)
                if completed or left <= 1:
                    del self._open[index]
                else:
                    self._open[index] = (match, left - 1)
            found = pair.opens.search(line)
            if found and not completed and not pair.closes.search(line):
                self._open[index] = (found, pair.within_lines)
        return completed


def load(path: Path | None = None) -> PatternTable:
    """The table in `path`, else the shipped ones; raises `ConfigError` naming the entry that is wrong."""
    documents = [_document(found) for found in ([path] if path else [TABLE, *sorted(TABLE.parent.glob(MORE))])]
    return PatternTable(
        tuple(pattern for patterns, _ in documents for pattern in patterns),
        tuple(pair for _, pairs in documents for pair in pairs),
    )


def _document(path: Path) -> tuple[list[Pattern], list[Pair]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return [_pattern(e) for e in document.get("pattern", [])], [_pair(e) for e in document.get("pair", [])]
    except (OSError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"log patterns {path}: {error}") from None


def rare_end(literal: str) -> str:
    """The end of a literal from its first rare character on, if enough is left.

    Examples
    --------
    >>> rare_end("dropped by NVRM: Xid"), rare_end("table full")
    ('y NVRM: Xid', 'full')
    """
    starts = [i for i, c in enumerate(literal) if c in RARE and len(literal) - i >= GATE_CHARS]
    return literal[starts[0] :] if starts else literal


def by_first_letter(literals: Iterable[str]) -> str:
    """An expression for any of the literals; those with the same first letter share a branch, of which there are few to try then.

    Examples
    --------
    >>> by_first_letter(["ab", "ac", "x"])
    'a(?:b|c)|x(?:)'
    """
    ends: dict[str, list[str]] = {}
    for literal in sorted(literals):
        ends.setdefault(literal[0], []).append(re.escape(literal[1:]))
    return "|".join(f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in ends.items())


def literal_of(regex: str) -> str:
    """The plain text that an expression begins with."""
    return re.split(r"[\\\[(.*+?|{^$]", regex, maxsplit=1)[0]


def normal_pci(text: str) -> str:
    """One spelling of a PCI address: ``0000:3b:00.0``.

    Examples
    --------
    >>> normal_pci("00000000:3B:00.0"), normal_pci("0000:3b:00"), normal_pci("18:00.0")
    ('0000:3b:00.0', '0000:3b:00.0', '0000:18:00.0')
    """
    head, _, function = text.lower().partition(".")
    parts = head.split(":")
    domain, bus, device = (parts if len(parts) == 3 else ["0", *parts])[:3]
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or '0'}"


def message_of(line: str) -> str:
    """A line without its time stamp and prefix: equal for the same message at two times."""
    return LAUNCHER.sub("", STAMP.sub("", line, count=1), count=1).strip()


def clean(groups: Mapping[str, str | None]) -> dict[str, str]:
    """Groups that matched, blanks trimmed, PCI addresses in one spelling, bounded."""
    found = {
        name: value.strip()[:200] for name, value in groups.items() if value and value.strip() not in ("<unknown>", "")
    }
    if "pci" in found:
        found["pci"] = normal_pci(found["pci"])
    return found


def _pattern(entry: Mapping[str, Any]) -> Pattern:
    name = str(entry.get("name", "?"))
    levels = {value: level for level, values in entry.get("levels", {}).items() for value in values}
    when = tuple(
        When(_regex(name, w["regex"]), _severity(name, w["severity"]), frozenset(w.get("only", ())))
        for w in entry.get("when", ())
    )
    for level in entry.get("levels", {}):
        _severity(name, level)
    for key in ("contains", "regex", "code"):
        if not entry.get(key):
            raise ConfigError(f"pattern {name!r} has no {key!r}")
    fold = tuple(entry["fold"]) if "fold" in entry else None
    return Pattern(name, entry["contains"], _regex(name, entry["regex"]), entry["code"], _severity(name, entry.get("severity", "")),
                   entry.get("by", ""), levels, when, fold, str(entry.get("source", "")), tuple(entry.get("gate", ())))  # fmt: skip


def _pair(entry: Mapping[str, Any]) -> Pair:
    name = str(entry.get("name", "?"))
    opens = _regex(name, entry["opens"])
    pattern = Pattern(name, "", opens, entry["code"], _severity(name, entry["severity"]), fold=tuple(entry["fold"]))
    return Pair(opens, _regex(name, entry["closes"]), int(entry["within_lines"]), pattern)


def _regex(name: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"pattern {name!r}: {text!r} is no regular expression: {error}") from None


def _severity(name: str, text: str) -> str:
    if text not in SEVERITIES:
        raise ConfigError(f"pattern {name!r}: severity {text!r}, expected one of {', '.join(SEVERITIES)}")
    return text
