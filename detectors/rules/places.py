"""Which job runs on each node, and its lowest rank there: one pass for a frame with many log events."""

from __future__ import annotations

from trainwarden.topology import JobLayout, Topology


class Places:
    """Jobs by node as of one frame; nothing is looked at before the first question.

    Examples
    --------
    >>> Places(Topology()).of("n1", "")
    (None, -1)
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._lowest: dict[str, dict[str, int]] | None = None

    def of(self, node: str, job: str) -> tuple[JobLayout | None, int]:
        """Layout of `job`, or without a name of the job that runs on `node`, and its lowest rank there (-1: none)."""
        here = self._by_node().get(node, {})
        name = job or next(iter(here), "")
        return (self._topology.job(name) if name else None), here.get(name, -1)

    def _by_node(self) -> dict[str, dict[str, int]]:
        if self._lowest is None:
            self._lowest = {}
            for layout in self._topology.jobs():
                for rank, (node, _) in layout.ranks.items():
                    own = self._lowest.setdefault(node, {})
                    own[layout.job] = min(rank, own.get(layout.job, rank))
        return self._lowest
