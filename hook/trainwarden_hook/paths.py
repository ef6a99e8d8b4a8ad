"""Which rail to use towards one peer. Pure: beats, carriers, orders and the clock are passed in, a decision comes out.

A rail is judged by numbers, not by clocks: it is silent when other rails brought several heartbeats of the peer and it brought none of
these. A process that was held up, ours or the peer's, therefore never looks like a dead rail.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from trainwarden_hook.beats import Beat
from trainwarden_hook.rails import Tuning

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000
LOOK_EVERY_BEATS = 8
APART_NS = 5 * NS_PER_MS
"""Rails may bring the same number so far apart before that looks like a loss."""
ROUND_TRIPS, ENOUGH_ROUND_TRIPS = 32, 16
MUCH_FASTER = 3.0
MASKS = slice(Beat._fields.index("carriers"), None)


class Condition(IntEnum):
    """How fit a rail is; less is better."""

    GOOD = 0
    PROBATION = 1
    DEGRADED = 2
    AVOIDED = 3
    DEAD = 4


@dataclass(frozen=True, slots=True)
class State:
    """A condition, and its cause in one word: no_carrier, far_end, silent, unheard, loss, loss_there, slow, ordered, hold."""

    condition: Condition
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.condition.name.lower()}: {self.cause}" if self.cause else self.condition.name.lower()


GOOD = State(Condition.GOOD)
ORDERED = State(Condition.AVOIDED, "ordered")


@dataclass(frozen=True, slots=True)
class Move:
    """Traffic to ``peer`` goes from one rail to another because of ``cause`` (empty: a better one is well again)."""

    peer: str
    source: int
    target: int
    cause: str


@dataclass
class Damper:
    """How long a rail must be well before it is used again: longer each time that it fails soon after."""

    tuning: Tuning
    strikes: int = 0
    well_since_ns: int | None = None
    failing: bool = False

    def hold_ns(self) -> int:
        """Time to be well, now."""
        if self.strikes == 0:
            return int(self.tuning.hold_ms * NS_PER_MS)
        doubled = self.tuning.flap_hold_s * 2.0 ** min(self.strikes - 1, 32)
        return int(min(doubled, self.tuning.hold_limit_s) * NS_PER_S)

    def follow(self, well: bool, now_ns: int) -> bool:
        """Whether it may be used."""
        if not well and not self.failing:
            soon = self.well_since_ns is not None and now_ns - self.well_since_ns < self.tuning.calm_s * NS_PER_S
            self.strikes = self.strikes + 1 if soon else 0
        if well and self.failing:
            self.well_since_ns = now_ns
        self.failing = not well
        return well and (self.well_since_ns is None or now_ns - self.well_since_ns >= self.hold_ns())


@dataclass
class Inbound:
    """What came from the peer on one rail: a bit per number within the window, newest lowest."""

    tuning: Tuning
    newest: int = -1
    since: int = 0
    bits: int = 0
    lossy: bool = False
    slow: bool = False
    round_trips_ms: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS))

    def put(self, number: int, behind: int) -> None:
        """A heartbeat; ``behind`` = numbers that other rails were ahead: after a silence the counting of losses begins anew."""
        window = self.tuning.loss_window_beats
        if behind >= self.tuning.silent_beats:
            self.restart(number)
        if number > self.newest:
            self.bits = ((self.bits << (number - self.newest)) | 1) & ((1 << window) - 1)
            self.newest = number
        elif self.newest - number < window:
            self.bits |= 1 << (self.newest - number)

    def restart(self, number: int) -> None:
        """Count from ``number`` on. Whoever lost much before is not acquitted by it."""
        self.newest, self.since, self.bits = number - 1, number, 0
        self.slow = False
        self.round_trips_ms.clear()

    def seen(self, latest: int) -> int:
        """Numbers that the window tells of; the very newest are left out, they may be under way."""
        under_way = self.tuning.silent_beats
        return max(0, min(latest - under_way - self.since + 1, self.tuning.loss_window_beats - under_way))

    def lost(self, latest: int) -> int:
        """How many of these are missing."""
        seen, shift = self.seen(latest), self.newest - (latest - self.tuning.silent_beats)
        inside = self.bits >> shift if shift >= 0 else self.bits << -shift
        return seen - (inside & ((1 << seen) - 1)).bit_count()

    def look(self, latest: int, others_ms: float) -> None:
        """Judge losses and round trips; between the limit and half of it nothing changes, and a silence is no loss."""
        if latest - self.newest >= self.tuning.silent_beats:
            return
        limit, lost = self.tuning.loss_ratio * self.tuning.loss_window_beats, self.lost(latest)
        acquitted = lost <= limit / 2 and 2 * self.seen(latest) >= self.tuning.loss_window_beats
        self.lossy = not acquitted if self.lossy else lost > limit
        median_ms, limit_ms = self.median_ms(), self.tuning.slow_ms / (2 if self.slow else 1)
        self.slow = median_ms > limit_ms and others_ms * MUCH_FASTER < median_ms

    def median_ms(self) -> float:
        """Median round trip, 0 while too few are known."""
        known = self.round_trips_ms
        return statistics.median(known) if len(known) >= ENOUGH_ROUND_TRIPS else 0.0


class PeerPaths:
    """One peer and the rails to it.

    Parameters
    ----------
    count
        Number of rails, in order of preference.
    current
        The rail in use.
    """

    def __init__(self, name: str, count: int, tuning: Tuning, current: int = 0) -> None:
        self.name = name
        self.current = current
        self.avoided = 0
        self.heard_at_ns = 0
        self._tuning = tuning
        self._count = count
        self._all = (1 << count) - 1
        self._dampers = [Damper(tuning) for _ in range(count)]
        self._forget(0)

    def _forget(self, boot: int) -> None:
        self._boot = boot
        self._latest = self._looked = -1
        self._latest_at_ns = 0
        self._told: Beat | None = None
        self._inbound = [Inbound(self._tuning) for _ in range(self._count)]

    # -- what is heard

    def hear(self, beat: Beat, now_ns: int) -> bool:
        """Take in a heartbeat; whether it tells of a change on the far side, which cannot wait for the next regular look."""
        if beat.boot != self._boot:
            self._forget(beat.boot)
        rail = self._inbound[beat.rail]
        if self._latest < 0 or beat.number - self._latest >= self._tuning.silent_beats:
            # nothing came on any rail for a while: that says nothing about one of them
            for each in self._inbound:
                each.restart(beat.number)
        rail.put(beat.number, self._latest - rail.newest)
        if beat.echo_ns:
            trip_ns = now_ns - beat.echo_ns - beat.echo_age_us * 1000
            rail.round_trips_ms.append(max(trip_ns, 0) / NS_PER_MS)
        self.heard_at_ns = now_ns
        if beat.number < self._latest:
            return False
        if beat.number > self._latest:
            self._latest_at_ns = now_ns
        before, self._told, self._latest = self._told, beat, beat.number
        if self._latest - self._looked >= LOOK_EVERY_BEATS:
            self._look()
        return before is None or before[MASKS] != beat[MASKS]

    def misses(self, now_ns: int) -> bool:
        """Whether a rail has just brought less than another, and it is not yet known to be silent."""
        late = now_ns - self._latest_at_ns >= APART_NS
        return any(
            (1 if late else 2) <= self._latest - rail.newest <= self._tuning.silent_beats for rail in self._inbound
        )

    def _look(self) -> None:
        self._looked = self._latest
        medians = [rail.median_ms() for rail in self._inbound]
        for place, rail in enumerate(self._inbound):
            others = [median for other, median in enumerate(medians) if other != place and median > 0]
            rail.look(self._latest, min(others, default=float("inf")))

    def is_newer(self, beat: Beat, now_ns: int) -> bool:
        """Whether ``beat`` is no replay: of a later start of the peer, or not seen on its rail."""
        rail = self._inbound[beat.rail]
        if beat.boot != self._boot or self._latest < 0:
            # an earlier start is believed after a silence only: the peer's clock may have been set back
            return beat.boot > self._boot or now_ns - self.heard_at_ns > self._tuning.lost_s * NS_PER_S
        age = rail.newest - beat.number
        return age < 0 or (age < self._tuning.loss_window_beats and not rail.bits >> age & 1)

    @property
    def hears(self) -> int:
        """Rails on which the peer's heartbeats arrive, as a mask."""
        return sum(1 << place for place in range(self._count) if not self._is_silent(place))

    @property
    def clean(self) -> int:
        """Rails on which few of them are lost."""
        return sum(1 << place for place, rail in enumerate(self._inbound) if not rail.lossy)

    def _is_silent(self, place: int) -> bool:
        return self._latest - self._inbound[place].newest >= self._tuning.silent_beats

    # -- what follows

    def judge(self, carriers: int, now_ns: int) -> list[State]:
        """State of each rail; ``carriers`` = own rails with carrier, as a mask."""
        return [self._judge(place, carriers, now_ns) for place in range(self._count)]

    def _judge(self, place: int, carriers: int, now_ns: int) -> State:
        bit = 1 << place
        state = self._fault(place, carriers)
        usable = self._dampers[place].follow(state is GOOD, now_ns)
        if state is GOOD and not usable:
            state = State(Condition.PROBATION, "hold")
        ordered = (self.avoided | (self._told.avoids if self._told else 0)) & bit
        return ORDERED if ordered and state.condition < Condition.AVOIDED else state

    def _fault(self, place: int, carriers: int) -> State:
        bit, told, rail = 1 << place, self._told, self._inbound[place]
        if not carriers & bit:
            return State(Condition.DEAD, "no_carrier")
        if told is not None and not told.carriers & bit:
            return State(Condition.DEAD, "far_end")
        if self._is_silent(place):
            return State(Condition.DEAD, "silent")
        if told is not None and not told.hears & bit and told.hears & self._all:
            return State(Condition.DEAD, "unheard")
        if rail.lossy:
            return State(Condition.DEGRADED, "loss")
        if told is not None and not told.clean & bit:
            return State(Condition.DEGRADED, "loss_there")
        return State(Condition.DEGRADED, "slow") if rail.slow else GOOD

    def hold_s(self, place: int) -> float:
        """How long the rail will have to be well before it is used again."""
        return self._dampers[place].hold_ns() / NS_PER_S

    def damper_due_ns(self, place: int) -> int | None:
        """When a rail that is well again may be used."""
        damper = self._dampers[place]
        if damper.failing or damper.well_since_ns is None:
            return None
        return damper.well_since_ns + damper.hold_ns()

    def is_confirmed(self, place: int) -> bool:
        """Whether the peer was heard on the rail at all."""
        return self._latest >= 0 and not self._is_silent(place) and self._inbound[place].bits != 0

    def wish(self, states: Sequence[State]) -> Move | None:
        """The move that these states ask for; none when every rail is dead."""
        here = states[self.current]
        best = min(range(self._count), key=lambda place: (states[place].condition, place))
        if states[best].condition < here.condition:
            return Move(self.name, self.current, best, here.cause)
        back = best < self.current and states[best] is GOOD and self.is_confirmed(best)
        return Move(self.name, self.current, best, "") if back else None
