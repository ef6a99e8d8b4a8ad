"""A ring on the stage with the link keepers alone beside it, no wardens and no torch: stands within a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainwarden_hook.link_keeper import Client
from trainwarden_hook.mptcp import preload_library

from benchmarks.training.rail_cluster import Collectors, StepRows
from benchmarks.training.rail_stage import Stage

RING = Path(__file__).with_name("ring_job.py")
SECRET = b"a secret of the rings, long enough"


class RailRing(StepRows):
    """Use as a context manager.

    Parameters
    ----------
    settings
        Of the links file; ``mptcp = True`` also preloads the library into the ring.
    """

    def __init__(self, root: Path, stage: Stage, **settings: object) -> None:
        super().__init__(root / "rows", stage)
        root.mkdir(parents=True, exist_ok=True)
        self.collectors = Collectors(root)
        self.path = stage.links_file(root / "links.toml", **settings)
        self.keepers: list[Client] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._library = preload_library(str(root)) if settings.get("mptcp") else ""

    def __enter__(self) -> RailRing:
        try:
            for number in range(len(self.stage.names)):
                self.keepers.append(self.start_keeper(number))
            for number in range(len(self.stage.names)):
                self._ranks.append(self._start_rank(number))
            self.wait_steps(20)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_keeper(self, number: int) -> Client:
        """The process that watches the links of a node."""
        keeper = self.stage.inside(number, Client)
        identity = {"job": "ring", "generation": 1, "node": self.stage.names[number], "rank": number}
        keeper.ask(
            "begin", path=str(self.path), secret=SECRET.hex(), avoided=[], collector=str(self.collectors.path), identity=identity
        )  # fmt: skip
        return keeper

    def _start_rank(self, number: int) -> subprocess.Popen[bytes]:
        addresses = ",".join(self.stage.address(other) for other in range(len(self.stage.names)))
        command = [sys.executable, str(RING), "--rank", str(number), "--addresses", addresses, "--rows", str(self.rows)]
        env = {**os.environ, **({"LD_PRELOAD": self._library} if self._library else {})}
        return subprocess.Popen(self.stage.enter(number, command), env=env)

    def alive(self) -> bool:
        """Whether every rank is the process that it was."""
        return all(rank.poll() is None for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for keeper in self.keepers:
            if keeper.alive:
                keeper.ask("end")
            keeper.close()
        self.collectors.close()
