"""Who should compute how much of the global batch, from what a micro-batch costs each rank. Pure."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwarden.records import Evidence

LEAST_GAIN_RATIO = 0.05
"""A change that promises less is not worth making."""
EVEN_WITHIN_RATIO = 1.15
"""A rank whose micro-batch costs no more than this times its peers' is as fast as they are."""
SETTLED_STEPS = 8
"""Steps since the last change before costs are believed."""
STAGE_TIMES = "local time of a step by pipeline stage"
"""Name of the evidence whose values are the stages in order."""


@dataclass(frozen=True)
class RankShare:
    """One rank as its hook describes it; times in milliseconds.

    Attributes
    ----------
    micro_ms
        What one micro-batch costs, loading included.
    fixed_ms
        What the rest of a step costs this rank, without waiting for others.
    recent_ms, recent_steps
        Median length of the steps since the last change, and how many they are.
    applied
        Id of the change that is in force, empty for the even shares of a start.
    """

    share: int
    total: int
    micro_ms: float
    fixed_ms: float
    recent_ms: float
    recent_steps: int = SETTLED_STEPS
    applied: str = ""
    late: str = ""

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> RankShare | None:
        """From a status; None while the rank has measured nothing yet.

        Raises
        ------
        ValueError, TypeError, KeyError
            It is no such description.
        """
        if any(said.get(key) is None for key in ("micro_ms", "fixed_ms", "recent_ms")):
            return None
        return cls(
            int(said["share"]), int(said["total"]), float(said["micro_ms"]), float(said["fixed_ms"]), float(said["recent_ms"]),
            int(said["recent_steps"]), str(said.get("applied", "")), str(said.get("late", "")),
        )  # fmt: skip

    def busy_ms(self, share: int) -> float:
        """How long this rank would be busy in a step with so many micro-batches."""
        return self.fixed_ms + share * self.micro_ms


@dataclass(frozen=True)
class Proposal:
    """New shares by rank, with what they promise; `why_not` says why there is nothing to change."""

    shares: tuple[int, ...] = ()
    gain_ratio: float = 0.0
    why_not: str = ""

    def __str__(self) -> str:
        if self.why_not:
            return self.why_not
        return f"shares {text_of(self.shares)}, {self.gain_ratio:.0%} more steps a second expected"


def propose(ranks: Mapping[int, RankShare], world: int) -> Proposal:
    """The shares that keep the busiest rank least busy."""
    if why := _not_ready(ranks, world):
        return Proposal(why_not=why)
    ordered = [ranks[rank] for rank in range(world)]
    shares = fastest(ordered)
    now_ms = max(rank.busy_ms(rank.share) for rank in ordered)
    then_ms = max(rank.busy_ms(share) for rank, share in zip(ordered, shares, strict=True))
    gain = now_ms / then_ms - 1 if then_ms > 0 else 0.0
    if gain < LEAST_GAIN_RATIO:
        return Proposal(
            why_not=f"other shares than {text_of([r.share for r in ordered])} would gain {gain:.0%} at most"
        )
    return Proposal(shares, gain)


def fastest(ranks: list[RankShare]) -> tuple[int, ...]:
    """Least makespan: each further micro-batch goes to the rank that would be done with it first.

    Examples
    --------
    >>> half, whole = RankShare(8, 32, 2.0, 0.0, 0.0), RankShare(8, 32, 1.0, 0.0, 0.0)
    >>> fastest([whole, whole, half, whole])
    (10, 9, 4, 9)
    """
    shares = [1] * len(ranks)
    queue = [(rank.busy_ms(2), number) for number, rank in enumerate(ranks)]
    heapq.heapify(queue)
    for _ in range(ranks[0].total - len(ranks)):
        _, number = heapq.heappop(queue)
        shares[number] += 1
        heapq.heappush(queue, (ranks[number].busy_ms(shares[number] + 1), number))
    return tuple(shares)


