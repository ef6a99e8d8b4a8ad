"""Flight records of NCCL: which collective each rank launched last, and who never came to the one that others wait in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from collectors.logs.unpickle import PickleError, load

MAX_ENTRIES = 20_000
MAX_TEXT = 100
MAX_RANKS_SAID = 16


@dataclass(frozen=True)
class Collective:
    """One collective of one rank."""

    group: str
    sequence: int
    name: str
    state: str
    frame: str = ""

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.state == "completed"


@dataclass
class Record:
    """What one rank recorded. `members` has the ranks of each group where the record says them."""

    rank: int
    collectives: list[Collective] = field(default_factory=list)
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def newest(self, group: str) -> int:
        """Number of the last collective launched in a group, -1 for none."""
        return max((c.sequence for c in self.collectives if c.group == group), default=-1)


@dataclass(frozen=True)
class Stall:
    """A collective that somebody waits in.

    Attributes
    ----------
    waiting
        Ranks that launched it and are not done.
    missing
        Ranks of the group whose record shows that they did not launch it.
    silent
        Ranks of the group without a record.
    others
        (rank, name) of those that launched another one under the same number.
    """

    group: str
    sequence: int
    name: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    others: tuple[tuple[int, str], ...]
    frame: str = ""

    def text(self) -> str:
        """One sentence."""
        said = f"{self.name} number {self.sequence} of group {self.group}: ranks {ranks_text(self.waiting)} wait"
        said += f", ranks {ranks_text(self.missing)} did not come" if self.missing else ""
        said += "".join(f", rank {rank} launched {name} instead" for rank, name in self.others[:MAX_RANKS_SAID])
        return said + (f", no record of ranks {ranks_text(self.silent)}" if self.silent else "")


def read(data: bytes, rank: int) -> Record:
    """The record in a dump of `rank`.

    Raises
    ------
    PickleError
        It is none.
    """
    content = load(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise PickleError("no flight record: a dictionary with the list 'entries' was expected")
    record = Record(rank, members=_members(content.get("pg_config")))
    for entry in content["entries"][-MAX_ENTRIES:]:
        collective = _collective(entry)
        if collective is not None:
            record.collectives.append(collective)
    return record


def stalls(records: Iterable[Record]) -> list[Stall]:
    """For each group the first collective that is not over everywhere, most ranks waiting first."""
    by_rank = {record.rank: record for record in records}
    groups = sorted({c.group for record in by_rank.values() for c in record.collectives})
    found = [stall for group in groups if (stall := _stall(group, by_rank)) is not None]
    return sorted(found, key=lambda stall: (-len(stall.missing) - len(stall.others), -len(stall.waiting), stall.group))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as short text.

    Examples
    --------
    >>> ranks_text([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(parts[:MAX_RANKS_SAID]) + (
        f" and {len(parts) - MAX_RANKS_SAID} more" if len(parts) > MAX_RANKS_SAID else ""
    )


def _stall(group: str, by_rank: Mapping[int, Record]) -> Stall | None:
    open_ones = [
        (c.sequence, rank, c)
        for rank, record in by_rank.items()
        for c in record.collectives
        if c.group == group and not c.done
    ]
    if not open_ones:
        return None
    sequence = min(number for number, _, _ in open_ones)
    here = {rank: c for number, rank, c in open_ones if number == sequence}
    name = most_common(c.name for c in here.values())
    members = next((found for r in by_rank.values() if (found := _members_of(r, group))), tuple(sorted(by_rank)))
    waiting = tuple(sorted(rank for rank, c in here.items() if c.name == name))
    return Stall(
        group, sequence, name, waiting,
        missing=tuple(rank for rank in members if rank in by_rank and by_rank[rank].newest(group) < sequence),
        silent=tuple(rank for rank in members if rank not in by_rank),
        others=tuple(sorted((rank, c.name) for rank, c in here.items() if c.name != name)),
        frame=next((c.frame for c in here.values() if c.frame), ""),
    )  # fmt: skip


def _members_of(record: Record, group: str) -> tuple[int, ...]:
    """Ranks of a group; where a record has one group only, it has no name on some backends."""
    return record.members.get(group) or (record.members.get("", ()) if len(record.members) == 1 else ())


def most_common(names: Iterable[str]) -> str:
    """The name that occurs most often, the first of the alphabet among equals."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name), default="")


def _collective(entry: object) -> Collective | None:
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
    sequence = entry.get("collective_seq_id", entry.get("seq_id"))
    if not isinstance(sequence, int) or not 0 <= sequence < 2**63:
        return None
    state = "completed" if entry.get("retired") is True else _text(entry.get("state"))
    return Collective(
        _group(entry), sequence, _text(entry.get("profiling_name")).rpartition(":")[2], state, _frame(entry)
    )


def _group(entry: Mapping[Any, Any]) -> str:
    named = entry.get("process_group")
    if isinstance(named, list | tuple) and named:
        return _text(named[0])
    return _text(entry.get("pg_name", entry.get("pg_id", "0")))


def _frame(entry: Mapping[Any, Any]) -> str:
    """The innermost frame outside torch."""
    frames = entry.get("frames")
    for frame in frames[:64] if isinstance(frames, list) else ():
        if isinstance(frame, dict) and "/torch/" not in _text(frame.get("filename"), 400):
            return f"{_text(frame.get('filename'))}:{_text(frame.get('line'))} in {_text(frame.get('name'))}"
    return ""


def _members(config: object) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for group, about in config.items() if isinstance(config, dict) else ():
        said = about.get("ranks") if isinstance(about, dict) else None
        numbers = _numbers(said)
        if numbers:
            found[_text(group)] = numbers
    return found


def _numbers(said: object) -> tuple[int, ...]:
    """Ranks, which are a list, or the text of one."""
    parts = said.strip("[] ").split(",") if isinstance(said, str) else said
    if not isinstance(parts, list | tuple):
        return ()
    texts = [str(part).strip() for part in parts if isinstance(part, int | str)]
    return tuple(sorted(int(text) for text in texts if text.isdecimal() and len(text) < 9))


def _text(value: object, most: int = MAX_TEXT) -> str:
    """A short text or number; a structure gives nothing, however deep it is."""
    return str(value)[-most:] if isinstance(value, str | int) and (isinstance(value, str) or abs(value) < 2**63) else ""
