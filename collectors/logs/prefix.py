"""What launchers put in front of each line: which rank, worker or actor said it."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
LAUNCHER = re.compile(
    r"""\s{0,8}(?:
        \[(?P<role>[A-Za-z_]{1,32})(?P<number>\d{1,7})\]:\ ?          # torchrun: [rank3]: and [default0]:
      | (?P<task>\d{1,7}):\                                          # srun --label
      | (?P<worker>(?:[\w.]{1,32}-){0,8}worker-(?P<index>\d{1,7})):\ ?    # DeepSpeed over pdsh, pods of an operator
      | \((?P<actor>[\w.:]{1,64})\ pid=(?P<pid>\d{1,9})(?:,\ ip=(?P<ip>[0-9a-fA-F.:]{2,45}))?\)\ ?   # Ray
    )""",
    re.VERBOSE,
)
MOST = 3


@dataclass(frozen=True)
class Said:
    """A line without colours and prefixes.

    Attributes
    ----------
    key
        The prefixes, word for word: lines of one speaker have the same.
    rank, local_rank
        -1 when the prefix does not tell.
    attributes
        What else it tells: ``worker``, ``actor``, ``pid``, ``ip``, ``local_rank``.
    """

    text: str
    key: str = ""
    rank: int = -1
    local_rank: int = -1
    attributes: tuple[tuple[str, str], ...] = ()


def unprefixed(line: str) -> Said:
    """Who said a line, and what.

    Examples
    --------
    >>> unprefixed("[rank3]: Traceback").rank, unprefixed("[default1]:boom").local_rank, unprefixed("plain").text
    (3, 1, 'plain')
    """
    text = ANSI.sub("", line) if "\x1b" in line else line
    found = LAUNCHER.match(text)
    if found is None:
        return Said(text)
    rank, local_rank, start = -1, -1, 0
    attributes: dict[str, str] = {}
    for _ in range(MOST):
        start = found.end()
        rank, local_rank = max(rank, _rank(found)), max(local_rank, _local_rank(found))
        attributes |= {name: found[name] for name in ("worker", "actor", "pid", "ip") if found[name]}
        if (found := LAUNCHER.match(text, start)) is None:
            break
    if local_rank >= 0:
        attributes["local_rank"] = str(local_rank)
    return Said(text[start:], text[:start].strip(), rank, local_rank, tuple(attributes.items()))


def _rank(found: re.Match[str]) -> int:
    if found["role"] == "rank":
        return int(found["number"])
    number = found["task"] or found["index"]
    return int(number) if number else -1


def _local_rank(found: re.Match[str]) -> int:
    # torchrun's role is "default" where nobody named it, and its number counts within the node
    return int(found["number"]) if found["role"] and found["role"] != "rank" else -1
