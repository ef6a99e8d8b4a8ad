"""Clocks of nodes: what is kept at hand must be what the samples say."""

from __future__ import annotations

import random
from statistics import median

from streams.arrivals import TRUSTED_SAMPLES, Clocks
from trainwarden.clock import NS_PER_MS, NS_PER_S


def plain(clocks: Clocks, node: str) -> int:
    """The correction worked out from the samples alone."""
    state = clocks.snapshot()
    least = {name: min(kept) for name, kept in state["samples"].items() if len(kept) >= TRUSTED_SAMPLES}
    shared_ns = int(median(least.values())) if len(least) > 1 else 0
    offset_ns = least[node] - shared_ns if node in least else 0
    return round(offset_ns / NS_PER_S) * NS_PER_S if abs(offset_ns) > 1000 * NS_PER_MS else 0


def test_corrections_are_those_of_the_samples_before_and_after_a_restore() -> None:
    dice, clocks, now_ns, moved = random.Random(3), Clocks(1000, 1000), 10**18, 0
    for second in range(60):
        now_ns += NS_PER_S
        for number in range(12):
            if dice.random() < 0.8:
                boot = f"b{second // (20 + number)}"  # a restart forgets what was known
                ahead_ns = 5 * NS_PER_S if number == 3 else 0
                clocks.note(f"n{number}", boot, now_ns + ahead_ns - dice.randrange(NS_PER_S // 2), now_ns)
        clocks.settle()
        restored = Clocks(1000, 1000)
        restored.restore(clocks.snapshot())
        for number in range(12):
            found = clocks.correction_ns(f"n{number}", now_ns, now_ns)
            assert found == restored.correction_ns(f"n{number}", now_ns, now_ns) == plain(clocks, f"n{number}")
            moved += bool(found)
    assert moved > 20
