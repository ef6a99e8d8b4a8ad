"""Which losses count. A queue pair has no "port unreachable": pings to an agent that was started anew are lost until it is known where it
listens now. So what a peer loses that is silent on all rails is held back, until it is clear which of the two it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

NS = 10**9
DOUBT_NS = 90 * NS
"""An agent announces a new address at once, and its peers look every half minute: after so long silence is the network's."""
PATHS_MAX = 256

Row = tuple[float | None, float | None, float, float]
"""Median and longest round trip (ms), pings decided, pings lost."""


@dataclass
class _Peer:
    silent_since_ns: int
    held: dict[str, float] = field(default_factory=dict)


def peer_of(path: str) -> str:
    """The node at the other end of ``node/device/port``.

    Examples
    --------
    >>> peer_of("rack1/n7/mlx5_0/1")
    'rack1/n7'
    """
    return path.rsplit("/", 2)[0]


class Doubt:
    """Holds losses back; one for a node."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def weigh(self, rows: Mapping[str, Row], gone: Collection[str], now_ns: int) -> dict[str, Row]:
        """The rows to tell now.

        Parameters
        ----------
        gone
            Peers whose agent is known not to run: what they lost is forgotten.
        """
        answering = {peer_of(path) for path, row in rows.items() if row[2] > row[3]}
        told: dict[str, Row] = {}
        for path, row in rows.items():
            peer = peer_of(path)
            if peer in gone and peer not in answering:
                self.forget(peer)
            elif peer in answering or self._is_sure(peer, now_ns):
                told[path] = row
            elif row[3]:
                self._hold(peer, path, row[3], now_ns)
        for peer in list(self._peers):
            if peer in answering or self._is_sure(peer, now_ns):
                _add(told, self._release(peer, answering))
        return told

    def forget(self, peer: str) -> None:
        """Its address changed, or it is asked no more: what was lost says nothing."""
        self._peers.pop(peer, None)

    def keep(self, peers: Collection[str]) -> None:
        """Forget all others."""
        self._peers = {peer: kept for peer, kept in self._peers.items() if peer in peers}

    def _is_sure(self, peer: str, now_ns: int) -> bool:
        known = self._peers.get(peer)
        return known is not None and now_ns - known.silent_since_ns >= DOUBT_NS

    def _hold(self, peer: str, path: str, lost: float, now_ns: int) -> None:
        known = self._peers.setdefault(peer, _Peer(now_ns))
        if len(known.held) < PATHS_MAX:
            known.held[path] = known.held.get(path, 0.0) + lost

    def _release(self, peer: str, answering: Collection[str]) -> dict[str, float]:
        known = self._peers[peer]
        held, known.held = known.held, {}
        if peer in answering:
            del self._peers[peer]
        return held


def _add(told: dict[str, Row], lost: Mapping[str, float]) -> None:
    for path, count in lost.items():
        median, longest, sent, before = told.get(path, (None, None, 0.0, 0.0))
        told[path] = median, longest, sent + count, before + count
