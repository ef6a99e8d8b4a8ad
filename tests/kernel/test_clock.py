"""The simulated clock."""

from __future__ import annotations

from trainwarden.clock import NS_PER_S, SimulatedClock, SystemClock


def test_sleeping_moves_a_simulated_clock() -> None:
    clock = SimulatedClock(start_ns=5)
    seen: list[int] = []
    clock.watch(seen.append)
    clock.sleep(2)
    assert clock.now_ns() == 5 + 2 * NS_PER_S
    assert seen == [clock.now_ns()]


def test_a_stepped_wall_clock_leaves_monotonic_time_alone() -> None:
    clock = SimulatedClock()
    before = clock.monotonic_ns()
    clock.step_ns(-3600 * NS_PER_S)
    assert clock.monotonic_ns() == before


def test_the_system_clock_tells_the_time() -> None:
    clock = SystemClock()
    assert clock.now_ns() > 1_700_000_000 * NS_PER_S
    assert clock.monotonic_ns() <= clock.monotonic_ns()
