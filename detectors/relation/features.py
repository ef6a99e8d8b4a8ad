"""One round of a job as numbers: what each node and each of its ports shows, larger always meaning worse.

A round is five seconds. Everything is compared with the node's own past first: an innovation is the distance from it, in units of what
the nodes of this job usually do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.state import Array, nan_array

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROUND_S = 5.0
LOCAL, DATA, OWN, CLOCK, TEMP, INLET, POWER, CPU = range(8)
NODE_CHANNELS = ("local", "data", "own", "clock", "temp", "inlet", "power", "cpu")
"""Log of the slowest rank's own time; share of a step that waits for input; log of the busiest GPU's computing over its past; log of the
clock and of power (less is worse); chip and inlet in degrees; share of time in which processes wait for a processor."""
FLOORS = np.array([0.0015, 0.002, 0.01, 0.002, 0.3, 0.15, 0.006, 0.01], dtype=np.float32)
"""No channel is steadier than its timer or sensor."""

RTT, MARKS, ERRORS, SPEED, ANSWERED = range(5)
PORT_CHANNELS = ("rtt", "marks", "errors", "speed")
"""Log of the round trip (plus 0.3 ms) that both directions share; log of congestion marks; of errors, losses and pauses; of lost speed.
A round has the trip that a port asks for under `RTT` and the one that it answers under `ANSWERED`: each is held against its own past, and
what the two distances agree on counts, for paths are not equally long and a slow trip in one direction only is the other end's."""
PORT_FLOORS = np.array([0.015, 0.35, 0.35, 0.05], dtype=np.float32)

LEAST_RAILS = 4
EXCUSED = 0.3
"""Where all ports of a node move together, they need not move by the same: so much of it, one may move more."""
DISAGREEING = 4.0
"""Usual deviations by which the two directions of a round trip may differ."""
RTT_OFFSET_MS = 0.3
"""Below this, a round trip's relative changes mean nothing."""
LIMIT = 30.0
LEARNING, SCALE_LEARNING = 0.03, 0.05
WARM_ROUNDS = 12


@dataclass(frozen=True)
class Round:
    """What was seen in one round; NaN where nobody reported.

    Attributes
    ----------
    step_ms
        Middle of the job's steps that ended in it, NaN when none did.
    node
        NODE_CHANNELS × nodes; `OWN` is left NaN, it follows from `gpu`.
    gpu
        nodes × GPUs, log of the time in which tensor cores worked.
    port
        PORT_CHANNELS and `ANSWERED` × nodes × rails.
    """

    at_ns: int
    step_ms: float
    node: F32
    gpu: F32
    port: F32


