"""Rail `breaker`: when too many nodes are out, the detectors are more likely wrong than the nodes.

Two bounds, because a share alone blocks every repair in a small pool and allows hundreds in a large one: at most `share_ratio` of
all nodes (one node is always allowed) *and* at most `absolute` nodes. Everybody's exclusions count, and those of the last window
count even after their return. Once tripped it stays tripped, over restarts, until an operator resets it; the reset drops what was
seen before. It never holds up a plan that gives nodes back.
"""

from __future__ import annotations

from dataclasses import dataclass

from actions.rails.base import Rail, Refusal
from actions.world import World, isolated_by, undoes
from trainwarden.clock import NS_PER_S
from trainwarden.records import ActionStatus, Plan, Verb
from trainwarden.settings import option

LATCH = "latch:breaker"
"""Note in the ledger: the reason while tripped, empty after a reset."""


@dataclass(frozen=True)
class BreakerSettings:
    """The two bounds."""

    share_ratio: float = option(
        0.25, "share of all nodes that may be out, by anybody's hand; one node is always allowed"
    )
    absolute: int = option(4, "number of nodes that may be out, whatever the share")
    window_s: float = option(3600.0, "nodes isolated within this time count even when they are back")


class Breaker(Rail):
    """The latch is a note in the ledger; `service` writes it when a refusal says so."""

    name = "breaker"
    order = 20
    Settings = BreakerSettings

    def check(self, plan: Plan, world: World) -> Refusal | None:
        if undoes(plan):
            return None
        note = world.ledger.newest_note(LATCH)
        if note is not None and note.value:
            return self.refuse(
                f"the breaker is open since {_ago(world, note.at_ns)} ({note.value}): reset it with a reason", page=True
            )
        if note is not None and world.incident is not None and world.incident.observed_at_ns <= note.at_ns:
            return self.refuse("the incident is from before the breaker was reset: only news counts after a reset")
        return self._count(plan, world)

    def _count(self, plan: Plan, world: World) -> Refusal | None:
        wanted = set(isolated_by(plan))
        if not wanted:
            return None
        since_ns = world.now_ns - int(self.settings.window_s * NS_PER_S)
        recent = {row.target for row in world.ledger.rows_since(since_ns, Verb.ISOLATE, ActionStatus.STARTED)}
        out, total = wanted | recent | world.excluded, len(world.cluster)
        allowed = min(max(1, int(self.settings.share_ratio * total)), self.settings.absolute)
        if len(out) <= allowed:
            return None
        return self.refuse(
            f"{len(out)} of {total} nodes would be out ({', '.join(sorted(out)[:8])}), {allowed} are allowed",
            page=True,
            latch=True,
        )


def _ago(world: World, at_ns: int) -> str:
    return f"{(world.now_ns - at_ns) / NS_PER_S:.0f} s"
