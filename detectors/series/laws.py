"""From a panel to findings: which rows head for their limit, how surely, and how soon.

Both laws ask two questions. Can health explain what was seen? Answered at a risk per test that spends one budget over all series and all
tests of a day. And does it end at the limit within the horizon if it goes on?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from detectors.robust import median_of_known
from detectors.series.panel import COARSE, FINE, QUICK_S, RATIO, SLOW_S, Panel
from detectors.series.trends import (
    F64,
    dispersion,
    excess_p,
    gamma_of_rates,
    gauss_line,
    growth,
    is_step,
    largest_jump,
    paired_slope,
    risen,
)
from detectors.series.watch import Law


@dataclass(frozen=True)
class Base:
    """Windows of one base of time, in its buckets: (ring, length) of the trend law, lengths of the recent part of the count law."""

    trends: tuple[tuple[str, int], ...]
    counts: tuple[int, ...]


BASES = {
    SLOW_S: Base((("fine", 30), ("fine", 60), ("coarse", 24), ("coarse", 96)), (15, 60)),
    QUICK_S: Base((("fine", 12), ("fine", 30)), (6, 18)),
}
"""30 min, 1 h, 6 h and 24 h, and 2 min and 5 min for trends; 15 min and 1 h, and 1 and 3 min for counts."""
_TAIL_MARGIN = 1.25
"""Usual moves are taken a quarter larger than measured: their tail is a little heavier than Gaussian."""
_POOLED_NEEDED, _SEEN_NEEDED = 240, 60
_REACH_WINDOWS = 6.0
"""A trend is not drawn out farther than so many times the window it was seen in."""
_STEP_SHARE = 0.45
_LATE_SHARE = 0.3
_OWN_RISK = 1e-3
_GROWTH_Z = 2.5

_BURST = 7
"""One part in so many of a window, a bucket at least, may be a burst."""

_OFTEN = 0.1
"""Where more than this share of minutes has events anyhow, only the events can tell, not the minutes with any; a burst must not."""

_OLDER = COARSE * 3 // 4
"""Coarse buckets that tell how bursty a row is: a climb that has begun would look like a burst."""

Past: TypeAlias = tuple[F64, F64, F64]
"""Events, buckets with an event, seconds covered; per row."""


@dataclass(frozen=True)
class Finding:
    """A row of a panel that heads for its limit.

    Attributes
    ----------
    time_s
        Seconds until the limit if the trend goes on.
    strength
        How far beyond its line the evidence is: 1 = just at it.
    window_s
        Length of the trend it was seen in.
    rate_per_h
        Rise per hour of a level; events per hour now of a count.
    usual
        What health explains: a move over the window, or events per hour.
    """

    row: int
    time_s: float
    strength: float
    window_s: float
    rate_per_h: float
    usual: float


def risk_per_test(budget_per_node_day: float, series_per_node: float, bucket_s: int, tests: int) -> float:
    """Risk of one test so that a node's expected false findings stay within the budget: it is divided by the bases of time, the series of a
    node, the evaluations of a day and the tests of an evaluation. Tests of neighbouring buckets nearly repeat each other, so the sum is
    generous.

    Examples
    --------
    >>> f"{risk_per_test(1e-3, 100, 60, 2):.1e}"
    '1.7e-09'
    """
    return budget_per_node_day / (len(BASES) * max(1.0, series_per_node) * 86_400 / bucket_s * tests)


def trends(panel: Panel, groups: Sequence[NDArray[np.int64]], risk: float, horizon_s: float) -> list[Finding]:
    """Rows whose level moves farther than its own past and its peers explain, steadily, and reaches its limit in time."""
    found: dict[int, Finding] = {}
    oriented = -1.0 if panel.row.falling else 1.0
    level = oriented * median_of_known(panel.fine[:, -5:].T)
    away = _distance(panel, level, groups, oriented)
    for number, (ring, length) in enumerate(BASES[panel.bucket_s].trends):
        values = oriented * (panel.fine if ring == "fine" else panel.coarse)[:, -length:].astype(np.float64)
        if ring == "coarse" and panel.bucket % RATIO:
            continue
        for finding in _window(
            panel, groups, number, values, away, panel.bucket_s * (1 if ring == "fine" else RATIO), risk
        ):
            if finding.time_s <= horizon_s and finding.strength > (
                found[finding.row].strength if finding.row in found else 0.0
            ):
                found[finding.row] = finding
    return [found[row] for row in sorted(found)]


def counts(panel: Panel, groups: Sequence[NDArray[np.int64]], risk: float, horizon_s: float) -> list[Finding]:
    """Rows whose events come more often than their own past and their peers explain, ever more often, and reach the limit in time."""
    busy, past = _busy(panel), _Pasts(panel)
    found = []
    for row in busy.tolist():
        group = next((rows for rows in groups if row in rows), np.array([row]))
        strength = max(_count_strength(past, row, group, window, risk) for window in BASES[panel.bucket_s].counts)
        if strength >= 1.0:
            finding = _towards_limit(panel, row, strength)
            if finding is not None and finding.time_s <= horizon_s:
                found.append(finding)
    return found


def done_of_way(panel: Panel, finding: Finding) -> float:
    """Share of the way from its usual level (of the day; or usual rate) to its limit that a row has come, 0 to 1."""
    row, limit = finding.row, panel.row.limit
    if panel.row.law is Law.TOTAL:
        return min(1.0, float(panel.raw[row]) / limit)
    if panel.row.is_count:
        return min(max((finding.rate_per_h - finding.usual) / max(limit - finding.usual, 1e-9), 0.0), 1.0)
    day, fine = panel.coarse[row], panel.fine[row, -5:]
    if not (np.isfinite(day).any() and np.isfinite(fine).any()):
        return 0.0
    come = float(np.nanmedian(fine)) - float(np.nanmedian(day))
    come = max(-come if panel.row.falling else come, 0.0)
    return come / (come + max(finding.time_s * finding.rate_per_h / 3600.0, 1e-9))


def _window(panel: Panel, groups: Sequence[NDArray[np.int64]], number: int, values: F64, away: F64, bucket_s: int,
            risk: float) -> list[Finding]:  # fmt: skip
    length = values.shape[1]
    filled = np.isfinite(values).sum(axis=1) * 4 >= 3 * length
    slope = np.where(filled, paired_slope(values), np.nan)
    moves = np.minimum(slope * length, risen(values))
    own = moves - _common(moves, groups)
    usual = _usual(panel, number)
    z = np.minimum(own, moves) / usual
    line = gauss_line(risk)
    rows = np.flatnonzero((np.nan_to_num(z) >= line) & np.isfinite(usual))
    steady, late = _goes_on(panel, groups, values, rows, slope[rows], moves[rows], bucket_s)
    rows, rise = rows[steady], np.maximum(late[steady], 1e-12)
    time_s = np.maximum(away[rows], 0.0) / rise * bucket_s
    deviations = line * _TAIL_MARGIN
    panel.remember(number, own, np.where(np.isfinite(usual), line * usual, np.inf), deviations)
    learnt = np.where(np.nan_to_num(z) >= line / 2, np.nan, own)
    panel.follow(number, learnt, length)
    reach_s = _REACH_WINDOWS * length * bucket_s
    found = []
    for i, row in enumerate(rows.tolist()):
        if time_s[i] <= reach_s:
            per_h = float(rise[i]) * 3600 / bucket_s
            found.append(
                Finding(row, float(time_s[i]), float(z[row] / line), float(length * bucket_s), per_h, float(usual[row]))
            )
    return found


def _goes_on(panel: Panel, groups: Sequence[NDArray[np.int64]], values: F64, rows: NDArray[np.int64], slope: F64, moves: F64,
             bucket_s: int) -> tuple[NDArray[np.bool_], F64]:  # fmt: skip
    """Which of these rows rise steadily and still do, and how fast of late, per bucket.

    Asked of a row without what its peers do: a step on top of a warming that all share looks like a trend. A window longer than the fine
    ring must go on within that ring: a rise that ended an hour ago heads nowhere.
    """
    if not len(rows):
        return np.zeros(0, dtype=np.bool_), np.zeros(0)
    half = values.shape[1] // 2
    apart = values[rows] - _shared(values, groups, rows)
    late = np.fmin(paired_slope(values[rows, half:]), paired_slope(apart[:, half:]))
    if bucket_s > panel.bucket_s:
        oriented = -1.0 if panel.row.falling else 1.0
        late = np.fmin(late, RATIO * paired_slope(oriented * panel.fine[rows].astype(np.float64)))
    steady = (largest_jump(apart) <= _STEP_SHARE * moves) & (late >= _LATE_SHARE * slope) & ~is_step(apart)
    return np.asarray(steady), late


def _shared(values: F64, groups: Sequence[NDArray[np.int64]], rows: NDArray[np.int64]) -> F64:
    """How far the peers of each of these rows are from where they mostly are, bucket by bucket; 0 without peers."""
    shared = np.zeros((len(rows), values.shape[1]))
    for group in groups:
        mine = np.isin(rows, group)
        if mine.any():
            level = median_of_known(values[group])
            shared[mine] = np.nan_to_num(level - median_of_known(level[:, None])[0])
    return shared


def knows_usual(panel: Panel, number: int = 0) -> NDArray[np.bool_]:
    """Which rows of a level have moved in health, or their like have, for long enough over this window to judge a move by."""
    pooled = panel.pooled_seen[number] >= _POOLED_NEEDED and np.isfinite(panel.pooled[number])
    return np.asarray((panel.seen[:, number] >= _SEEN_NEEDED) | pooled)


def _usual(panel: Panel, number: int) -> F64:
    """Standard deviation of a healthy move over the window; NaN while too little is known."""
    usual, seen = panel.usual[:, number], panel.seen[:, number]
    pooled = panel.pooled[number] if panel.pooled_seen[number] >= _POOLED_NEEDED else np.nan
    own = np.where(seen >= _SEEN_NEEDED, usual, 0.0)
    known = knows_usual(panel, number)
    scale = np.maximum(own, np.nan_to_num(pooled)) * _TAIL_MARGIN
    return np.asarray(np.where(known, np.maximum(scale, panel.row.floor / 4.0), np.nan))


def _common(moves: F64, groups: Sequence[NDArray[np.int64]]) -> F64:
    """How far the peers moved, per row: 0 for a row without peers."""
    common = np.zeros(len(moves))
    for rows in groups:
        common[rows] = np.nan_to_num(median_of_known(moves[rows][:, None])[0])
    return common


def _distance(panel: Panel, level: F64, groups: Sequence[NDArray[np.int64]], oriented: float) -> F64:
    if not panel.row.relative:
        return np.asarray(oriented * panel.row.limit - level)
    usual = np.full(len(level), np.nan)
    for rows in groups:
        usual[rows] = median_of_known(level[rows][:, None])[0]
    return np.asarray(usual + panel.row.limit - level)


def _busy(panel: Panel) -> NDArray[np.int64]:
    """Rows with events in the last hour that their own past would bring rarely: all others are not worth a closer look."""
    some = np.flatnonzero((panel.fine > 0).any(axis=1))  # of most rows nothing was ever counted: they are not summed up
    rows = some[np.nansum(panel.fine[some], axis=1) >= 3]
    fine, coarse = panel.fine[rows], panel.coarse[rows, : COARSE - FINE // RATIO - 1]
    unlikely = np.zeros(len(rows), dtype=np.bool_)
    for window in BASES[panel.bucket_s].counts:
        now, before = fine[:, -window:], fine[:, :-window]
        past = np.nansum(before, axis=1) + np.nansum(coarse, axis=1)
        past_s = (np.isfinite(before).sum(axis=1) + RATIO * np.isfinite(coarse).sum(axis=1)) * panel.bucket_s
        events, now_s = np.nansum(now, axis=1), np.isfinite(now).sum(axis=1) * panel.bucket_s
        unlikely |= (events >= 3) & (excess_p(events, now_s, past, past_s) <= _OWN_RISK)
    return np.asarray(rows[unlikely])


class _Pasts:
    """What a panel's rows did before, worked out once for all rows and kept while one bucket is evaluated."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._known: dict[int, Past] = {}

    def of(self, rows: NDArray[np.int64], recent: int) -> Past:
        """Events, buckets with an event, seconds covered, before the newest `recent` fine buckets."""
        if recent not in self._known:
            self._known[recent] = _past(self.panel, np.arange(len(self.panel.entities)), recent)
        events, active, seconds = self._known[recent]
        return events[rows], active[rows], seconds[rows]

    def dispersion(self, rows: NDArray[np.int64]) -> float:
        """Of the middle one of these rows, of those with events enough to tell."""
        each, busy = self._dispersions
        chosen = each[rows][busy[rows]]
        return float(np.median(chosen)) if len(chosen) else 1.0

    @cached_property
    def _dispersions(self) -> tuple[F64, NDArray[np.bool_]]:
        return dispersion(self.panel.coarse), np.asarray(np.nansum(self.panel.coarse, axis=1) >= 5)


