"""From a vendor's samples to rows of the catalogue: names, units, running counts into rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from collectors.base import NAN
from collectors.pages.text import Labels, Page, Point
from trainwarden.clock import NS_PER_MS, NS_PER_S

Rows = dict[str, dict[str, float]]

GAUGE, RATE, SHARE = "gauge", "rate", "share"
# A share of time above one comes from two clocks that do not agree, if by little; by more it is no share: the unit is another one.
SHARE_MAX = 1.1


@dataclass(frozen=True)
class Rule:
    """How one metric of a page becomes one column.

    Attributes
    ----------
    factor
        Our value = the page's × this.
    how
        ``gauge``: as it is; ``rate``: growth per second of a running count; ``share``: the same of a count of time.
    where
        (label, value) that the series must have, an empty value for a label that is not there; empty label = all.
    adds
        Several metrics or series make up the column (kinds of errors): they are added. Otherwise the first one stays.
    """

    metric: str
    column: str
    factor: float = 1.0
    how: str = GAUGE
    where: tuple[str, str] = ("", "")
    adds: bool = False


class Growth:
    """Running counts into rates by the times of the readings: the first one, and one that fell, has none."""

    def __init__(self) -> None:
        self._last: dict[object, tuple[float, int, float]] = {}

    def per_second(self, key: object, value: float, at_ns: int) -> float:
        """Growth since the reading before; asked twice about one moment it says the same."""
        before = self._last.get(key)
        if before is not None and at_ns == before[1]:
            return before[2]
        grown = before is not None and at_ns > before[1] and value >= before[0]
        rate = (value - before[0]) * NS_PER_S / (at_ns - before[1]) if before is not None and grown else NAN
        self._last[key] = (value, at_ns, rate)
        return rate

    def keep(self, devices: Iterable[str]) -> None:
        """Forget counts of devices that are gone. Keys begin with the device."""
        stay = set(devices)
        self._last = {k: v for k, v in self._last.items() if isinstance(k, tuple) and k[0] in stay}


class Translator:
    """Applies the rules of one vendor."""

    def __init__(
        self, rules: Iterable[Rule], device_of: Callable[[Labels], str], blank: Callable[[float], bool]
    ) -> None:
        self._rules = tuple(rules)
        self._device_of = device_of
        self._blank = blank
        self._growth = Growth()

    @property
    def metrics(self) -> frozenset[str]:
        """Names that the rules ask for."""
        return frozenset(rule.metric for rule in self._rules)

    def rows(
        self, page: Page, at_ns: int, fresh_after_ms: float = -math.inf, scales: Mapping[str, float] | None = None
    ) -> Rows:
        """Rows by device.

        Parameters
        ----------
        at_ns
            When the page said this, monotonic: the base of rates of samples without a time of their own.
        fresh_after_ms
            Samples with an earlier time of their own are left out.
        scales
            Factors of metrics whose unit the page itself tells, instead of the rule's.
        """
        rows: Rows = {}
        for rule in self._rules:
            factor = (scales or {}).get(rule.metric, rule.factor)
            for point in page.points.get(rule.metric, ()):
                self._apply(rows, rule, factor, point, at_ns, fresh_after_ms)
        self._growth.keep(rows)
        return rows

    def _apply(self, rows: Rows, rule: Rule, factor: float, point: Point, at_ns: int, fresh_after_ms: float) -> None:
        label, wanted = rule.where
        device = self._device_of(point.labels)
        if not device or (label and point.labels.get(label, "") != wanted):
            return
        row = rows.setdefault(device, {})
        if point.at_ms is not None and point.at_ms < fresh_after_ms:
            return
        value = self._value(rule, device, factor, point, at_ns)
        if math.isnan(value):
            return
        if rule.adds:
            row[rule.column] = row.get(rule.column, 0.0) + value
        else:
            row.setdefault(rule.column, value)

    def _value(self, rule: Rule, device: str, factor: float, point: Point, at_ns: int) -> float:
        if not math.isfinite(point.value) or self._blank(point.value):
            return NAN
        if rule.how == GAUGE:
            return point.value * factor
        # what is added is told apart by all its labels; a count alone goes on when it changes pods
        key = (device, rule.metric, rule.where[1], tuple(point.labels.items()) if rule.adds else ())
        moment_ns = at_ns if point.at_ms is None else point.at_ms * NS_PER_MS
        rate = self._growth.per_second(key, point.value, moment_ns) * factor
        if rule.how == SHARE:
            return min(rate, 1.0) if rate <= SHARE_MAX else NAN
        return rate


def number_label(labels: Labels, name: str) -> str:
    """A label that holds a small number, without leading zeros; empty when it does not."""
    text = labels.get(name, "")
    return str(int(text)) if text.isascii() and text.isdecimal() and len(text) <= 4 else ""
