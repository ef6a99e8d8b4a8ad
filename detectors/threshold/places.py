"""Usual place and spread of many series at once: robust, with forgetting, given each row's phase and load.

The place is a stochastic M-estimate: an exponentially forgetting mean of residuals clipped at three spreads (Huber 1964; the recursive
form is that of Martin and Masreliez, "Robust estimation via stochastic approximation", 1975), one per phase. The spread is the forgetting
mean absolute deviation of the same residuals. What the load explains is taken out first by a forgetting least-squares slope.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array

PHASES = 3
"""Bins of a row's activity: idle or starting, training, anything else (evaluation, save)."""
CLIP = 3.0
"""Residuals beyond so many spreads count as this many."""
_MEAN_DEVIATION_TO_SIGMA = 1.2533
_YOUNG = 4.0
_LOAD_GAIN, _RIDGE, _LEAST_LOAD_VARIANCE = 0.01, 0.1, 1e-3
_MOST = np.float32(1e6)

F32 = NDArray[np.float32]


class Places(msgspec.Struct):
    """Place, spread and slope of rows × columns series, float32.

    `place` and `placed` (how often) are rows × phases × columns; `cov` and, per row, `load_var` and `load_mean` give the slope on load.
    """

    place: Array
    placed: Array
    spread: Array
    seen: Array
    cov: Array
    load_var: Array
    load_mean: Array
    load_seen: Array

    @classmethod
    def of(cls, rows: int, columns: int, phases: int = PHASES) -> Places:
        """Places of series of which nothing is known yet."""

        def zeros(*shape: int) -> F32:
            return np.zeros(shape, np.float32)

        return cls(
            zeros(rows, phases, columns), zeros(rows, phases, columns), zeros(rows, columns), zeros(rows, columns),
            zeros(rows, columns), zeros(rows), zeros(rows), zeros(rows),
        )  # fmt: skip

    def expect(self, at: slice, phase: Array, load: F32 | None, follows: F32 | None, out: F32, scratch: F32) -> F32:
        """Where rows `at` should lie, into `out`.

        Parameters
        ----------
        phase, load
            Per row; load NaN or None = not known, nothing is explained by it.
        follows
            1 per column that load may explain, 0 otherwise; None = all.
        """
        index = _row_of_phase(phase, self.place.shape[1])
        np.take(_rows(self.place[at]), index, axis=0, out=out, mode="clip")
        np.take(_rows(self.placed[at]), index, axis=0, out=scratch, mode="clip")
        if scratch.size and scratch.min() == 0.0:
            self._from_other_phases(at, scratch == 0.0, out)
        if load is not None:
            factor = np.nan_to_num(load - self.load_mean[at]) / np.maximum(self.load_var[at], _LEAST_LOAD_VARIANCE)
            np.multiply(self.cov[at], factor.astype(np.float32)[:, None], out=scratch)
            if follows is not None:
                np.multiply(scratch, follows, out=scratch)
            np.add(out, scratch, out=out)
        return out

    def _from_other_phases(self, at: slice, unplaced: NDArray[np.bool_], out: F32) -> None:
        """A phase never seen is expected to be like the others, weighted by how often they were."""
        row, column = np.nonzero(unplaced)
        times = self.placed[at][row, :, column]
        out[row, column] = (self.place[at][row, :, column] * times).sum(axis=1) / np.maximum(times.sum(axis=1), 1e-9)

    def breadth(self, at: slice, floor: F32, relative: F32, out: F32, scratch: F32) -> F32:
        """Spread of rows `at` with its floors, into `out`: no series is steadier than its unit (`floor`, per column) or size allows."""
        place = self.place[at]
        np.abs(place[:, 0], out=out)
        for phase in range(1, place.shape[1]):
            np.maximum(out, np.abs(place[:, phase], out=scratch), out=out)
        np.multiply(out, relative, out=out)
        np.maximum(out, floor, out=out)
        return np.maximum(out, self.spread[at], out=out)

    def learn(self, at: slice, values: F32, residual: F32, clipped: F32, known: F32, weight: F32, usual_weight: float,
              phase: Array, load: F32 | None, scratch: tuple[F32, F32]) -> None:  # fmt: skip
        """Move rows `at` towards the newest values.

        Parameters
        ----------
        values, residual, clipped
            Newest values, what is left of them, and the latter within ± `CLIP` spreads; 0 where not known.
        known
            1 or 0 per series; `weight` is the gain per series once it is old, `usual_weight` that of most.
        """
        gain, step = scratch
        young = self.seen[at] < _YOUNG
        if young.any():
            np.copyto(clipped, residual, where=young)
        index = _row_of_phase(phase, self.place.shape[1])
        place, placed = _rows(self.place[at]), _rows(self.placed[at])
        _aged_gain(placed[index], weight, usual_weight, known, out=gain)
        moved = np.add(place[index], np.multiply(gain, clipped, out=step), out=step)
        first = placed[index] == 0.0
        if first.any():
            np.copyto(moved, values, where=first)
        place[index] = moved
        placed[index] = np.minimum(np.add(placed[index], known, out=step), _MOST, out=step)
        self._learn_spread(at, clipped, known, weight, usual_weight, gain, step)
        if load is not None:
            self._learn_load(at, clipped, known, load, step)

    def _learn_spread(
        self, at: slice, clipped: F32, known: F32, weight: F32, usual_weight: float, gain: F32, step: F32
    ) -> None:
        seen, spread = self.seen[at], self.spread[at]
        _aged_gain(seen, weight, usual_weight, known, out=gain)
        np.multiply(np.abs(clipped, out=step), np.float32(_MEAN_DEVIATION_TO_SIGMA), out=step)
        np.subtract(step, spread, out=step)
        np.multiply(step, gain, out=step)
        first = seen < 1.0
        if first.any():
            np.copyto(step, np.float32(0.0), where=first)
        np.add(spread, step, out=spread)
        np.minimum(np.add(seen, known, out=seen), _MOST, out=seen)

    def _learn_load(self, at: slice, clipped: F32, known: F32, load: F32, step: F32) -> None:
        shift = np.nan_to_num(load - self.load_mean[at]).astype(np.float32)
        self.load_seen[at] += np.isfinite(load)
        pace = np.maximum(np.float32(_LOAD_GAIN), 1.0 / (self.load_seen[at] + 1.0)).astype(np.float32)
        cov = self.cov[at]
        np.multiply(clipped, (shift * pace)[:, None], out=step)
        np.multiply(cov, (1.0 - _RIDGE * pace)[:, None].astype(np.float32), out=cov)
        np.add(cov, step, out=cov)
        self.load_var[at] += pace * (shift * shift - self.load_var[at])
        self.load_mean[at] += pace * shift


def _rows(cube: F32) -> F32:
    """Rows × phases × columns as (rows · phases) × columns, the same memory."""
    return cube.reshape(cube.shape[0] * cube.shape[1], cube.shape[2])


def _row_of_phase(phase: Array, phases: int) -> NDArray[np.int64]:
    return np.asarray(np.arange(len(phase), dtype=np.int64) * phases + np.clip(phase, 0, phases - 1), dtype=np.int64)


def _aged_gain(times: F32, weight: F32, usual_weight: float, known: F32, out: F32) -> None:
    """weight · max(1, 1 / (usual weight · (times + 1))) where known: a plain mean at first, forgetting later."""
    np.add(times, np.float32(1.0), out=out)
    np.multiply(out, np.float32(usual_weight), out=out)
    np.reciprocal(out, out=out)
    np.maximum(out, np.float32(1.0), out=out)
    np.multiply(out, weight, out=out)
    np.multiply(out, known, out=out)