def _count_strength(pasts: _Pasts, row: int, group: NDArray[np.int64], window: int, risk: float) -> float:
    """Logarithm of the p-value over that of the risk; 0 when its own past alone could explain it.

    The rate in health is not one number: weak parts have more errors than others. What is known of a row before its own past is the spread
    of its peers' rates, a gamma distribution; its past sharpens it, and the events to come are negative binomial.
    """
    panel, peers = pasts.panel, group[group != row]
    past = pasts.of(np.array([row]), window)
    spread = max(1.0, _own_dispersion(panel, row, alone=len(group) <= 1), pasts.dispersion(peers))
    recent = panel.fine[row, -window:].astype(np.float64)
    recent_s = float(np.isfinite(recent).sum() * panel.bucket_s)
    recent = np.nan_to_num(recent)
    if _p(float(recent.sum()) / spread, recent_s, float(past[0][0]) / spread, float(past[2][0])) > _OWN_RISK:
        return 0.0
    others = pasts.of(peers, FINE)
    if not others[2].sum():
        others = pasts.of(peers, 0)
    events = (float(recent.sum()) / spread, past[0] / spread, others[0] / spread)
    share = (past[1].sum() + others[1].sum()) * panel.bucket_s / max(1.0, past[2].sum() + others[2].sum())
    active = (float((recent > 0).sum()), past[1], others[1])
    steady = (_without_burst(recent) / spread, *events[1:])
    worst = 0.0
    for now, own, theirs in (events, active) if share < _OFTEN else (steady,):
        shape, exposure_s = gamma_of_rates(theirs, others[2])
        if _p(now, recent_s, float(own[0]), float(past[2][0])) > _OWN_RISK:
            return 0.0
        worst = max(worst, _p(now, recent_s, float(own[0]) + shape, float(past[2][0]) + exposure_s))
    return float(np.log(max(worst, 1e-300)) / np.log(risk))


