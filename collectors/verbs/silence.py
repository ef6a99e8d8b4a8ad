"""When a port of this node speaks to nobody any more: every peer that answered over it before is silent, and there are several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from collectors.verbs.doubt import Row, peer_of

LEAST_PEERS = 2
"""Of one silent peer it cannot be told which end is mute."""
LEAST_LOST = 6.0
PEERS_MAX = 64


@dataclass
class _Port:
    """Pings lost since its last answer, by peer; peers that never answered over this port are not in it."""

    lost: dict[str, float] = field(default_factory=dict)
    told: bool = False


class Silence:
    """Judges the ports of one node."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}

    def note(self, rows: Mapping[str, Row], peers: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
        """Ports that fell silent, with their silent peers, and ports that answer again, with none.

        Parameters
        ----------
        rows
            What is told of this interval, by path.
        peers
            Who is asked now; others are forgotten.
        """
        for path, (_, _, sent, lost) in rows.items():
            peer = peer_of(path)
            known = self._ports.setdefault(path.removeprefix(f"{peer}/"), _Port()).lost
            if sent > lost:
                if peer in known or len(known) < PEERS_MAX:
                    known[peer] = 0.0
            elif peer in known:
                known[peer] += lost
        return [news for name, port in self._ports.items() for news in self._judged(name, port, peers)]

    def _judged(self, name: str, port: _Port, peers: Collection[str]) -> list[tuple[str, tuple[str, ...]]]:
        port.lost = {peer: lost for peer, lost in port.lost.items() if peer in peers}
        lost = port.lost.values()
        if port.told and not all(lost):
            port.told = False
            return [(name, ())]
        if not port.told and len(port.lost) >= LEAST_PEERS and all(lost) and sum(lost) >= LEAST_LOST:
            port.told = True
            return [(name, tuple(sorted(port.lost)))]
        return []
