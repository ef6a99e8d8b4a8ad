"""Which rail to use towards a peer: judged by numbers, damped, never moved where nothing is better."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainwarden_hook.beats import Beat
from trainwarden_hook.paths import Condition, Move, PeerPaths
from trainwarden_hook.rails import Tuning

MS, S = 1_000_000, 1_000_000_000
BOTH = 0b11
TICK_MS = 20


@dataclass
class Scene:
    """A peer that sends a heartbeat on both rails every 20 ms, and our view of it."""

    tuning: Tuning = field(default_factory=Tuning)
    current: int = 0
    now_ns: int = 10 * S
    number: int = 0
    carriers: int = BOTH
    moves: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = PeerPaths("n1", 2, self.tuning, self.current)

    def beat(self, rail: int, **over: int) -> Beat:
        told = {
            "sender": 1, "receiver": 0, "rail": rail, "boot": 5, "number": self.number, "sent_ns": 1, "echo_ns": 0,
            "echo_age_us": 0, "carriers": BOTH, "hears": BOTH, "clean": BOTH, "avoids": 0,
        }  # fmt: skip
        return Beat(**{**told, **over})

    def run(self, ms: int, arrive: tuple[float, float] = (1.0, 1.0), seed: int = 1, **over: int) -> list[Move]:
        """Time goes on; `arrive` = share of the heartbeats that come, per rail; the moves that were made."""
        chance, made = random.Random(seed), []
        for _ in range(ms // TICK_MS):
            self.now_ns += TICK_MS * MS
            self.number += 1
            for rail in (0, 1):
                if chance.random() < arrive[rail]:
                    self.paths.hear(self.beat(rail, **over), self.now_ns)
            move = self.paths.wish(self.paths.judge(self.carriers, self.now_ns))
            if move is not None:
                self.paths.current = move.target
                made.append(move)
        self.moves += made
        return made

    def states(self) -> list[str]:
        return [str(state) for state in self.paths.judge(self.carriers, self.now_ns)]


def test_a_carrier_lost_moves_at_once_and_the_return_waits_for_the_hold() -> None:
    scene = Scene()
    assert scene.run(400) == []
    scene.carriers = 0b10
    assert scene.run(20) == [Move("n1", 0, 1, "no_carrier")]
    scene.carriers = BOTH
    assert scene.run(60) == [], "the hold is 60 ms from the first look on"
    assert scene.run(40) == [Move("n1", 1, 0, "")]


@pytest.mark.parametrize(
    ("over", "cause"),
    [
        ({"carriers": 0b10}, "far_end"),
        ({"hears": 0b10}, "unheard"),
        ({"clean": 0b10}, "loss_there"),
        ({"avoids": 0b01}, "ordered"),
    ],
)
def test_what_the_peer_tells_of_its_side_moves_us_too(over: dict[str, int], cause: str) -> None:
    scene = Scene()
    scene.run(200)
    assert scene.run(20, **over) == [Move("n1", 0, 1, cause)]


def test_a_rail_is_silent_when_the_other_brought_several_heartbeats_meanwhile() -> None:
    scene = Scene()
    scene.run(200)
    assert scene.run(2 * TICK_MS, (0.0, 1.0)) == []
    assert scene.run(TICK_MS, (0.0, 1.0)) == [Move("n1", 0, 1, "silent")]


def test_a_peer_that_is_held_up_or_gone_moves_nothing() -> None:
    scene = Scene()
    scene.run(200)
    assert scene.run(5000, (0.0, 0.0)) == []
    assert scene.run(200) == []
    scene.now_ns += 60 * S  # we were held up ourselves
    assert scene.run(200) == []


def test_both_rails_dead_moves_nothing_and_the_first_that_is_back_is_used_at_once() -> None:
    scene = Scene()
    scene.run(200)
    scene.carriers = 0
    assert scene.run(200, (0.0, 0.0)) == []
    assert [state.split(":")[0] for state in scene.states()] == ["dead", "dead"]
    scene.carriers = 0b10
    assert scene.run(40) == [Move("n1", 0, 1, "no_carrier")], "on probation, but better than a dead one"


def test_loss_is_seen_and_healed_and_a_little_of_it_is_borne() -> None:
    scene = Scene()
    scene.run(10_000)
    assert scene.run(30_000, (0.995, 1.0)) == []
    (move,) = scene.run(20_000, (0.9, 1.0))
    assert (move.target, move.cause) == (1, "loss")
    assert scene.run(3000) == [], "the window still holds the losses"
    assert scene.run(6000)[-1] == Move("n1", 1, 0, "")


def test_loss_on_both_rails_is_nobodys_reason_to_move() -> None:
    scene = Scene()
    scene.run(10_000)
    scene.run(10_000, (0.9, 0.9), seed=3)
    degraded = [move for move in scene.run(20_000, (0.9, 0.9), seed=4) if move.cause == "loss"]
    assert len(degraded) <= 1


def test_a_slow_rail_is_left_when_the_other_is_much_faster() -> None:
    scene = Scene()

    def run(ms: int, slow_ms: int, other_ms: int) -> list[Move]:
        made = []
        for _ in range(ms // TICK_MS):
            scene.now_ns += TICK_MS * MS
            scene.number += 1
            for rail, trip_ms in enumerate((slow_ms, other_ms)):
                scene.paths.hear(scene.beat(rail, echo_ns=scene.now_ns - trip_ms * MS), scene.now_ns)
            move = scene.paths.wish(scene.paths.judge(BOTH, scene.now_ns))
            if move is not None:
                scene.paths.current = move.target
                made.append(move)
        return made

    assert run(2000, 1, 1) == []
    assert run(2000, 30, 25) == [], "both are slow: the load, or the far end"
    assert run(2000, 30, 1) == [Move("n1", 0, 1, "slow")]
    assert run(2000, 1, 1) == [Move("n1", 1, 0, "")]


def test_a_flapping_rail_is_held_longer_each_time_and_forgiven_after_calm() -> None:
    scene = Scene(Tuning(calm_s=20.0, hold_limit_s=3.0))
    scene.run(200)
    holds = []
    for _ in range(5):
        scene.carriers = 0b10
        scene.run(100)
        scene.carriers = BOTH
        began_ns = scene.now_ns
        while scene.paths.current:
            scene.run(TICK_MS)
        holds.append(round((scene.now_ns - began_ns) / S, 1))
    assert holds == [0.1, 1.0, 2.0, 3.0, 3.0]
    scene.run(21_000)
    scene.carriers = 0b10
    scene.run(100)
    assert scene.paths.hold_s(0) == pytest.approx(0.06)


def test_flaps_within_the_hold_make_one_move_not_many() -> None:
    scene = Scene()
    scene.run(200)
    for _ in range(50):
        scene.carriers = 0b10
        scene.run(40)
        scene.carriers = BOTH
        scene.run(40)
    assert len(scene.moves) == 1


def test_an_order_to_avoid_is_no_flap_and_its_undoing_goes_back_at_once() -> None:
    scene = Scene()
    scene.run(200)
    scene.paths.avoided = 0b01
    assert scene.run(20) == [Move("n1", 0, 1, "ordered")]
    scene.carriers = 0b01
    assert scene.run(20) == [Move("n1", 1, 0, "no_carrier")], "an avoided rail is better than a dead one"
    scene.carriers, scene.paths.avoided = BOTH, 0
    assert scene.run(200) == []


def test_an_adopted_escape_goes_back_only_when_the_peer_was_heard_on_the_rail() -> None:
    scene = Scene(current=1)
    assert scene.run(2000, (0.0, 0.0)) == []
    assert scene.run(2000, (0.0, 1.0)) == []
    assert scene.run(400) == [Move("n1", 1, 0, "")]


def test_a_replay_is_not_news() -> None:
    scene = Scene()
    scene.run(200)
    seen, fresh = scene.beat(0), scene.beat(0, number=scene.number + 1)
    assert not scene.paths.is_newer(seen, scene.now_ns)
    assert scene.paths.is_newer(fresh, scene.now_ns)
    assert not scene.paths.is_newer(scene.beat(0, boot=4), scene.now_ns), "of an earlier start"
    assert scene.paths.is_newer(scene.beat(0, boot=6), scene.now_ns)
    assert scene.paths.is_newer(scene.beat(0, boot=4), scene.now_ns + 2 * S), (
        "after a silence the clock may have been set back"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60
    )
)
def test_no_move_ever_goes_to_a_rail_that_is_not_better_or_preferred(
    happenings: list[tuple[int, int, int, int]],
) -> None:
    scene = Scene()
    for arrive, carriers, far, hears in happenings:
        scene.carriers, scene.number = carriers, scene.number + 1
        scene.now_ns += TICK_MS * MS
        for rail in (0, 1):
            if arrive >> rail & 1:
                scene.paths.hear(scene.beat(rail, carriers=far, hears=hears), scene.now_ns)
        states = scene.paths.judge(carriers, scene.now_ns)
        move = scene.paths.wish(states)
        if move is None:
            best = min(states, key=lambda state: state.condition).condition
            assert states[scene.paths.current].condition <= max(best, Condition.GOOD)
        else:
            assert (states[move.target].condition, move.target) < (states[move.source].condition, move.source)
            scene.paths.current = move.target


def test_a_number_that_came_on_one_rail_only_is_missed_until_the_rail_is_known_to_be_silent() -> None:
    paths = PeerPaths("n1", 2, Tuning())
    found = []
    for number in range(1, 12):
        at_ns = number * 40_000_000
        for rail in (0, 1) if number < 6 else (1,):
            paths.hear(Beat(1, 0, rail, 7, number, at_ns, 0, 0, 3, 3, 3, 0), at_ns)
        found.append((paths.misses(at_ns + 1), paths.misses(at_ns + 6_000_000)))
    assert found[:5] == [(False, False)] * 5
    assert found[5] == (False, True), "rails are not equally quick: one number behind is missed after a while only"
    assert found[6:8] == [(True, True)] * 2
    assert found[8:] == [(False, False)] * 3, "a dead rail is no reason to hurry for good"
