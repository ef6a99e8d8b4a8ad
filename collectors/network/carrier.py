"""A lost carrier told apart: gone for good (drop), or lost and won again (flap)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainwarden.clock import NS_PER_S

TELL_EVERY_NS = 60 * NS_PER_S


@dataclass
class _Link:
    carrier: bool | None = None
    been_up: bool = False
    down_since_ns: int = 0
    downs: float | None = None
    dropped: bool = False
    flaps: deque[int] = field(default_factory=lambda: deque(maxlen=1024))
    untold: int = 0
    told_ns: int = -TELL_EVERY_NS


@dataclass(frozen=True)
class CarrierNews:
    """What happened to a link. `kind` is ``drop`` (down for long), ``flap`` (lost and won) or ``back`` (after a drop)."""

    kind: str
    count: int
    down_s: float
    flaps_in_window: int


class Carriers:
    """Follows the carrier of each interface from tick to tick.

    A loss shorter than a tick is seen by the kernel's own count of losses (`carrier_down_count`). Flaps are told once a minute at most,
    with their number. A link that was never up is no news: nothing is plugged in there.

    Parameters
    ----------
    drop_after_s
        Down for so long is a drop; shorter is a flap when it comes back.
    window_s
        Time over which flaps are counted.
    """

    def __init__(self, drop_after_s: float, window_s: float) -> None:
        self._drop_ns = int(drop_after_s * NS_PER_S)
        self._window_ns = int(window_s * NS_PER_S)
        self._links: dict[str, _Link] = {}

    def follow(self, name: str, carrier: float, downs: float | None, now_ns: int) -> CarrierNews | None:
        """Take in one reading; NaN carrier says nothing. `downs` is the kernel's count of losses, None where unknown."""
        link = self._links.setdefault(name, _Link())
        up = carrier == 1.0
        unseen = self._losses(link, downs)
        if carrier not in (0.0, 1.0):
            return None
        was, link.carrier = link.carrier, up
        if not up:
            return self._down(link, was, now_ns)
        link.been_up = True
        down_s = (now_ns - link.down_since_ns) / NS_PER_S if was is False else 0.0
        dropped, link.dropped = link.dropped, False
        if dropped:
            return CarrierNews("back", 1, down_s, len(link.flaps))
        flaps = max(unseen if was is not None else 0, int(was is False and link.down_since_ns > 0))
        return self._flapped(link, flaps, down_s, now_ns)

    def keep(self, names: set[str]) -> None:
        """Forget interfaces that are gone."""
        self._links = {name: link for name, link in self._links.items() if name in names}

    def _losses(self, link: _Link, downs: float | None) -> int:
        before = link.downs
        link.downs = downs if downs is not None else before
        if before is None or downs is None or downs < before:
            return 0
        return int(downs - before)

    def _down(self, link: _Link, was: bool | None, now_ns: int) -> CarrierNews | None:
        if was is not False:
            link.down_since_ns = max(1, now_ns)
        long_ns = now_ns - link.down_since_ns
        if not link.been_up or link.dropped or long_ns < self._drop_ns:
            return None
        link.dropped = True
        return CarrierNews("drop", 1, long_ns / NS_PER_S, len(link.flaps))

    def _flapped(self, link: _Link, flaps: int, down_s: float, now_ns: int) -> CarrierNews | None:
        link.flaps.extend([now_ns] * min(flaps, 1024))
        while link.flaps and now_ns - link.flaps[0] > self._window_ns:
            link.flaps.popleft()
        link.untold += flaps
        if not link.untold or now_ns - link.told_ns < TELL_EVERY_NS:
            return None
        count, link.untold, link.told_ns = link.untold, 0, now_ns
        return CarrierNews("flap", count, down_s, len(link.flaps))
