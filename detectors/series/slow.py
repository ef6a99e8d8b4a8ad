"""Says `unusual` of a whole job whose metric left the band that its days so far make likely: what no comparison of peers can see.

The median over a job's nodes is kept in five-minute means for three days; a polynomial with the season of the day (or STL, or a structural
model) is fitted anew every half hour, on a budget, and says where the next points should lie. Where the level changed meanwhile, at a
change point, what came before is moved to the level after it: a step is no trend, and no noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.robust import median_of_known
from detectors.series.change import levelled
from detectors.series.refit import RefitQueue
from detectors.series.scenes import JOB, warmed
from detectors.series.seasonal import MODELS, Poly
from detectors.series.table import NodeTables, plain
from detectors.series.trends import gauss_line
from detectors.series.unusual import LEAST_PEERS, MOST_FEATURES, Peers
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option

POINT_S, SAMPLE_S = 300, 10
KEPT = 3 * 24 * 3600 // POINT_S
DAY = 24 * 3600 // POINT_S
AHEAD = 24
LEVEL_UNITS = 5.0
"""What finding the steps costs, about microseconds a point: the season that they stand in, and the best segmentation."""
_ABSENT_POINTS, _ACCEPTED_POINTS = 24, 24
"""Points after which a series that is gone is forgotten, and after which a lasting new level is the usual one."""


@dataclass(frozen=True)
class SlowSettings:
    """Settings of `seasonal_band`."""

    model: str = option("poly", "how the band is fitted: poly (milliseconds), stl or structural (statsmodels, seconds)")
    risk: float = option(1e-8, "probability that a healthy point lies outside its band")
    warm_points: int = option(36, "five-minute points before a series has a band")
    persist_points: int = option(3, "points in a row outside before it is said, and inside before it is taken back")
    refit_points: int = option(6, "points between two fits of a series")
    budget_units: float = option(3000.0, "work for fits per tick, about microseconds")


class Slow(msgspec.Struct):
    """One series: its points, the point being filled, and the band ahead of its last fit."""

    points: Array = msgspec.field(default_factory=lambda: np.full(KEPT, np.nan))
    total: float = 0.0
    weight: float = 0.0
    expected: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    spread: Array = msgspec.field(default_factory=lambda: np.zeros(0))
    age: int = 0
    seen: int = 0
    outside: int = 0
    inside: int = 0
    since_ns: int = 0
    absent: int = 0

    def forget(self) -> None:
        """Take the newest points as all that is known: the level has changed for good."""
        self.points[:-_ACCEPTED_POINTS] = np.nan
        self.expected, self.spread, self.seen, self.outside = np.zeros(0), np.zeros(0), _ACCEPTED_POINTS, 0

    def close(self) -> float:
        """End the point; its value, NaN when nothing came."""
        value = self.total / self.weight if self.weight else float("nan")
        self.points[:-1] = self.points[1:]
        self.points[-1] = value
        self.absent = self.absent + 1 if not self.weight else 0
        self.seen += self.weight > 0
        self.total, self.weight, self.age = 0.0, 0.0, self.age + 1
        return value


class State(msgspec.Struct):
    """State of the detector: series by ``job|feature``, fits that wait."""

    point: int = -1
    sample: int = -1
    series: dict[str, Slow] = {}
    queue: RefitQueue = msgspec.field(default_factory=RefitQueue)


class SeasonalBand(Detector):
    """Finds jobs whose metrics leave what their own days make likely."""

    name = "seasonal_band"
    version = 2
    kinds = ("unusual",)
    Settings = SlowSettings
    settings: SlowSettings
    false_alarms_per_node_day: ClassVar[float] = 0.5

    def __init__(self, settings: SlowSettings | None = None) -> None:
        super().__init__(settings)
        if self.settings.model not in MODELS:
            raise ConfigError(
                f"detectors.seasonal_band.model is {self.settings.model!r}, expected one of {', '.join(MODELS)}: choose one of them"
            )
        self._state = State()
        self._tables = NodeTables()
        self._peers = Peers()

    @classmethod
    def example(cls) -> Example:
        """After eight hours the optical modules of all nodes are 12 degrees warmer."""
        return Example(warmed(nodes=4, minutes=540, since=480, by_c=12.0), "unusual", Entity(EntityKind.JOB, JOB))

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            point = tick.at_ns // (POINT_S * NS_PER_S)
            if self._state.point < 0 or point < self._state.point - 1:
                self._state.point = point
            if point > self._state.point:
                verdicts += self._close(tick, frame)
                self._state.point = point
            sample = tick.at_ns // (SAMPLE_S * NS_PER_S)
            if sample != self._state.sample:
                self._state.sample = sample
                self._gather(tick, frame)
            self._refit()
        return verdicts

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Series (a job's median of a metric) that have a band; three hours of points come before it."""
        series = self._state.series.values()
        return {"series": (sum(len(one.expected) > 0 for one in series), len(series))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _gather(self, tick: AlignedTick, frame: Frame) -> None:
        nodes, features, table = self._tables.of(tick)
        if not features:
            return
        for job, peers in self._peers.of(nodes, frame.topology).items():
            if not job or len(peers.rows) < LEAST_PEERS:
                continue
            middle = median_of_known(table[peers.rows].astype(np.float64))
            for feature, value in zip(features[:MOST_FEATURES], middle.tolist(), strict=False):
                if np.isfinite(value):
                    series = self._state.series.setdefault(f"{job}|{feature}", Slow())
                    series.total, series.weight = series.total + value, series.weight + 1.0

    def _close(self, tick: AlignedTick, frame: Frame) -> list[Verdict]:
        passed = tick.at_ns // (POINT_S * NS_PER_S) - self._state.point
        found: list[Verdict] = []
        for key in sorted(self._state.series):
            series = self._state.series[key]
            for _ in range(min(passed, KEPT)):
                value = series.close()
                found += self._judge(key, series, value, tick, frame)
            if series.seen >= self.settings.warm_points and (
                not len(series.expected) or series.age >= self.settings.refit_points
            ):
                units = LEVEL_UNITS + MODELS[self.settings.model].cost_units
                self._state.queue.ask(key, units * float(np.isfinite(series.points).sum()))
        self._state.series = {
            key: s for key, s in self._state.series.items() if s.absent <= _ABSENT_POINTS or s.since_ns
        }
        return found

    def _refit(self) -> None:
        for key in self._state.queue.take(self.settings.budget_units):
            series = self._state.series.get(key)
            if series is not None and not series.outside and not series.since_ns:
                self._fit(series)

    def _fit(self, series: Slow) -> None:
        """Fit anew; not while the series is outside its band, or it would learn what is wrong."""
        first = int(np.argmax(np.isfinite(series.points)))
        values = series.points[first:]
        period = DAY if len(values) >= 2 * DAY else 0
        rough = Poly()
        rough.fit(values, period)
        model = MODELS[self.settings.model]()
        model.fit(
            levelled(values, rough.seasonal(np.arange(len(values)))),
            period or (12 if self.settings.model == "stl" else 0),
        )
        band = model.ahead(AHEAD)
        size = np.abs(band.expected)
        series.expected, series.spread, series.age = band.expected, np.maximum(band.spread, 0.01 * size + 1e-6), 0

    def _judge(self, key: str, series: Slow, value: float, tick: AlignedTick, frame: Frame) -> list[Verdict]:
        step = min(series.age - 1, len(series.expected) - 1)
        if step < 0 or not np.isfinite(value):
            return []
        score = abs(value - float(series.expected[step])) / float(series.spread[step])
        beyond = score > 1.5 * gauss_line(self.settings.risk)
        series.outside, series.inside = (series.outside + 1, 0) if beyond else (0, series.inside + 1)
        if series.outside >= self.settings.persist_points and not series.since_ns:
            series.since_ns = tick.at_ns - self.settings.persist_points * POINT_S * NS_PER_S
            return [self._verdict(key, series, step, tick, frame, score=score)]
        accepted = series.since_ns > 0 and series.outside >= _ACCEPTED_POINTS
        if accepted:
            series.forget()
        if accepted or (series.since_ns and series.inside >= self.settings.persist_points):
            series.since_ns = 0
            return [self._verdict(key, series, step, tick, frame, clears=True)] if self._is_last(key) else []
        return []

    def _is_last(self, key: str) -> bool:
        job = key.rpartition("|")[0]
        return not any(s.since_ns for other, s in self._state.series.items() if other.rpartition("|")[0] == job)

    def _verdict(self, key: str, series: Slow, step: int, tick: AlignedTick, frame: Frame, score: float = 0.0,
                 clears: bool = False) -> Verdict:  # fmt: skip
        job, _, feature = key.rpartition("|")
        now = plain(feature, float(series.points[-1]))
        usual = plain(feature, float(series.expected[step])) if len(series.expected) else "it"
        state = (
            "is where it is likely again, or has stayed so long that it is the usual"
            if clears
            else f"is {now} over the whole job, its days so far make {usual} likely"
        )
        times = [tick.at_ns - (40 - i) * POINT_S * NS_PER_S for i in range(40)]
        known = [(t, v) for t, v in zip(times, series.points[-40:].tolist(), strict=True) if np.isfinite(v)]
        evidence = series_evidence(f"{feature} of {job}, median over nodes", feature.rpartition("_")[2], [t for t, _ in known],
                                   [v for _, v in known], note=f"expected {usual}")  # fmt: skip
        start_ns = series.since_ns or tick.at_ns
        layout = frame.topology.job(job)
        return self.verdict(
            kind="unusual", entity=Entity(EntityKind.JOB, job), window=(start_ns, tick.at_ns), onset_at_ns=start_ns, job=job,
            attempt=layout.attempt if layout else 0, score=score, confidence=0.5, clears=clears, evidence=(evidence,),
            text=f"{feature} {state}",
        )  # fmt: skip
