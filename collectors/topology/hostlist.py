"""Lists of host names in brackets, as Slurm and operators write them: ``gpu[001-032,040],login1``."""

from __future__ import annotations

import re

MAX_HOSTS = 100_000
_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class HostlistError(ValueError):
    """A list that nobody can read; the message names the part."""


def split_hosts(text: str) -> list[str]:
    """Comma-separated patterns, commas within brackets left alone. Raises `HostlistError` for a bracket without its partner."""
    rest = _BRACKET.sub("", text)
    if "[" in rest or "]" in rest:
        raise HostlistError(f"host list {text[:80]!r} has a bracket without its partner")
    return [part.strip() for part in _PART.findall(text) if part.strip()]


def expand_hosts(text: str) -> list[str]:
    """All names in `text`, in its order. Leading zeros are kept. Raises `HostlistError`.

    Examples
    --------
    >>> expand_hosts("n[01-03,7]-ib,login")
    ['n01-ib', 'n02-ib', 'n03-ib', 'n7-ib', 'login']
    """
    names: list[str] = []
    for pattern in split_hosts(text):
        names += _expand(pattern, MAX_HOSTS - len(names))
    return names


def matches(text: str, name: str) -> bool:
    """Whether `name` is one of the hosts in `text`, without writing them all out."""
    return any(_regex(pattern, name) for pattern in split_hosts(text))


def _expand(pattern: str, room: int) -> list[str]:
    bracket = _BRACKET.search(pattern)
    if bracket is None:
        return [pattern]
    heads = [pattern[: bracket.start()] + number for number in _numbers(bracket.group(1), room)]
    tails = _expand(pattern[bracket.end() :], room) if pattern[bracket.end() :] else [""]
    if len(heads) * len(tails) > room:
        raise HostlistError(f"host list {pattern[:80]!r} names more than {MAX_HOSTS} hosts")
    return [head + tail for head in heads for tail in tails]


def _numbers(text: str, room: int) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        low, high, width = _bounds(part)
        if high - low >= room - len(found):
            raise HostlistError(f"host list range {part[:40]!r} names more than {MAX_HOSTS} hosts")
        found += [str(number).zfill(width) for number in range(low, high + 1)]
    return found


def _bounds(part: str) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise HostlistError(f"host list range {part[:40]!r} is none, expected numbers such as 001-032")
    low, high = int(match.group(1)), int(match.group(2) or match.group(1))
    if high < low:
        raise HostlistError(f"host list range {part[:40]!r} runs backwards")
    return low, high, len(match.group(1))


def _regex(pattern: str, name: str) -> bool:
    """One pattern against one name: the bracketed numbers are compared, not enumerated."""
    pieces = _BRACKET.split(pattern)
    expression = "".join(re.escape(piece) if i % 2 == 0 else "([0-9]{1,9})" for i, piece in enumerate(pieces))
    match = re.fullmatch(expression, name)
    if match is None:
        return False
    return all(_within(text, number) for text, number in zip(pieces[1::2], match.groups(), strict=True))


def _within(text: str, number: str) -> bool:
    for part in text.split(","):
        low, high, width = _bounds(part)
        if low <= int(number) <= high and number == str(int(number)).zfill(width):
            return True
    return False
