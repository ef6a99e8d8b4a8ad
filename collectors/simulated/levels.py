"""What each GPU and node is like when it works as usual: real distributions, dealt out so that a job's members are alike.

Each metric's distribution is cut into slices: the lowest for idle nodes, the next for lightly used ones, then one per job, in an order
that follows one hidden intensity of the job more or less closely; a job's GPUs fill the middle of their slice. Over the cluster the
values follow the real distribution, within a job they are close, and across metrics they go together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectors.simulated.layout import Layout
from collectors.simulated.marginals import quantile
from collectors.simulated.noise import F64, Bools, Ints, Noise
from collectors.simulated.placement import Placement
from collectors.simulated.spec import GPUS, IDLE_SHARE, LIGHT_SHARE

CLOSENESS = 0.5
"""Share of its slice that a job fills: its members differ, but less than chance would have it."""

WIDEST = 0.08
"""Most that one job fills of a distribution, however few jobs there are."""

GPU_METRICS = {
    "gpu_power_w": 0.95, "gpu_temp_c": 0.7, "memory_temp_c": 0.6, "gpu_util_ratio": 0.9, "fb_used_ratio": 0.4,
    "sm_active_ratio": 0.9, "tensor_active_ratio": 0.9,
}  # fmt: skip
NODE_METRICS = {"cpu_busy_ratio": 0.4, "mem_used_ratio": 0.3, "ib_tx_mb_per_s": 0.6}
IDLE_POWER_W = 62.0
LEAST_BYTES_PER_S = 2e8
INLET_C = 22.0


@dataclass(frozen=True)
class Levels:
    """Lasting levels: [node, 8] for GPUs, [node] for machines. Traffic is per adapter; `idle` marks nodes without any use."""

    power_w: F64
    temp_c: F64
    memory_temp_c: F64
    util: F64
    fb: F64
    sm: F64
    tensor: F64
    cpu: F64
    memory: F64
    traffic: F64
    idle: Bools


def levels(layout: Layout, placement: Placement, noise: Noise) -> Levels:
    """Deal the distributions out."""
    owner = owners(layout.size, placement)
    gpu = {name: _dealt(name, owner, GPUS, rho, placement, noise) for name, rho in GPU_METRICS.items()}
    node = {name: _dealt(name, owner, 1, rho, placement, noise)[:, 0] for name, rho in NODE_METRICS.items()}
    return Levels(
        gpu["gpu_power_w"], gpu["gpu_temp_c"], gpu["memory_temp_c"], gpu["gpu_util_ratio"], gpu["fb_used_ratio"],
        gpu["sm_active_ratio"], gpu["tensor_active_ratio"], node["cpu_busy_ratio"], node["mem_used_ratio"],
        _networked(node["ib_tx_mb_per_s"] * 1e6, placement),
        owner == -1,
    )  # fmt: skip


def owners(size: int, placement: Placement) -> Ints:
    """Job index of each node; -1 idle, -2 light."""
    owner = np.full(size, -1)
    owner[placement.light] = -2
    for grid in placement.grids:
        owner[grid.span] = grid.index
    return owner


def _dealt(name: str, owner: Ints, width: int, rho: float, placement: Placement, noise: Noise) -> F64:
    """Values of one distribution for every node × `width`."""
    stream = noise.stream(f"level {name}")
    intensity = _intensity(placement, noise)
    key = {g: rho * z + (1 - rho * rho) ** 0.5 * float(stream.standard_normal()) for g, z in intensity.items()}
    order = sorted((g for g in key), key=lambda g: key[g])
    if name == "ib_tx_mb_per_s":
        order.sort(key=lambda g: placement.grids[g].nodes > 1)
    result = np.empty((len(owner), width))
    busy = max(1, sum(grid.nodes for grid in placement.grids))
    slices = {-1: (0.0, IDLE_SHARE), -2: (IDLE_SHARE, LIGHT_SHARE)}
    at = IDLE_SHARE + LIGHT_SHARE
    for group in order:
        share = (1.0 - IDLE_SHARE - LIGHT_SHARE) * placement.grids[group].nodes / busy
        slices[group] = (at, share)
        at += share
    for group, (begin, share) in slices.items():
        members = np.flatnonzero(owner == group)
        result[members] = quantile(name, _slice(begin, share, (len(members), width), stream, group))
    return result


def _slice(at: float, share: float, shape: tuple[int, int], stream: np.random.Generator, group: int) -> F64:
    count = shape[0] * shape[1]
    if count == 0:
        return np.empty(shape)
    places = (stream.permutation(count).reshape(shape) + 0.5) / count
    width = min(CLOSENESS * share, WIDEST) if group >= 0 else share
    return at + share / 2 + (places - 0.5) * width


def _networked(traffic: F64, placement: Placement) -> F64:
    """Replicas exchange the same gradients: a job's adapters carry the same. No job of several nodes is without traffic, though the
    real distribution has many zeros."""
    for grid in placement.grids:
        usual = max(float(np.median(traffic[grid.span])), LEAST_BYTES_PER_S)
        traffic[grid.span] = usual if grid.nodes > 1 else 0.0
    return traffic


def _intensity(placement: Placement, noise: Noise) -> dict[int, float]:
    stream = noise.stream("intensity")
    return {grid.index: float(stream.standard_normal()) for grid in placement.grids}