class Past(msgspec.Struct):
    """What each node's own past makes likely. Arrays over channels × nodes, and channels × nodes × rails."""

    rounds: int = 0
    node: Array = msgspec.field(default_factory=lambda: nan_array(8, 0))
    gpu: Array = msgspec.field(default_factory=lambda: nan_array(0, 0))
    port: Array = msgspec.field(default_factory=lambda: nan_array(5, 0, 0))
    scale: Array = msgspec.field(default_factory=FLOORS.copy)
    port_scale: Array = msgspec.field(default_factory=PORT_FLOORS.copy)
    before: Array = msgspec.field(default_factory=lambda: np.zeros((2, 8, 0), dtype=np.float32))

    def advance(self, seen: Round, frozen: Bools, frozen_ports: Bools | None = None) -> Innovations:
        """Compare a round with the past, then learn from it, except at the nodes in `frozen` and the ports in `frozen_ports`."""
        seen = self._with_known_devices(seen)
        if (
            self.node.shape[1] != seen.node.shape[1]
            or self.gpu.shape != seen.gpu.shape
            or self.port.shape != seen.port.shape
        ):
            self._begin(seen)
        values = seen.node.copy()
        values[OWN] = self._own(seen.gpu, frozen)
        weight = max(LEARNING, 1.0 / (self.rounds + 1))
        away = values - self.node
        scaled = np.clip(away / self.scale[:, None], -LIMIT, LIMIT).astype(np.float32)
        known = frozen_ports is not None and frozen_ports.shape == seen.port.shape[1:]
        held = frozen_ports if frozen_ports is not None and known else np.zeros(seen.port.shape[1:], dtype=np.bool_)
        ports = self._ports(seen.port, held, weight)
        lags = self.before.copy()
        self._learn(values, away, frozen, weight)
        self.before = np.stack([np.nan_to_num(scaled), self.before[0]])
        self.rounds += 1
        return Innovations(scaled, lags, ports, self.rounds > WARM_ROUNDS)

    def _with_known_devices(self, seen: Round) -> Round:
        """A round in which nobody spoke of GPUs, or of ports, says nothing of them: what is known of them is not forgotten for that."""
        gpu, port = seen.gpu, seen.port
        if not gpu.shape[1] and len(self.gpu) == len(gpu):
            gpu = np.full(self.gpu.shape, np.nan, dtype=np.float32)
        if not port.shape[2] and self.port.shape[:2] == port.shape[:2]:
            port = np.full(self.port.shape, np.nan, dtype=np.float32)
        return replace(seen, gpu=gpu, port=port)

    def kept(self, places: list[int]) -> Past:
        """The same knowledge for other nodes: `places[i]` is the old number of new node i, -1 for a newcomer."""
        pick = np.array(places, dtype=np.int64)

        def take(values: Array, axis: int, missing: float) -> Array:
            padded = (
                np.concatenate([values, np.full_like(np.take(values, [0], axis), missing)], axis)
                if values.shape[axis]
                else values
            )
            return np.take(padded, np.where(pick >= 0, pick, values.shape[axis]), axis)

        if not self.node.shape[1]:
            return Past()
        return Past(self.rounds, take(self.node, 1, np.nan), take(self.gpu, 0, np.nan), take(self.port, 1, np.nan), self.scale.copy(),
                    self.port_scale.copy(), take(self.before, 2, 0.0))  # fmt: skip

    def _begin(self, seen: Round) -> None:
        self.rounds = 0
        self.node, self.gpu, self.port = (
            np.full(v.shape, np.nan, dtype=np.float32) for v in (seen.node, seen.gpu, seen.port)
        )
        self.scale, self.port_scale = FLOORS.copy(), PORT_FLOORS.copy()
        self.before = np.zeros((2, *seen.node.shape), dtype=np.float32)

    def _own(self, gpu: F32, frozen: Bools) -> F32:
        if not gpu.shape[1]:
            return np.full(gpu.shape[0], np.nan, dtype=np.float32)
        away = gpu - self.gpu
        weight = max(LEARNING, 1.0 / (self.rounds + 1))
        step = np.clip(away, -0.3, 0.3) if self.rounds > WARM_ROUNDS else away
        moved = self.gpu + _for_accused(weight * step, np.broadcast_to(frozen[:, None], step.shape), None)
        self.gpu = np.where(np.isnan(self.gpu), gpu, np.where(np.isnan(moved), self.gpu, moved))
        return _quiet_max(away)

    def _ports(self, port: F32, frozen: Bools, weight: float) -> F32:
        away = port - self.port
        bound = 3.0 * self.port_scale[[RTT, MARKS, ERRORS, SPEED, RTT], None, None]
        step = weight * np.clip(away, -bound, bound) if self.rounds > WARM_ROUNDS else weight * away
        moved = self.port + _for_accused(step, np.broadcast_to(frozen[None], step.shape), 2)
        self.port = np.where(np.isnan(self.port), port, np.where(np.isnan(moved), self.port, moved)).astype(np.float32)
        both = away[:ANSWERED]
        both[RTT] = _agreed(away[RTT], away[ANSWERED], float(self.port_scale[RTT]))
        beside, excused = _beside_others(both)
        plain = np.where(frozen[None], np.nan, beside).reshape(len(both), -1)
        self.port_scale = _scale(self.port_scale, plain, PORT_FLOORS, self.rounds)
        more = np.nan_to_num(np.sign(beside) * np.maximum(np.abs(beside) - excused, 0.0))
        return np.asarray(np.clip(more / self.port_scale[:, None, None], -LIMIT, LIMIT), dtype=np.float32)

    def _learn(self, values: F32, away: F32, frozen: Bools, weight: float) -> None:
        bound = 3.0 * self.scale[:, None] if self.rounds > WARM_ROUNDS else np.inf
        step = weight * np.clip(away, -bound, bound)
        moved = self.node + _for_accused(step, np.broadcast_to(frozen[None, :], step.shape), 1)
        self.node = np.where(np.isnan(self.node), values, np.where(np.isnan(moved), self.node, moved)).astype(
            np.float32
        )
        known = away - _medians(away)[:, None]
        self.scale = _scale(self.scale, known, FLOORS, self.rounds)


@dataclass(frozen=True)
class Innovations:
    """Distances from the past in usual units, clipped to ±30: channels × nodes (NaN unknown), the two rounds before (0 unknown), and
    ports, which are also relative to the other ports of their node. `warm` when there is enough past to speak of."""

    node: F32
    before: F32
    port: F32
    warm: bool


def _for_accused(step: Array, frozen: Bools, axis: int | None) -> Array:
    """Who is accused learns only what all others learn (their median along `axis`): frozen altogether, it would stand apart for good once
    the job as a whole has moved on."""
    if not frozen.any():
        return step
    common = known_median(np.where(frozen, np.nan, step), axis)
    return np.where(frozen, np.nan_to_num(common), step)


