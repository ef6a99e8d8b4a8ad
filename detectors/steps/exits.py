"""Ends of training processes: whose came first, and whether anybody ordered it."""

from __future__ import annotations

import msgspec

from detectors.numbers import whole_number
from trainwarden.records import LogEvent

ORDERED_CODES = (-15, -2)
"""SIGTERM and SIGINT: what a launcher sends when it stops its workers."""
UNKNOWN_CODE = 256


class Exit(msgspec.Struct):
    """One process that ended. `code` is the exit code, minus the signal's number, or 256 when nobody knows it."""

    rank: int
    node: str
    code: int
    at_ns: int
    heard_ns: int

    @property
    def killed(self) -> bool:
        """Ended by a signal that no launcher sends, and that does not follow from another rank's end (as an abort may)."""
        return self.code < 0 and self.code not in (*ORDERED_CODES, -6)

    @property
    def ordered(self) -> bool:
        """Ended the way a launcher ends its workers."""
        return self.code in ORDERED_CODES

    def describe(self) -> str:
        """How it ended, for a sentence."""
        if self.code == UNKNOWN_CODE:
            return "vanished"
        return f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"


def parse_exit(event: LogEvent, now_ns: int) -> Exit | None:
    """An exit from a ``worker_exit:<code>`` event; None for other events."""
    name, _, text = event.code.partition(":")
    if name != "worker_exit":
        return None
    code = whole_number(event.attributes.get("exit_code", text), UNKNOWN_CODE)
    rank = whole_number(event.attributes.get("rank", ""), event.rank)
    return Exit(rank, event.node, code, event.observed_at_ns, now_ns)


def culprit_of(exits: list[Exit]) -> Exit | None:
    """Whose end explains the others: the earliest killed one, else the earliest that nobody ordered.

    Ends with code 0 explain themselves, and what follows one is the end of a job. Several ranks that were told to stop were stopped by
    their launcher.

    Examples
    --------
    >>> victim, killed = Exit(0, "n0", 1, 10, 20), Exit(2, "n2", -9, 12, 21)
    >>> culprit_of([victim, killed]).node
    'n2'
    """
    by_time = sorted(exits, key=lambda end: (end.at_ns, end.rank))
    if by_time and by_time[0].code == 0:
        return None
    failed = [end for end in by_time if end.code != 0]
    first = next((end for end in failed if end.killed), next(iter(failed), None))
    if first is not None and first.ordered and sum(end.ordered for end in failed) > 1:
        return None
    return first
