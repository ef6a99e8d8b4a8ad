"""Every series of one family: its usual place given phase and load, its usual spread, and the tail of what lies outside."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import FamilyMatrix
from detectors.state import Array

PHASES = 3
"""Bins of a node's activity: idle or starting, training, anything else (evaluation, save)."""
TAIL_SHARE = 0.02
"""Share of points that lie beyond the tail's threshold; it is tracked, not fixed."""
TAIL_KEPT = 64
_FORGET_ENTITY_TICKS = 600
_SCALE_OF_MEAN_DEVIATION = 1.2533
_LOG_SUFFIXES = ("_per_s", "_bytes", "_ms", "_count")
_LOG_FLOOR, _RATIO_FLOOR, _RELATIVE_FLOOR = 0.12, 0.012, 0.02


def _zeros(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, dtype=np.float32)


class Table(msgspec.Struct):
    """State of one family, entities × metrics, float32.

    `place` has one more axis, the phase. `cov` and `var` (per entity) give the slope on load; `tail` holds the last excesses over
    `level` per metric, over all entities: series of one metric share their tail's shape.
    """

    family: str
    entities: list[tuple[str, str]] = []
    metrics: list[str] = []
    place: Array = msgspec.field(default_factory=lambda: _zeros(0, 0, PHASES))
    placed: Array = msgspec.field(default_factory=lambda: _zeros(0, 0, PHASES))
    spread: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    seen: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    cov: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    var: Array = msgspec.field(default_factory=lambda: _zeros(0))
    mean_load: Array = msgspec.field(default_factory=lambda: _zeros(0))
    streak: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    calm: Array = msgspec.field(default_factory=lambda: _zeros(0, 0))
    open: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.bool_))
    absent: Array = msgspec.field(default_factory=lambda: _zeros(0))
    level: Array = msgspec.field(default_factory=lambda: _zeros(0))
    tail: Array = msgspec.field(default_factory=lambda: _zeros(0, TAIL_KEPT))
    tail_seen: Array = msgspec.field(default_factory=lambda: _zeros(0))

    def rows_of(self, matrix: FamilyMatrix) -> NDArray[np.int64]:
        """Row numbers of the matrix's entities; new entities and metrics get their place, long absent ones lose it."""
        self._drop_absent()
        self._add_metrics([metric for metric in matrix.metrics if metric not in self.metrics])
        known = {entity: number for number, entity in enumerate(self.entities)}
        new = [entity for entity in matrix.entities if entity not in known]
        if new:
            known.update({entity: len(self.entities) + number for number, entity in enumerate(new)})
            self._add_entities(new)
        rows = np.array([known[entity] for entity in matrix.entities], dtype=np.int64)
        self.absent += 1
        self.absent[rows] = 0
        return rows

    def expected(self, rows: Array, phase: Array, load: Array, follows_load: Array) -> Array:
        """Where each value should lie, given its node's phase and load (transformed units)."""
        place = self.place[rows, :, phase]
        unplaced = self.placed[rows, :, phase] == 0
        overall = (self.place[rows] * self.placed[rows]).sum(axis=2) / np.maximum(self.placed[rows].sum(axis=2), 1e-9)
        slope = np.where(follows_load, self.cov[rows] / np.maximum(self.var[rows], 1e-3)[:, None], 0.0)
        away = np.nan_to_num(load - self.mean_load[rows])[:, None]
        return np.asarray(np.where(unplaced, overall, place) + slope * away)

    def spread_of(self, rows: Array) -> Array:
        """Usual spread with its floor: no series is steadier than its unit allows."""
        relative = _RELATIVE_FLOOR * np.abs(self.place[rows]).max(axis=2)
        floor = np.array(
            [_LOG_FLOOR if is_logarithmic(m) else _RATIO_FLOOR if m.endswith("_ratio") else 1e-6 for m in self.metrics]
        )
        return np.asarray(
            np.maximum(np.maximum(self.spread[rows], floor), np.where(floor == _LOG_FLOOR, 0.0, relative))
        )

    def learn(self, rows: Array, values: Array, residual: Array, phase: Array, load: Array, weight: Array) -> None:
        """Move place, spread and slope towards the newest values; `weight` is zero where nothing may be learnt."""
        known = np.isfinite(values) & (weight > 0)
        bound = 3.0 * self.spread_of(rows)
        young = self.seen[rows] < 4
        away = np.where(known, np.where(young, residual, np.clip(residual, -bound, bound)), 0.0)
        first = known & (self.placed[rows, :, phase] == 0)
        gain = np.maximum(weight, 1.0 / (self.placed[rows, :, phase] + 1.0)) * known
        self.place[rows, :, phase] = np.where(
            first, np.where(known, values, 0.0), self.place[rows, :, phase] + gain * away
        )
        self.placed[rows, :, phase] = np.minimum(self.placed[rows, :, phase] + known, 1e6)
        gain = np.maximum(weight, 1.0 / (self.seen[rows] + 1.0)) * known
        step = _SCALE_OF_MEAN_DEVIATION * np.abs(away) - self.spread[rows]
        self.spread[rows] += np.where(self.seen[rows] < 1, 0.0, gain * step).astype(np.float32)
        self.seen[rows] = np.minimum(self.seen[rows] + known, 1e6)
        shift = np.nan_to_num(load - self.mean_load[rows])
        pace = np.maximum(0.01, 1.0 / (self.seen[rows].max(axis=1, initial=0.0) + 1.0))
        self.cov[rows] += (pace[:, None] * (shift[:, None] * away - 0.1 * self.cov[rows]) * known).astype(np.float32)
        self.var[rows] += (pace * (shift * shift - self.var[rows])).astype(np.float32)
        self.mean_load[rows] += (pace * shift).astype(np.float32)

    def limits(self, risk: float) -> Array:
        """Score that a healthy point passes with probability `risk`, per metric: generalised Pareto over the last excesses."""
        kept = np.minimum(self.tail_seen, TAIL_KEPT)
        filled = np.arange(TAIL_KEPT)[None, :] < kept[:, None]
        mean = np.where(filled, self.tail, 0.0).sum(axis=1) / np.maximum(kept, 1.0)
        variance = np.where(filled, (self.tail - mean[:, None]) ** 2, 0.0).sum(axis=1) / np.maximum(kept - 1.0, 1.0)
        ratio = mean * mean / np.maximum(variance, 1e-9)
        enough = kept >= 16
        shape = np.where(enough, np.clip(0.5 * (1.0 - ratio), 1e-3, 0.4), 1e-3)
        scale = np.where(enough, np.clip(0.5 * mean * (ratio + 1.0), 0.2, mean + 1e-9), np.maximum(mean, 0.7))
        return np.asarray(np.maximum(4.0, self.level + scale / shape * ((risk / TAIL_SHARE) ** -shape - 1.0)))

    def follow_tail(self, rows: Array, score: Array, limits: Array, usable: Array) -> None:
        """Track the tail's threshold per metric and keep the excesses above it.

        A point beyond the limit counts only once its series came back by itself: a fault must not widen its own line.
        """
        counted = usable.sum(axis=0)
        beyond = usable & (score > self.level)
        share = beyond.sum(axis=0) / np.maximum(counted, 1)
        self.level = np.clip(self.level + np.where(counted > 0, 0.25 * (share - TAIL_SHARE), 0.0), 1.5, 8.0).astype(
            np.float32
        )
        came_back = usable & (score <= limits) & (self.streak[rows] > 0)
        for row, column in np.argwhere((beyond & (score <= limits)) | came_back):
            slot = int(self.tail_seen[column]) % TAIL_KEPT
            height = float(limits[column]) if came_back[row, column] else float(score[row, column])
            self.tail[column, slot] = max(0.0, height - float(self.level[column]))
            self.tail_seen[column] = (
                self.tail_seen[column] + 1 if self.tail_seen[column] < 1e6 else TAIL_KEPT + slot + 1
            )

    def _add_entities(self, new: list[tuple[str, str]]) -> None:
        count, width = len(new), len(self.metrics)
        self.entities = [*self.entities, *new]
        for name in ("place", "placed"):
            setattr(self, name, np.concatenate([getattr(self, name), _zeros(count, width, PHASES)]))
        for name in ("spread", "seen", "cov", "streak", "calm"):
            setattr(self, name, np.concatenate([getattr(self, name), _zeros(count, width)]))
        for name in ("var", "mean_load", "absent"):
            setattr(self, name, np.concatenate([getattr(self, name), _zeros(count)]))
        self.open = np.concatenate([self.open, np.zeros((count, width), dtype=np.bool_)])

    def _add_metrics(self, new: list[str]) -> None:
        if not new:
            return
        rows, count = len(self.entities), len(new)
        self.metrics = [*self.metrics, *new]
        for name in ("place", "placed"):
            setattr(self, name, np.concatenate([getattr(self, name), _zeros(rows, count, PHASES)], axis=1))
        for name in ("spread", "seen", "cov", "streak", "calm"):
            setattr(self, name, np.concatenate([getattr(self, name), _zeros(rows, count)], axis=1))
        self.open = np.concatenate([self.open, np.zeros((rows, count), dtype=np.bool_)], axis=1)
        self.level = np.concatenate([self.level, np.full(count, 3.0, dtype=np.float32)])
        self.tail = np.concatenate([self.tail, _zeros(count, TAIL_KEPT)])
        self.tail_seen = np.concatenate([self.tail_seen, _zeros(count)])

    def _drop_absent(self) -> None:
        keep = self.absent <= _FORGET_ENTITY_TICKS
        if keep.all():
            return
        self.entities = [entity for entity, kept in zip(self.entities, keep.tolist(), strict=True) if kept]
        for name in (
            "place",
            "placed",
            "spread",
            "seen",
            "cov",
            "streak",
            "calm",
            "open",
            "var",
            "mean_load",
            "absent",
        ):
            setattr(self, name, getattr(self, name)[keep])


def is_logarithmic(metric: str) -> bool:
    """Whether a metric spreads over orders of magnitude, so that ratios count and not differences."""
    return metric.endswith(_LOG_SUFFIXES)


def transform(metrics: list[str], values: Array) -> Array:
    """Values as they are compared: log(1 + x) of rates, sizes and times."""
    logarithmic = np.array([is_logarithmic(metric) for metric in metrics], dtype=np.bool_)
    return np.where(logarithmic, np.sign(values) * np.log1p(np.abs(values)), values)
