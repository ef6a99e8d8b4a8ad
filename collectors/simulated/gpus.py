"""GPU metrics of an interval, from load, clocks and levels."""

from __future__ import annotations

import numpy as np

from collectors.simulated.drivers import Drivers
from collectors.simulated.families import columns
from collectors.simulated.layout import Layout
from collectors.simulated.levels import IDLE_POWER_W, INLET_C, Levels
from collectors.simulated.noise import F32, F64, Drift, Noise
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Load, blank

CLOCK_MHZ, IDLE_CLOCK_MHZ, CLOCK_STEP_MHZ = 1410.0, 210.0, 15.0
TDP_W, POWER_EXPONENT = 400.0, 2.4
CHIP_TAU_S, MEMORY_TAU_S = 25.0, 60.0
PCIE_BYTES_PER_S = 24e9
NVLINK_BYTES_PER_S = 60e9
SEEN = 0.96
"""The counter looks a few times a second: short gaps between kernels are not seen."""

RESTING_W = 105.0
"""Below this a GPU is taken to draw its level at rest: memory in use, nothing running."""

SPIN_POWER = 0.15
"""Power of a GPU that only waits in NCCL kernels, of its full range."""


class Gpus:
    """Keeps temperatures and slow noise from interval to interval."""

    def __init__(self, layout: Layout, levels: Levels, noise: Noise, interval_s: float) -> None:
        shape = (layout.size, GPUS)
        born = noise.stream("gpus")
        self._layout = layout
        self._levels = levels
        self._interval_s = interval_s
        self._power = Drift(shape, 0.9**interval_s, born)
        idle_w = np.minimum(IDLE_POWER_W + 3.0 * born.standard_normal(shape), levels.power_w)
        self._idle_w = np.where(levels.power_w < RESTING_W, levels.power_w, idle_w)
        self._clock_mhz = np.where(levels.power_w > 75.0, CLOCK_MHZ, IDLE_CLOCK_MHZ)
        self._base = blank(layout, "gpu")
        self._remembered: F64 = born.poisson(0.05, shape).astype(np.float64)
        self._chip_c = levels.temp_c.copy()
        self._memory_c = levels.memory_temp_c.copy()
        # degrees that power does not explain: place in the machine, paste, air
        self._warming = 0.07 * (levels.power_w - self._idle_w)
        self._fill_constants()

    def _fill_constants(self) -> None:
        at = columns("gpu")
        self._base[:] = 0.0
        self._base[..., at["pcie_link_gen"]] = 4.0
        self._base[..., at["pcie_link_width"]] = 16.0
        self._base[..., at["remapped_rows_correctable"]] = self._remembered

    def values(self, load: Load, drivers: Drivers, stream: np.random.Generator, nic: F64, inlet_c: F64) -> F32:
        """[node, 8, column]. `nic` is each GPU's share of network traffic in bytes/s, `inlet_c` the air per node."""
        at, lv = columns("gpu"), self._levels
        out = self._base.copy()
        jitter = stream.standard_normal((4, *load.compute.shape), dtype=np.float32)
        active = np.minimum(load.compute / load.usual[:, None], 1.35)
        clock = self._clock(drivers, active)
        power = self._power_w(active, load.spin, clock, drivers, stream)
        self._warm(power, inlet_c, drivers)
        seen = np.minimum(1.0, (load.compute + load.spin) / SEEN)
        out[..., at["gpu_util_ratio"]] = np.clip(seen * lv.util + 0.002 * jitter[0] * (active > 0), 0, 1)
        out[..., at["sm_active_ratio"]] = np.clip(lv.sm * (active + 0.03 * load.spin) * (1 + 0.02 * jitter[1]), 0, 1)
        out[..., at["tensor_active_ratio"]] = np.clip(lv.tensor * active * (1 + 0.02 * jitter[1]), 0, 1)
        out[..., at["dram_active_ratio"]] = np.clip(0.45 * lv.sm * active * (1 + 0.03 * jitter[2]), 0, 1)
        out[..., at["sm_clock_mhz"]] = np.round(clock / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
        out[..., at["power_w"]] = power
        out[..., at["temp_c"]] = np.round(self._chip_c + 0.3 * jitter[3])
        out[..., at["memory_temp_c"]] = np.round(self._memory_c + 0.3 * jitter[3])
        out[..., at["fb_used_ratio"]] = lv.fb
        self._buses(out, load, drivers, active, nic)
        out[..., at["ecc_correctable_per_s"]] = (
            stream.random(active.shape) < 2e-6 * self._interval_s
        ) / self._interval_s
        if not drivers.calm("lost"):
            out[drivers["lost"] > 0] = np.nan
        return out

    def _clock(self, drivers: Drivers, active: F64) -> F64:
        mhz = np.where(active > 0.01, CLOCK_MHZ, self._clock_mhz)
        if not drivers.calm("clock", "power_cap"):
            mhz = mhz * drivers["clock"] * np.minimum(1.0, drivers["power_cap"]) ** (1 / POWER_EXPONENT)
        return mhz

    def _power_w(self, active: F64, spin: F64, clock: F64, drivers: Drivers, stream: np.random.Generator) -> F64:
        span = np.maximum(self._levels.power_w - self._idle_w, 0.0)
        slower = (clock / CLOCK_MHZ) ** POWER_EXPONENT
        busy = (1 - SPIN_POWER) * active + SPIN_POWER * np.minimum(1.0, active + spin)
        watts = self._idle_w + span * busy * slower
        watts = watts * (1.0 + 0.012 * self._power.advance(stream))
        return (
            watts
            if drivers.calm("power_cap")
            else np.where(drivers["power_cap"] < 1.0, np.minimum(watts, TDP_W * drivers["power_cap"]), watts)
        )

    def _warm(self, power: F64, inlet_c: F64, drivers: Drivers) -> None:
        rise = 0.07 * (power - self._idle_w) - self._warming + (inlet_c - INLET_C)[:, None]
        chip = self._levels.temp_c + rise + drivers["heat_c"]
        memory = self._levels.memory_temp_c + 0.8 * rise + drivers["memory_heat_c"]
        self._chip_c += (chip - self._chip_c) * (1 - np.exp(-self._interval_s / CHIP_TAU_S))
        self._memory_c += (memory - self._memory_c) * (1 - np.exp(-self._interval_s / MEMORY_TAU_S))

    def _buses(self, out: F32, load: Load, drivers: Drivers, active: F64, nic: F64) -> None:
        at = columns("gpu")
        limit = PCIE_BYTES_PER_S * drivers["pcie"]
        out[..., at["pcie_rx_bytes_per_s"]] = np.minimum(limit, nic + 4e7 * active + 6e8 * load.data)
        out[..., at["pcie_tx_bytes_per_s"]] = np.minimum(limit, nic + 2e7 * active)
        linked = NVLINK_BYTES_PER_S * self._levels.tensor * active * np.minimum(1.0, 0.3 + drivers["nvlink"])
        out[..., at["nvlink_tx_bytes_per_s"]] = linked
        out[..., at["nvlink_rx_bytes_per_s"]] = np.roll(linked, 1, axis=1)
