"""What each port's pings of its last turn say together: a row for each port, whoever the peers are that it asked.

A row for each pair would be of no use to whoever compares series: on a large network most pairs never come again, and each node would
bring as many of them as there are peers and ports.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from collectors.base import NAN, Row
from collectors.verbs.doubt import Row as PathRow
from collectors.verbs.doubt import peer_of


class _Pings(NamedTuple):
    at_ns: int
    peer: str
    row: PathRow


class Window:
    """Pings of the last seconds, by port."""

    def __init__(self) -> None:
        self._pings: dict[str, list[_Pings]] = {}

    def add(self, rows: Mapping[str, PathRow], now_ns: int) -> None:
        """Take in what is told of an interval, by path."""
        for path, row in rows.items():
            peer = peer_of(path)
            self._pings.setdefault(path.removeprefix(f"{peer}/"), []).append(_Pings(now_ns, peer, row))

    def rows(self, since_ns: int) -> dict[str, Row]:
        """A row for each port that has asked somebody since then; what is older is forgotten."""
        kept = {name: [each for each in pings if each.at_ns >= since_ns] for name, pings in self._pings.items()}
        self._pings = {name: pings for name, pings in sorted(kept.items()) if pings}
        return {name: _together(pings) for name, pings in self._pings.items()}


def _together(pings: list[_Pings]) -> Row:
    medians = [each.row[0] for each in pings if each.row[0] is not None]
    longest = [each.row[1] for each in pings if each.row[1] is not None]
    sent, lost = (sum(each.row[column] or 0.0 for each in pings) for column in (2, 3))
    asked = {each.peer for each in pings if each.row[2]}
    answering = {each.peer for each in pings if each.row[2] > each.row[3]}
    return {
        "rtt_ms": statistics.median(medians) if medians else NAN,
        "rtt_max_ms": max(longest, default=NAN),
        "lost_ratio": lost / sent if sent else NAN,
        "asked_peers_count": float(len(asked)),
        "silent_peers_count": float(len(asked - answering)),
    }
