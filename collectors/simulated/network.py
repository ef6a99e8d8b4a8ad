"""Network metrics of an interval: ports, optics and probes. What one port sends the next of its ring receives."""

from __future__ import annotations

import numpy as np

from collectors.simulated.drivers import Drivers
from collectors.simulated.families import columns
from collectors.simulated.layout import RAIL_MBPS, Layout
from collectors.simulated.levels import Levels
from collectors.simulated.noise import F32, F64, Ints, Noise
from collectors.simulated.placement import Placement
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Load, blank

LINE_BYTES_PER_S = RAIL_MBPS * 1e6 / 8
PACKET_BYTES = 4096.0
PROBES_PER_S = 4
QUIET_LOSS = 2e-5
RAIL, MANAGEMENT, STORAGE = 1.0, 2.0, 3.0


class Network:
    """Keeps what lasts: path lengths, optical levels, rings."""

    def __init__(self, layout: Layout, placement: Placement, levels: Levels, noise: Noise, interval_s: float) -> None:
        born = noise.stream("network")
        ports = (layout.size, layout.spec.rails)
        self._layout = layout
        self._levels = levels
        self._interval_s = interval_s
        self._before = ring(layout.size, placement)
        self._of_port = (layout.rail_of_gpu[None, :] == np.arange(layout.spec.rails)[:, None]) / (
            GPUS / layout.spec.rails
        )
        self._light_dbm = -1.0 + 0.6 * born.standard_normal(ports)
        self._module_c = 45.0 + 3.0 * born.standard_normal(ports)
        self._fec = born.lognormal(np.log(40.0), 0.8, ports)
        self._path_ms = (0.035 + 0.02 * layout.peer_far) * born.lognormal(0.0, 0.12, layout.peers.shape)
        self._nic = self._blank_nic(layout)

    @staticmethod
    def _blank_nic(layout: Layout) -> F32:
        at, out = columns("nic"), blank(layout, "nic")
        rails = layout.spec.rails
        for name in ("up", "carrier"):
            out[..., at[name]] = 1.0
        out[:, :rails, at["speed_mbps"]] = RAIL_MBPS
        out[:, rails:, at["speed_mbps"]] = 25_000.0
        out[:, rails, at["role"]] = MANAGEMENT
        out[:, rails + 1, at["role"]] = STORAGE
        for name in ("rx_errors_per_s", "tx_dropped_per_s"):
            out[..., at[name]] = 0.0
        for name in ("tx_errors_per_s", "rx_dropped_per_s", "carrier_changes_per_s"):
            out[:, rails:, at[name]] = 0.0
        for name in (
            "symbol_errors_per_s",
            "link_downed_per_s",
            "link_recovery_per_s",
            "retransmit_timeouts_per_s",
            "saturated_count",
        ):
            out[:, :rails, at[name]] = 0.0
        return out

    def traffic(self, load: Load, drivers: Drivers, stream: np.random.Generator) -> tuple[F64, F64]:
        """Bytes per second sent and received per port."""
        wanted = self._levels.traffic[:, None] * (load.traffic @ self._of_port.T)
        wanted = wanted * (1.0 + 0.01 * stream.standard_normal(wanted.shape, dtype=np.float32))
        limit = LINE_BYTES_PER_S * drivers["bandwidth"] * (drivers["down"] < 0.5)
        sent = np.minimum(wanted, limit)
        # the slower of the two ends rules; a receiver that is full pauses its sender
        np.minimum.at(sent, self._before, limit)
        return sent, sent[self._before] * (1.0 - np.minimum(1.0, drivers["loss"]))

    def nic(self, sent: F64, received: F64, load: Load, drivers: Drivers, stream: np.random.Generator) -> F32:
        """Ports of the rails, then management and storage."""
        at, out, rails = columns("nic"), self._nic.copy(), self._layout.spec.rails
        out[:, :rails, at["tx_bytes_per_s"]] = sent
        out[:, :rails, at["rx_bytes_per_s"]] = received
        busy = sent / LINE_BYTES_PER_S
        for name, scale in (
            ("rx_wait_per_s", 2e4),
            ("ecn_marked_per_s", 15.0),
            ("cnp_sent_per_s", 10.0),
            ("out_of_sequence_per_s", 0.4),
        ):
            out[:, :rails, at[name]] = self._events(scale * busy * busy, stream)
        noise = stream.lognormal(0.0, 0.3, (2, self._layout.size))
        out[:, rails, at["tx_bytes_per_s"]] = 9e4 * noise[0]
        out[:, rails, at["rx_bytes_per_s"]] = 6e4 * noise[1]
        running = np.nan_to_num(load.alive).max(axis=1)
        out[:, rails + 1, at["tx_bytes_per_s"]] = 3e5 * running * noise[1] + 1.4e9 * load.checkpoint * noise[0]
        out[:, rails + 1, at["rx_bytes_per_s"]] = 8e7 * running * noise[0]
        for way in ("rx", "tx"):
            out[..., at[f"{way}_packets_per_s"]] = np.ceil(out[..., at[f"{way}_bytes_per_s"]] / PACKET_BYTES)
        if not drivers.calm("down"):
            gone = drivers["down"] > 0.5
            for name in ("up", "carrier"):
                out[:, :rails, at[name]] = np.where(gone, 0.0, 1.0)
            out[:, :rails, at["speed_mbps"]] = np.where(gone, np.nan, RAIL_MBPS)
        return out

    def port(self, stream: np.random.Generator) -> F32:
        """Optics and pauses of the rails."""
        at, out = columns("port"), blank(self._layout, "port")
        drawn = stream.standard_normal((2, *self._light_dbm.shape), dtype=np.float32)
        out[..., at["fec_corrected_per_s"]] = self._events(self._fec, stream)
        out[..., at["rx_power_dbm"]] = self._light_dbm + 0.03 * drawn[0]
        out[..., at["module_temp_c"]] = np.round(self._module_c + 0.4 * drawn[1])
        out[..., at["pause_rx_per_s"]] = 0.0
        out[..., at["pause_tx_per_s"]] = 0.0
        return out

    def mesh(self, sent: F64, drivers: Drivers, stream: np.random.Generator) -> F32:
        """[node, peer]: round trips and losses of the probes."""
        at, out, layout = columns("mesh"), blank(self._layout, "mesh"), self._layout
        peers, rails = layout.peers, layout.peer_rail[None, :]
        probes = max(1, round(PROBES_PER_S * self._interval_s))
        here = np.arange(layout.size)[:, None]
        busy = np.maximum(sent[here, rails], sent[peers, rails]) / LINE_BYTES_PER_S
        noise = stream.standard_normal(peers.shape, dtype=np.float32)
        trip = self._path_ms * np.exp(0.05 * noise) * (1.0 + 0.25 * busy) + drivers["latency_ms"] * (
            0.9 + 0.1 * np.abs(noise)
        )
        tail = stream.standard_exponential(peers.shape, dtype=np.float32)
        chance = np.clip(QUIET_LOSS + drivers["probe_loss"], 0.0, 1.0)
        chance = np.where(drivers["vanished"][peers] > 0, 1.0, chance)
        lost = stream.binomial(probes, chance).astype(np.float64)
        answered = lost < probes
        out[..., at["rtt_ms"]] = np.where(answered, trip, np.nan)
        out[..., at["rtt_max_ms"]] = np.where(answered, trip * (1.0 + 0.15 * tail), np.nan)
        out[..., at["sent_count"]] = probes
        out[..., at["lost_count"]] = lost
        unreachable = (drivers["silent"][peers] > 0) & (drivers["vanished"][peers] == 0)
        out[unreachable] = np.array([np.nan, np.nan, 0.0, 0.0], dtype=np.float32)
        return out

    def _events(self, per_s: F64, stream: np.random.Generator) -> F64:
        """A rate as a counter shows it: whole events in the interval, with a square root's spread."""
        mean = per_s * self._interval_s
        drawn = mean + np.sqrt(mean) * stream.standard_normal(mean.shape, dtype=np.float32)
        return np.maximum(0.0, np.round(drawn)) / self._interval_s


def ring(size: int, placement: Placement) -> Ints:
    """From whom each node receives: its neighbour among the nodes of its stage, or of its job when stages are single nodes."""
    before = np.arange(size)
    for grid in placement.grids:
        each = grid.nodes // grid.pp
        length = each if each > 1 else grid.nodes
        for first in range(grid.first_node, grid.first_node + grid.nodes, length):
            before[first : first + length] = first + (np.arange(length) - 1) % length
    return before