def _not_ready(ranks: Mapping[int, RankShare], world: int) -> str:
    if not ranks:
        return "the script divides no batch by job.shares: nothing can be given to other ranks"
    if missing := [rank for rank in range(world) if rank not in ranks]:
        return f"rank {missing[0]} has not said what a micro-batch costs it"
    if (slow := min(r.recent_steps for r in ranks.values())) < SETTLED_STEPS:
        return f"only {slow} steps since the last change, {SETTLED_STEPS} are needed"
    return ""


def excess(ranks: Mapping[int, RankShare], rank: int) -> float:
    """How many times its peers' median a micro-batch costs `rank`; 1.0 when that is not known."""
    peers = [other.micro_ms for number, other in ranks.items() if number != rank]
    if rank not in ranks or not peers or statistics.median(peers) <= 0:
        return 1.0
    return ranks[rank].micro_ms / statistics.median(peers)


def alike(ranks: Mapping[int, RankShare]) -> bool:
    """Whether a micro-batch costs every rank about the same, measured over enough steps."""
    known = ranks and all(r.recent_steps >= SETTLED_STEPS for r in ranks.values())
    return bool(known) and all(excess(ranks, rank) <= EVEN_WITHIN_RATIO for rank in ranks)


def even(ranks: Mapping[int, RankShare]) -> tuple[int, ...]:
    """Equal shares, as a job starts with."""
    low, more = divmod(next(iter(ranks.values())).total, len(ranks))
    return tuple(low + (rank < more) for rank in range(len(ranks)))


def is_even(ranks: Mapping[int, RankShare]) -> bool:
    """Whether the present shares are those of a start."""
    return all(ranks[rank].share == share for rank, share in enumerate(even(ranks)) if rank in ranks)


def pace_ms(ranks: Mapping[int, RankShare]) -> float:
    """Length of a step: the ranks are in step, so their middle."""
    return statistics.median(rank.recent_ms for rank in ranks.values())


def text_of(shares: tuple[int, ...] | list[int]) -> str:
    """``9/9/5/9``."""
    return "/".join(map(str, shares))


def parse_shares(text: str) -> tuple[int, ...]:
    """The reverse of `text_of`."""
    return tuple(int(part) for part in text.split("/"))


def stages_of(evidence: Iterable[Evidence]) -> dict[int, float]:
    """Local time of a step by pipeline stage, milliseconds, as the detector of imbalance measured it; empty when none did."""
    series = [each for each in evidence if each.name == STAGE_TIMES]
    return {stage: ms for stage, ms in enumerate(series[-1].values) if math.isfinite(ms)} if series else {}


def stage_advice(stage_ms: Mapping[int, float], layers: Mapping[int, int] | None = None) -> str:
    """What to move between pipeline stages, as a sentence for a person: no running job can do it.

    Parameters
    ----------
    stage_ms
        Local time of a step by stage (without waiting), milliseconds.
    layers
        Layers by stage, where they are known: then the move is named in layers.

    Examples
    --------
    >>> stage_advice({0: 100.0, 1: 100.0, 2: 150.0, 3: 90.0}, {0: 8, 1: 8, 2: 12, 3: 8})
    'stage 2 takes 150 ms of a step, 1.36 times the mean of 110 ms; move 3 of its 12 layers, first to stage 3 (90 ms)'
    """
    mean_ms = statistics.mean(stage_ms.values())
    worst, best = max(stage_ms, key=stage_ms.__getitem__), min(stage_ms, key=stage_ms.__getitem__)
    over = stage_ms[worst] / mean_ms if mean_ms > 0 else 1.0
    if over < 1 + LEAST_GAIN_RATIO:
        return f"the stages are within {over - 1:.0%} of their mean: nothing to move"
    what = f"{(1 - 1 / over):.0%} of its work"
    if layers and layers.get(worst, 0) > 1:
        count = max(1, round(layers[worst] * (1 - 1 / over)))
        what = f"{count} of its {layers[worst]} layers"
    return (
        f"stage {worst} takes {stage_ms[worst]:.0f} ms of a step, {over:.2f} times the mean of {mean_ms:.0f} ms; "
        f"move {what}, first to stage {best} ({stage_ms[best]:.0f} ms)"
    )
