"""Metrics of machines and processes in an interval."""

from __future__ import annotations

import numpy as np

from collectors.simulated import marginals
from collectors.simulated.drivers import Drivers
from collectors.simulated.families import columns
from collectors.simulated.jobs import DAY_S
from collectors.simulated.layout import Layout
from collectors.simulated.levels import INLET_C, Levels
from collectors.simulated.noise import F32, F64, Drift, Noise
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Load, blank

CORES = 128.0
MEMORY_BYTES = 2e12
DISK_BYTES = 7e12
BLOCKED, STOPPED = 3.0, 4.0


class Hosts:
    """Keeps slow noise and what lasts from interval to interval."""

    def __init__(self, layout: Layout, levels: Levels, noise: Noise, interval_s: float) -> None:
        born = noise.stream("hosts")
        size = (layout.size,)
        self._layout = layout
        self._levels = levels
        self._interval_s = interval_s
        self._cpu = Drift(size, 0.85**interval_s, born)
        self._air = Drift(size, 0.98**interval_s, born)
        self._place_c = (
            0.8 * born.standard_normal(layout.size)
            + 0.7 * born.standard_normal(int(layout.zone.max()) + 1)[layout.zone]
        )
        self._disk = np.clip(0.35 + 0.15 * born.standard_normal(layout.size), 0.05, 0.8)
        self._load1 = CORES * levels.cpu
        self._process = blank(layout, "process")
        # a machine draws what real ones draw at the same quantile as its GPUs; the lowest are readings of 0
        real = marginals.table()
        self._server_w = real["gpu_power_w"], np.maximum(real["server_power_w"], real["server_power_w"][1])
        self._rss = born.lognormal(np.log(1.2e10), 0.15, (layout.size, GPUS))

    def inlet_c(self, at_s: float, drivers: Drivers, stream: np.random.Generator) -> F64:
        """Air entering each machine."""
        day = np.sin(2 * np.pi * at_s / DAY_S)
        return np.asarray(INLET_C + self._place_c + day + 0.2 * self._air.advance(stream) + drivers["inlet_c"])

    def host(self, load: Load, drivers: Drivers, stream: np.random.Generator, heard_ms: F64) -> F32:
        """[node, 1, column]. `heard_ms` is the clock's offset as the probes see it."""
        at, out, lv = columns("host"), blank(self._layout, "host"), self._levels
        n = stream.standard_normal((6, self._layout.size), dtype=np.float32)
        hog = drivers["hog"]
        running = np.where(lv.idle, 1.0, np.minimum(1.0, (load.compute + load.spin + load.data).mean(axis=1)))
        busy = np.clip(lv.cpu * (0.35 + 0.65 * running) * (1 + 0.06 * self._cpu.advance(stream)) + hog, 0.002, 1.0)
        self._load1 += (CORES * busy + CORES * hog - self._load1) * (1 - np.exp(-self._interval_s / 60.0))
        iowait = np.clip(0.002 * np.exp(0.5 * n[2]) + 0.02 * load.data.mean(axis=1) + 0.05 * load.checkpoint, 0, 1)
        memory = np.clip(lv.memory + (1 - lv.memory) * drivers["leak"], 0.01, 0.998)
        rows: dict[str, F64 | float] = {
            "cpu_busy_ratio": busy, "cpu_user_ratio": 0.85 * busy, "cpu_system_ratio": 0.15 * busy, "cpu_iowait_ratio": iowait,
            "cpu_steal_ratio": 0.0, "load1": self._load1, "runnable_tasks": np.maximum(1, np.round(CORES * (busy + hog) + 2 * n[0])),
            "mem_available_ratio": 1 - memory, "mem_used_bytes": memory * MEMORY_BYTES, "swap_used_ratio": 0.0,
            "psi_cpu_some_ratio": np.clip(0.02 * busy + 0.6 * hog + 0.004 * np.abs(n[1]), 0, 1),
            "psi_memory_some_ratio": np.where(memory > 0.95, 0.2, 0.0), "psi_memory_full_ratio": np.where(memory > 0.97, 0.1, 0.0),
            "psi_io_some_ratio": np.clip(0.004 * np.abs(n[2]) + iowait, 0, 1), "psi_io_full_ratio": np.clip(0.5 * iowait, 0, 1),
            "tcp_retrans_per_s": np.round(np.exp(0.8 * n[3])), "disk_read_bytes_per_s": 2e6 * np.exp(0.6 * n[4]),
            "disk_write_bytes_per_s": 4e6 * np.exp(0.6 * n[5]) + 4e8 * load.checkpoint,
            "disk_busy_ratio": np.clip(0.01 * np.exp(0.5 * n[4]) + 0.4 * load.checkpoint, 0, 1),
            "run_dir_free_bytes": DISK_BYTES * (1 - self._disk) * (1 + 2e-6 * n[4]),
            "context_switches_per_s": 2e4 * (1 + 20 * busy) * np.exp(0.05 * n[0]),
            "clock_offset_ms": heard_ms + 0.05 * n[1],
        }  # fmt: skip
        for name, values in rows.items():
            out[:, 0, at[name]] = values
        return out

    def board(self, inlet_c: F64, gpu_power_w: F32, stream: np.random.Generator) -> F32:
        """[node, 1, column]."""
        at, out = columns("board"), blank(self._layout, "board")
        n = stream.standard_normal((2, self._layout.size), dtype=np.float32)
        watts = np.interp(np.nan_to_num(gpu_power_w).mean(axis=1), *self._server_w)
        rows: dict[str, F64 | float] = {
            "inlet_temp_c": np.round(inlet_c, 1), "server_power_w": watts * (1 + 0.004 * n[0]),
            "fan_ratio": np.clip(0.25 + 0.02 * (inlet_c - INLET_C) + 4e-5 * watts + 0.005 * n[1], 0.15, 1), "power_supplies_ok": 6.0,
            "cpu_clock_mhz": 3100.0 + 15.0 * n[1], "dimm_correctable_per_s": 0.0, "dimm_uncorrectable_count": 0.0,
            "nvme_media_errors_per_s": 0.0, "nvme_spare_ratio": 1.0, "disk_used_ratio": self._disk, "kubelet_ready": 1.0,
        }  # fmt: skip
        for name, values in rows.items():
            out[:, 0, at[name]] = values
        return out

    def process(self, load: Load, stream: np.random.Generator) -> F32:
        """[node, 8, column]; NaN where no rank is known."""
        at, out = columns("process"), self._process.copy()
        n = stream.standard_normal((2, *load.alive.shape), dtype=np.float32)
        held = (load.proc_state == BLOCKED) | (load.proc_state == STOPPED)
        works = np.where(held, 0.0, np.minimum(1.0, load.compute + load.spin))
        alive = np.where(load.alive > 0, 1.0, np.where(np.isnan(load.alive), np.nan, 0.0))
        there = np.where(alive > 0, 1.0, np.nan)
        rows: dict[str, F64] = {
            "alive": alive, "state": load.proc_state, "cpu_cores": there * (1.05 * works + 2.5 * load.data + 0.02 * np.abs(n[0]) * ~held),
            "rss_bytes": there * self._rss * (1 + 2e-4 * n[1]),
            "threads_count": there * 96.0, "read_bytes_per_s": there * 3e6 * works * np.exp(0.3 * n[1]),
            "write_bytes_per_s": there * (1e4 * works + 5e7 * load.checkpoint[:, None]), "throttled_ratio": there * 0.0,
            "voluntary_switches_per_s": there * np.round(np.where(held, 0.0, 40 + 400 * load.data + 8 * np.abs(n[0]))),
            "last_step": load.last_step, "step_age_s": load.step_age_s, "phase": load.phase,
        }  # fmt: skip
        for name, values in rows.items():
            out[..., at[name]] = values
        return out
