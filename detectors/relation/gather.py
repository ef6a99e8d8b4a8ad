"""From frames to rounds: what a job's nodes reported in five seconds, averaged over ticks and steps."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from detectors.base import AlignedTick
from detectors.relation import features
from detectors.relation.features import Round
from detectors.relation.rows import Places
from detectors.state import Array
from detectors.steps.assembly import DATA, DURATION, LOCAL, JointStep

F32 = NDArray[np.float32]
Ints = NDArray[np.int64]

ERRORS = ("out_of_sequence_per_s", "retransmit_timeouts_per_s", "symbol_errors_per_s", "rx_errors_per_s")
MARKS = ("ecn_marked_per_s", "cnp_sent_per_s")
MOST_STEPS = 64


class Gathered(msgspec.Struct):
    """What came since the last round: plain steps (local, data, duration × ranks) and sums over ticks with their counts."""

    steps: list[Array] = []
    node: Array = msgspec.field(default_factory=lambda: np.zeros((2, 8, 0)))
    gpu: Array = msgspec.field(default_factory=lambda: np.zeros((2, 0, 0)))
    port: Array = msgspec.field(default_factory=lambda: np.zeros((2, 5, 0, 0)))

    def put_step(self, step: JointStep) -> None:
        """Take a plain step in."""
        self.steps = [*self.steps, step.values[[LOCAL, DATA, DURATION]]][-MOST_STEPS:]

    def put_tick(self, node: F32, gpu: F32, port: F32) -> None:
        """Take a tick's channels in; what was gathered of other devices is dropped, a tick that knows of none says nothing of them."""
        self.node, self.gpu, self.port = _added(self.node, node), _added(self.gpu, gpu), _added(self.port, port)

    def close(self, at_ns: int, rank_node: Ints, nodes: int) -> Round:
        """The round, and begin anew."""
        values = np.stack(
            [step for step in self.steps if step.shape[1] == len(rank_node)] or [np.zeros((3, len(rank_node)))]
        )
        kept = values if self.steps else values[:0]
        first, step_ms = features.step_channels(kept[:, 0], kept[:, 1], kept[:, 2], rank_node, nodes)
        node, gpu, port = (_mean(sums) for sums in (self.node, self.gpu, self.port))
        node = node if node.shape[1] == nodes else np.full((8, nodes), np.nan, dtype=np.float32)
        node[: features.OWN] = first
        self.steps, self.node, self.gpu, self.port = (
            [],
            np.zeros((2, 8, 0)),
            np.zeros((2, 0, 0)),
            np.zeros((2, 5, 0, 0)),
        )
        gpu = gpu if len(gpu) == nodes else np.full((nodes, 0), np.nan, dtype=np.float32)
        port = port if port.shape[1] == nodes else np.full((5, nodes, 0), np.nan, dtype=np.float32)
        return Round(at_ns, step_ms, node, gpu, port)


def channels(tick: AlignedTick, places: Places) -> tuple[F32, F32, F32, tuple[str, ...]]:
    """NODE_CHANNELS × nodes (of steps NaN), nodes × GPUs, PORT_CHANNELS and `ANSWERED` × nodes × rails of a tick, and the rails' names."""
    node = np.full((8, len(places.graph.nodes)), np.nan, dtype=np.float32)
    gpu, _ = places.grid(tick.family("gpu"), "tensor_active_ratio", "sm_clock_mhz", "power_w", "temp_c")
    if gpu.shape[2]:
        with np.errstate(divide="ignore", invalid="ignore"):
            node[features.CLOCK] = -np.log(np.fmin.reduce(gpu[1], axis=1))
            node[features.POWER] = -np.log(features.known_mean(gpu[2]))
        node[features.TEMP] = np.fmax.reduce(gpu[3], axis=1)
    node[features.INLET] = _only(places.grid(tick.family("board"), "inlet_temp_c")[0][0])
    node[features.CPU] = _only(places.grid(tick.family("host"), "psi_cpu_some_ratio")[0][0])
    port, rails = _ports(tick, places)
    return node, features.gpu_log(gpu[0]), port, rails


def _ports(tick: AlignedTick, places: Places) -> tuple[F32, tuple[str, ...]]:
    """Of the adapters that training uses: those that count RDMA errors or marks."""
    nic, names = places.grid(tick.family("nic"), *MARKS, *ERRORS, "speed_mbps")
    if not names:
        return np.zeros((5, len(places.graph.nodes), 0), dtype=np.float32), ()
    used = np.isfinite(nic[0]).any(axis=0) | np.isfinite(nic[4]).any(axis=0)
    rails = tuple(name for name, wanted in zip(names, used.tolist(), strict=True) if wanted)
    nic = nic[:, :, used]
    paused, devices = places.grid(tick.family("port"), "pause_tx_per_s")
    out = np.zeros((5, len(places.graph.nodes), len(rails)), dtype=np.float32)
    out[[features.RTT, features.ANSWERED]] = _rtt(tick, places, len(rails))
    out[features.MARKS] = np.log1p(np.nan_to_num(nic[:2]).sum(axis=0))
    out[features.ERRORS] = np.log1p(
        np.nan_to_num(nic[2:6]).sum(axis=0) + (np.nan_to_num(paused[0]) if devices == rails else 0.0)
    )
    out[features.SPEED] = -np.log(np.maximum(nic[6], 1.0))
    out[:, np.isnan(nic).all(axis=(0, 2))] = np.nan
    return out, rails


def _rtt(tick: AlignedTick, places: Places, count: int) -> F32:
    """Of each port the trip that it asks for, and the one that it answers."""
    probes = tick.family("mesh")
    both = np.full((2, len(places.graph.nodes), count), np.nan, dtype=np.float32)
    if probes is not None and places.rails and count:
        trips = features.rtt_log(probes.column("rtt_ms"))
        for grid, (rows, cells) in zip(both, places.probed(probes, count), strict=True):
            np.fmin.at(grid.reshape(-1), cells, trips[rows])
    return both


def _only(values: F32) -> F32:
    return features.known_mean(values) if values.shape[1] else np.full(len(values), np.nan, dtype=np.float32)


def _added(sums: Array, values: F32) -> Array:
    fresh = np.stack([np.nan_to_num(values), np.isfinite(values)]).astype(np.float64)
    if not fresh.size and sums.shape[:-1] == fresh.shape[:-1]:
        return sums
    return sums + fresh if sums.shape == fresh.shape else fresh


def _mean(sums: Array) -> F32:
    return np.where(sums[1] > 0, sums[0] / np.maximum(sums[1], 1.0), np.nan).astype(np.float32)
