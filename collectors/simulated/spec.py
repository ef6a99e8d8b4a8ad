"""What to simulate: sizes, seed, job mix. Checked once, here."""

from __future__ import annotations

from dataclasses import dataclass

from trainwarden.clock import NS_PER_S
from trainwarden.errors import UsageError

VERSION = 1
"""Number of the model of the cluster. What was trained or measured on one version says nothing about another: a change that moves
`tests/collectors/simulated/frozen.json` raises it, and the fingerprints are taken anew (see `test_frozen.py` beside it)."""

GPUS = 8
START_NS = 1_767_225_600 * NS_PER_S
"""Default first moment (2026-01-01T00:00:00Z): recordings of one seed are the same bytes whenever they are made."""

MAX_NODES = 20_000
IDLE_SHARE, LIGHT_SHARE = 0.33, 0.25
"""Shares of nodes without a job, and with notebooks and debugging, in the cluster that the marginals come from."""


@dataclass(frozen=True)
class Spec:
    """A simulated cluster.

    Attributes
    ----------
    nodes
        Machines of eight GPUs each.
    rails
        Adapters, hence separate leaf networks, per node: 1, 2, 4 or 8.
    rate_hz
        Ticks per simulated second, 0.1 to 10.
    jobs
        ``mix`` (sizes drawn from the seed) or a list such as ``2x16:pipeline,64:dense``: count x nodes : profile.
    idle_share
        Share of nodes without a job in ``mix``.
    light_share
        Share of nodes used lightly, of all.
    disorder
        Scale of the healthy disorder (missing data, pauses, skew): 0 none, 1 as described in the documentation.
    """

    nodes: int = 1250
    seed: int = 0
    rails: int = 8
    rate_hz: float = 1.0
    jobs: str = "mix"
    idle_share: float = IDLE_SHARE
    light_share: float = LIGHT_SHARE
    disorder: float = 1.0
    cluster: str = "sim"
    start_ns: int = START_NS

    def __post_init__(self) -> None:
        _within("nodes", self.nodes, 2, MAX_NODES)
        _within("rate", self.rate_hz, 0.1, 10.0)
        _within("disorder", self.disorder, 0.0, 10.0)
        _within("idle share", self.idle_share + self.light_share, 0.0, 0.95)
        if self.rails not in (1, 2, 4, 8):
            raise UsageError(
                f"--rails: {self.rails} found, expected 1, 2, 4 or 8, so that GPUs divide evenly among adapters"
            )
        if self.seed < 0:
            raise UsageError(f"--seed: {self.seed} found, expected 0 or more")

    @property
    def interval_s(self) -> float:
        """Seconds between ticks."""
        return 1.0 / self.rate_hz


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"--{name.replace(' ', '-')}: {value:g} found, expected {low:g} to {high:g}")