def _without_burst(recent: F64) -> float:
    """Events of these buckets without the richest seventh of them: what a burst brings, however many, is no trend.

    What is left is tested as if it were all there is, so health passes the test more rarely than stated.
    """
    return float(np.sort(recent)[: len(recent) - max(1, len(recent) // _BURST)].sum())


def _p(now: float, now_s: float, past: float, past_s: float) -> float:
    return float(excess_p(np.array([now]), np.array([now_s]), np.array([past]), np.array([past_s]))[0])


def _past(panel: Panel, rows: NDArray[np.int64], recent: int) -> Past:
    """Per row: events, buckets with an event, and seconds covered, before the newest `recent` fine buckets; the day's coarse buckets where
    they are older than the fine ring."""
    fine = panel.fine[rows, : FINE - recent].astype(np.float64)
    coarse = panel.coarse[rows, : COARSE - FINE // RATIO - 1].astype(np.float64)
    events = np.nansum(fine, axis=1) + np.nansum(coarse, axis=1)
    often = RATIO * (1.0 - np.exp(-np.nan_to_num(coarse) / RATIO))
    active = (np.nan_to_num(fine) > 0).sum(axis=1) + often.sum(axis=1)
    seconds = (np.isfinite(fine).sum(axis=1) + RATIO * np.isfinite(coarse).sum(axis=1)) * float(panel.bucket_s)
    return events, active, seconds


def _own_dispersion(panel: Panel, row: int, alone: bool) -> float:
    """From what is long past, where that is known; else left to the peers, and without peers from all but the newest hour's worth."""
    older = panel.coarse[row : row + 1, :_OLDER]
    if np.isfinite(older).sum() >= 8:
        return float(dispersion(older)[0])
    return float(dispersion(panel.coarse[row : row + 1, :-4])[0]) if alone else 1.0


def _towards_limit(panel: Panel, row: int, strength: float) -> Finding | None:
    recent = panel.fine[row].astype(np.float64)
    per_h = 3600.0 / panel.bucket_s
    if panel.row.law is Law.TOTAL:
        rate_per_h = float(np.nansum(recent)) / max(np.isfinite(recent).sum(), 1) * per_h
        left = max(0.0, panel.row.limit - float(panel.raw[row]))
        return Finding(
            row, left / rate_per_h * 3600.0, strength, FINE * panel.bucket_s, rate_per_h, _usual_rate(panel, row)
        )
    trend = growth(recent)
    now_per_h = trend.now * per_h
    if now_per_h >= panel.row.limit and trend.rate > 0:
        return Finding(row, 0.0, strength, FINE * panel.bucket_s, now_per_h, _usual_rate(panel, row))
    if trend.z < _GROWTH_Z or trend.rate <= 0:
        return None
    time_s = float(np.log(panel.row.limit / max(now_per_h, 1e-9)) / trend.rate) * panel.bucket_s
    return Finding(row, max(0.0, time_s), strength, FINE * panel.bucket_s, now_per_h, _usual_rate(panel, row))


def _usual_rate(panel: Panel, row: int) -> float:
    events, _, seconds = _past(panel, np.array([row]), FINE)
    return float(events[0] / seconds[0]) * 3600.0 if seconds[0] else 0.0
