"""The physical state that faults change and everything else follows from: clocks, bandwidths, pressures. Neutral unless struck."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectors.simulated.layout import Layout
from collectors.simulated.noise import F64, Ints
from collectors.simulated.spec import GPUS
from collectors.simulated.target import Target


@dataclass(frozen=True)
class Driver:
    """One quantity: where it lives (gpu, node, port, probe, job), its neutral value and meaning. Neutral 1 multiplies, 0 adds."""

    name: str
    lives: str
    neutral: float
    help: str


DRIVERS: dict[str, Driver] = {
    d.name: d
    for d in (
        Driver("clock", "gpu", 1.0, "clock of a GPU"),
        Driver("compute", "gpu", 1.0, "time that the same work takes, no counter showing why"),
        Driver("power_cap", "gpu", 1.0, "limit of power, of the usual maximum"),
        Driver("pcie", "gpu", 1.0, "bandwidth of a GPU's PCIe link"),
        Driver("nvlink", "gpu", 1.0, "bandwidth of a GPU's NVLinks"),
        Driver("heat_c", "gpu", 0.0, "degrees above what power explains"),
        Driver("memory_heat_c", "gpu", 0.0, "degrees of the HBM above what power explains"),
        Driver("pause_s", "gpu", 0.0, "mean of an extra stall in each step"),
        Driver("lost", "gpu", 0.0, "1: the device no longer answers"),
        Driver("hog", "node", 0.0, "share of processors taken by somebody else"),
        Driver("launch", "node", 1.0, "time that the processor part of a step takes"),
        Driver("data", "node", 0.0, "waiting for input, in shares of a step"),
        Driver("inlet_c", "node", 0.0, "degrees of the cooling above normal"),
        Driver("leak", "node", 0.0, "share of memory lost to a leak"),
        Driver("skew_ms", "node", 0.0, "error of the clock"),
        Driver("silent", "node", 0.0, "1: the collector sends nothing"),
        Driver("vanished", "node", 0.0, "1: the machine is gone"),
        Driver("stuck", "node", 0.0, "1: the collector repeats its last values"),
        Driver("late_s", "node", 0.0, "seconds that messages wait on the way"),
        Driver("bandwidth", "port", 1.0, "bandwidth of a port"),
        Driver("loss", "port", 0.0, "share of packets lost"),
        Driver("down", "port", 0.0, "1: no link"),
        Driver("latency_ms", "probe", 0.0, "extra round trip"),
        Driver("probe_loss", "probe", 0.0, "share of probes lost"),
        Driver("work", "job", 1.0, "work of a step, for all ranks"),
        Driver("last_stage", "job", 0.0, "extra work of the last stage"),
        Driver("lengths", "job", 0.0, "extra spread of batch lengths"),
        Driver("experts", "job", 0.0, "extra spread of expert load"),
        Driver("checkpoint", "job", 1.0, "time that a checkpoint takes"),
        Driver("save_fails", "job", 0.0, "1: checkpoints are not written"),
        Driver("job_pause_s", "job", 0.0, "mean of a stall that strikes one random rank in each step"),
        Driver("loss_factor", "job", 1.0, "loss and gradient norm"),
        Driver("diverged", "gpu", 0.0, "1: a replica computes wrong results"),
    )
}


class Drivers:
    """Present values of all drivers, as arrays."""

    def __init__(self, layout: Layout, jobs: int) -> None:
        size, rails = layout.size, layout.spec.rails
        shapes = {
            "gpu": (size, GPUS),
            "node": (size,),
            "port": (size, rails),
            "probe": layout.peers.shape,
            "job": (max(jobs, 1),),
        }
        self._values: dict[str, F64] = {n: np.full(shapes[d.lives], d.neutral) for n, d in DRIVERS.items()}
        self._struck: set[str] = set()

    def __getitem__(self, name: str) -> F64:
        return self._values[name]

    @staticmethod
    def neutral(name: str) -> float:
        """Value of a driver when nothing is wrong."""
        return DRIVERS[name].neutral

    def calm(self, *names: str) -> bool:
        """Whether none of these is struck now."""
        return self._struck.isdisjoint(names)

    def reset(self) -> None:
        """Back to neutral."""
        for name in self._struck:
            self._values[name].fill(DRIVERS[name].neutral)
        self._struck.clear()

    def strike(self, name: str, target: Target, value: float) -> None:
        """Let `value` (already scaled by the fault's course) act on what `target` covers."""
        driver, array = DRIVERS[name], self._values[name]
        where = _where(driver.lives, target)
        array[where] = array[where] * value if driver.neutral else np.maximum(array[where], value)
        self._struck.add(name)


Where = tuple[Ints, Ints] | Ints


def _where(lives: str, target: Target) -> Where:
    places: dict[str, Where] = {
        "gpu": target.gpus, "node": target.nodes, "port": target.ports, "probe": target.probes,
        "job": np.array(target.jobs, dtype=np.int64),
    }  # fmt: skip
    return places[lives]
