"""From counters to rates where counters wrap, stick at their maximum, are reset, or are read in a thread with a time of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from collectors.base import NAN

NS_PER_S = 1_000_000_000
WRAP_SHARE = 0.5


class Deltas:
    """Rates between readings that carry their own time.

    A counter that fell has wrapped only when it may wrap and stood in the upper half of its width; otherwise somebody reset it, and
    there is no rate.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[int, int]] = {}

    def per_second(self, key: Hashable, value: int | None, at_ns: int, wraps_at_bits: int = 0) -> float:
        """Rate since the previous reading; NaN for the first one, after a reset, and where there is no value."""
        if value is None:
            self._last.pop(key, None)
            return NAN
        before = self._last.get(key)
        self._last[key] = (value, at_ns)
        if before is None or at_ns <= before[1]:
            return NAN
        moved = _moved(before[0], value, wraps_at_bits)
        return NAN if moved is None else moved * NS_PER_S / (at_ns - before[1])

    def keep(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget the counters of devices that are gone."""
        self._last = {key: value for key, value in self._last.items() if wanted(key)}


def _moved(before: int, value: int, wraps_at_bits: int) -> int | None:
    if value >= before:
        return value - before
    if wraps_at_bits and before >= WRAP_SHARE * 2**wraps_at_bits:
        return value + (1 << wraps_at_bits) - before
    return None


def whole(text: bytes | str) -> int | None:
    """A whole number, else None: ``N/A (no PMA)``, an empty file, a number with too many digits to be a counter.

    Examples
    --------
    >>> whole(b"4207\\n"), whole("N/A (no PMA)"), whole("")
    (4207, None, None)
    """
    try:
        words = text.decode("ascii") if isinstance(text, bytes) else text
        return int(words) if len(words) <= 32 else None
    except ValueError:
        return None
