"""Which job each node is in, worked out again only when a job changed."""

from __future__ import annotations

import operator

from trainwarden.topology import JobLayout, Topology


class Jobs:
    """Job by node; the same dict as before where no layout changed, so that whoever sorts nodes by it may keep what he found.

    Examples
    --------
    >>> jobs, topology = Jobs(), Topology()
    >>> jobs.of(topology) is jobs.of(topology.copy())
    True
    """

    def __init__(self) -> None:
        self._layouts: tuple[JobLayout, ...] = ()
        self._jobs: dict[str, str] = {}

    def of(self, topology: Topology) -> dict[str, str]:
        """Name of the job of each node that is in one; not to be changed."""
        layouts = topology.jobs()
        if len(layouts) != len(self._layouts) or not all(map(operator.is_, layouts, self._layouts)):
            self._layouts = layouts
            self._jobs = {node: layout.job for layout in layouts for node in layout.nodes}
        return self._jobs