def _scale(old: Array, centred: Array, floors: F32, rounds: int) -> Array:
    spread = 1.4826 * known_median(np.abs(centred), 1)[:, 0]
    weight = max(SCALE_LEARNING, 1.0 / max(rounds, 1))
    moved = old + weight * (np.maximum(spread, floors) - old)
    return np.where(np.isfinite(moved), np.maximum(moved, floors), old).astype(np.float32)


def _medians(values: Array) -> Array:
    return np.nan_to_num(known_median(values, 1)[:, 0])


def known_median(values: Array, axis: int | None = None) -> Array:
    """Median of what is known along an axis, which stays as one; NaN where nothing is. In half the time of `np.nanmedian` and silent.

    Examples
    --------
    >>> known_median(np.array([[3.0, np.nan, 1.0, 5.0], [np.nan, 2.0, 4.0, np.nan]]), 1).tolist()
    [[3.0], [3.0]]
    """
    flat = values.reshape([-1] if axis is None else values.shape)
    along = axis or 0
    if not flat.shape[along]:
        return np.full([1 if i == along else size for i, size in enumerate(flat.shape)], np.nan, dtype=values.dtype)
    ordered = np.sort(flat, axis=along)
    known = np.count_nonzero(~np.isnan(flat), axis=along, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(known - 1, 0) // 2, axis=along)
    middle = 0.5 * (low + np.take_along_axis(ordered, np.minimum(known // 2, flat.shape[along] - 1), axis=along))
    return np.asarray(middle.reshape([1] * values.ndim) if axis is None else middle)


def known_mean(values: F32) -> F32:
    """Mean along the last axis of what is known, NaN where nothing is; `np.nanmean` without its warnings."""
    known = ~np.isnan(values)
    total = np.where(known, values, np.float32(0.0)).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        np.divide(total, known.sum(axis=-1), out=total, casting="unsafe")
    return np.asarray(total)


def _agreed(asked: F32, answered: F32, scale: float) -> F32:
    """The smaller of two directions, or nothing where they contradict each other: then one of them is the other end's."""
    larger = np.fmax(np.abs(asked), np.abs(answered))
    contradict = np.abs(asked - answered) > EXCUSED * larger + DISAGREEING * scale
    return np.where(contradict, 0.0, np.fmin(asked, answered)).astype(np.float32)


def _beside_others(away: F32) -> tuple[F32, F32]:
    """Ports next to the other ports of their node, which carry the same job in the same phase (next to all where there are few), and how
    much of that a common move excuses."""
    if away.shape[2] >= LEAST_RAILS:
        common = known_median(away, 2)
        return away - common, np.nan_to_num(EXCUSED * np.abs(common))
    return away - _medians(away.reshape(len(away), -1))[:, None, None], np.zeros_like(away[:, :, :1])


def _quiet_max(values: Array) -> F32:
    some = np.isfinite(values).any(axis=1)
    found = np.where(np.isfinite(values), values, -np.inf).max(axis=1)
    return np.where(some, found, np.nan).astype(np.float32)


def of_ranks(values: F64, rank_node: NDArray[np.int64], count: int) -> F64:
    """Steps × ranks → steps × nodes: the largest of a node's ranks, NaN where none said anything."""
    per = len(rank_node) // max(count, 1)
    known = np.where(np.isfinite(values), values, -np.inf)
    if per * count == len(rank_node) and np.array_equal(rank_node, np.repeat(np.arange(count), per)):
        found = known.reshape(len(values), count, per).max(axis=2)
    else:
        found = np.full((len(values), count + 1), -np.inf)
        np.maximum.at(found.T, rank_node, known.T)
        found = found[:, :count]
    return np.where(np.isfinite(found), found, np.nan)


def step_channels(
    local_ms: F64, data_ms: F64, duration_ms: F64, rank_node: NDArray[np.int64], count: int
) -> tuple[F32, float]:
    """`LOCAL` and `DATA` of each node, and the middle step, from steps × ranks: medians over the steps of a round."""
    if not len(local_ms):
        return np.full((2, count), np.nan, dtype=np.float32), float("nan")
    local = np.log(np.maximum(known_median(of_ranks(local_ms, rank_node, count), 0)[0], 1e-3))
    whole = known_median(duration_ms, 1)
    data = known_median(of_ranks(data_ms / whole, rank_node, count), 0)[0]
    return np.stack([local, data]).astype(np.float32), float(known_median(whole)[0, 0])


def rtt_log(rtt_ms: F32) -> F32:
    """The channel of a round trip."""
    return np.asarray(np.log(np.maximum(rtt_ms, 0.0) + RTT_OFFSET_MS), dtype=np.float32)


def gpu_log(tensor_ratio: F32) -> F32:
    """Log of tensor activity, NaN for GPUs that do not compute."""
    return np.where(tensor_ratio > 0.01, np.log(np.maximum(tensor_ratio, 0.01)), np.nan).astype(np.float32)
