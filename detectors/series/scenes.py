"""Fleets out of random numbers for trends: hours of health with all its slow drifts, and precursors that end in a failure or stall.

One frame a minute, or more often. Health has what looks like trends and is none: days and nights, jobs that stop and warm up again,
checkpoints that fill and are swept, steps to a new level, weak parts with a steady trickle or bursts of errors, drifts that stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.synthetic import node_name
from trainwarden.clock import NS_PER_S
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

F64 = NDArray[np.float64]
TICK_S = 60
START_NS = 472_222 * 3600 * NS_PER_S
JOB = "fleet"


@dataclass(frozen=True)
class Kind:
    """A precursor: the column it moves, the size at its full course, and whether it multiplies a rate or shifts a level.

    `limit` is where the failure is, in the metric's unit (events per hour of a rate).
    """

    family: str
    metric: str
    limit: float
    counts: bool = False
    falling: bool = False
    decades: bool = False


KINDS: dict[str, Kind] = {
    "gpu_ecc": Kind("gpu", "ecc_correctable_per_s", 600, counts=True),
    "dimm_ecc": Kind("board", "dimm_correctable_per_s", 600, counts=True),
    "pcie_replay": Kind("gpu", "pcie_replay_per_s", 3600, counts=True),
    "nvlink_errors": Kind("gpu", "nvlink_crc_errors_per_s", 36000, counts=True),
    "symbol_errors": Kind("nic", "symbol_errors_per_s", 3600, counts=True),
    "link_flaps": Kind("nic", "carrier_changes_per_s", 60, counts=True),
    "gpu_heat": Kind("gpu", "temp_c", 87.0),
    "fan": Kind("board", "fan_ratio", 0.98),
    "module_heat": Kind("port", "module_temp_c", 75.0),
    "disk_full": Kind("board", "disk_used_ratio", 0.98),
    "memory_leak": Kind("host", "mem_available_ratio", 0.03, falling=True),
    "disk_spare": Kind("board", "nvme_spare_ratio", 0.10, falling=True),
    "bit_errors": Kind("port", "fec_corrected_per_s", 2.0, decades=True),
}


@dataclass(frozen=True)
class Precursor:
    """One trend. `reach` 1 ends at the limit after `duration_s`; less stalls at that share of the way and is no failure."""

    kind: str
    node: int
    device: int
    onset_s: float
    duration_s: float
    course: str = "ramp"
    reach: float = 1.0

    @property
    def fails_s(self) -> float:
        """When the limit is reached; infinite when it stalls."""
        return self.onset_s + self.duration_s if self.reach >= 1.0 else math.inf

    def strength(self, at_s: float) -> float:
        """Share of the way to the limit."""
        share = min(max((at_s - self.onset_s) / self.duration_s, 0.0), 1.0)
        if self.course == "climb":
            share = (math.exp(4.0 * share) - 1.0) / (math.exp(4.0) - 1.0)
        return min(share, self.reach)


@dataclass
class Fleet:
    """Frames of `nodes` machines with `gpus` GPUs and ports each, all in one job.

    Parameters
    ----------
    nuisance
        Scale of healthy oddities (steps, weak parts, drifts) per node-day.
    tick_s
        Seconds between frames; noise moves a little faster when it is short.
    """

    nodes: int = 16
    gpus: int = 2
    seed: int = 0
    precursors: tuple[Precursor, ...] = ()
    nuisance: float = 1.0
    tick_s: int = TICK_S
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = rng = np.random.default_rng(self.seed)
        many, one = (self.nodes, self.gpus), (self.nodes,)
        self._ar = {name: rng.normal(size=many) for name in ("temp", "fec", "light", "module", "power", "mem", "fan")}
        self._offset = {name: rng.normal(size=many) for name in self._ar}
        self._heat = np.full(many, 0.0)
        self._rate_h = {
            "ecc": np.where(rng.random(many) < 0.05, 2.0, 0.02), "replay": 0.5 * rng.gamma(1.0, 1.0, many),
            "crc": 20.0 * np.exp(0.7 * rng.normal(size=many)), "symbol": np.full(many, 0.2), "flap": np.full(many, 0.01),
            "dimm": np.where(rng.random(one) < 0.02, 5.0, 0.02)[:, None], "remap": np.full(many, 0.0002),
        }  # fmt: skip
        self._remapped = np.zeros(many)
        self._disk, self._age_s = rng.uniform(0.3, 0.6, one), rng.uniform(0, 7200)
        self._idle_until_s, self._stepped = -1.0, np.zeros(many)
        self._drift = np.zeros((*many, 3))
        self._topology = Topology()
        ranks = tuple((n * self.gpus + g, node_name(n), f"gpu{g}") for n in range(self.nodes) for g in range(self.gpus))
        self._topology.apply(
            TopologyEvent(entity=f"job:{JOB}", origin="scheduler", valid_from_ns=START_NS, attempt=0, ranks=ranks)
        )

    def frames(self, minutes: int) -> Iterator[Frame]:
        """`minutes` of frames, one every `tick_s`."""
        present, nodes = np.ones(self.nodes, dtype=np.bool_), tuple(node_name(n) for n in range(self.nodes))
        for number in range(minutes * 60 // self.tick_s):
            at_s = float(number * self.tick_s)
            at_ns = START_NS + int(at_s) * NS_PER_S
            tick = AlignedTick(at_ns, self.tick_s * 1000, nodes, present, self._families(at_s))
            yield Frame(at_ns, (tick,), (), (), self._topology)

    def _families(self, at_s: float) -> dict[str, FamilyMatrix]:
        for name, value in self._ar.items():
            self._ar[name] = 0.95 * value + 0.312 * self._rng.normal(size=value.shape)
        self._oddities(at_s)
        load = self._load(at_s)
        columns = {"gpu": self._gpu(load, at_s), "port": self._port(at_s), "nic": self._nic(), "board": self._board(load, at_s),
                   "host": self._host(at_s)}  # fmt: skip
        for precursor in self.precursors:
            kind = KINDS[precursor.kind]
            self._move(columns[kind.family][kind.metric], kind, precursor, at_s)
        return {name: self._matrix(name, table) for name, table in columns.items()}

    def _oddities(self, at_s: float) -> None:
        rng, chance = self._rng, self.nuisance * self.tick_s / 86400.0
        many = (self.nodes, self.gpus)
        self._stepped += np.where(rng.random(many) < 0.05 * chance, rng.uniform(-6, 6, many), 0.0)
        self._rate_h["ecc"] = np.where(rng.random(many) < 0.01 * chance, 20.0, self._rate_h["ecc"])
        starts = rng.random(many) < 0.05 * chance
        self._drift[starts] = np.column_stack(
            [np.full(starts.sum(), at_s), rng.uniform(3600, 14400, starts.sum()), rng.uniform(-4, 4, starts.sum())]
        )
        if rng.random() < 4 * chance:
            self._idle_until_s, self._age_s = at_s + rng.uniform(300, 3600), 0.0

    def _load(self, at_s: float) -> F64:
        idle = at_s < self._idle_until_s
        self._age_s = 0.0 if idle else self._age_s + self.tick_s
        power = (0.15 if idle else 0.85) + 0.03 * self._ar["power"]
        self._heat += (power - self._heat) * (1.0 - math.exp(-self.tick_s / 120.0))
        return np.asarray(power)

    def _drifts(self, at_s: float) -> F64:
        began, lasts, size = np.moveaxis(self._drift, -1, 0)
        return np.asarray(np.clip((at_s - began) / np.maximum(lasts, 1.0), 0.0, 1.0) * size)

    def _events(self, name: str, burst: float = 1.0) -> F64:
        number = self._rng.poisson(self._rate_h[name] / burst * self.tick_s / 3600.0).astype(np.float64)
        return np.asarray(number * (self._rng.geometric(1.0 / burst, number.shape) if burst > 1 else 1.0) / self.tick_s)

    def _gpu(self, load: F64, at_s: float) -> dict[str, F64]:
        day = 1.5 * math.sin(2 * math.pi * at_s / 86400.0 + self.seed)
        temp = (
            38
            + 26 * self._heat
            + 2.5 * self._offset["temp"]
            + 0.5 * self._ar["temp"]
            + day
            + self._stepped
            + self._drifts(at_s)
        )
        self._remapped += self._rng.poisson(self._rate_h["remap"] * self.tick_s / 3600.0)
        return {"power_w": 700 * load, "temp_c": temp, "memory_temp_c": temp + 9 + 0.3 * self._ar["mem"],
                "ecc_correctable_per_s": self._events("ecc", 8.0), "pcie_replay_per_s": self._events("replay"),
                "nvlink_crc_errors_per_s": self._events("crc", 3.0), "remapped_rows_correctable": self._remapped.copy()}  # fmt: skip

    def _port(self, at_s: float) -> dict[str, F64]:
        day = 0.1 * math.sin(2 * math.pi * at_s / 86400.0)
        fec = 10.0 ** (5.0 + 0.5 * self._offset["fec"] + 0.04 * self._ar["fec"] + day)
        return {"fec_corrected_per_s": fec, "rx_power_dbm": -1 + 0.7 * self._offset["light"] + 0.08 * self._ar["light"],
                "module_temp_c": 45 + 2 * self._offset["module"] + 0.5 * self._ar["module"] + 10 * day}  # fmt: skip

    def _nic(self) -> dict[str, F64]:
        flaps = 2.0 * self._events("flap")
        return {
            "symbol_errors_per_s": self._events("symbol", 4.0),
            "carrier_changes_per_s": flaps,
            "link_downed_per_s": flaps / 2,
        }

    def _board(self, load: F64, at_s: float) -> dict[str, F64]:
        self._disk += np.where(at_s % 1800 < self.tick_s, 0.01, 0.0)
        self._disk = np.where(self._disk > 0.7, self._disk - 0.25, self._disk)
        fan = 0.3 + 0.3 * _first(self._heat) + 0.01 * _first(self._ar["fan"]) + 0.03 * _first(self._offset["fan"])
        return {"dimm_correctable_per_s": self._events("dimm", 4.0), "server_power_w": 1500 + 5600 * load.mean(axis=1, keepdims=True),
                "fan_ratio": fan, "disk_used_ratio": self._disk[:, None].copy(), "nvme_spare_ratio": np.ones((self.nodes, 1))}  # fmt: skip

    def _host(self, at_s: float) -> dict[str, F64]:
        saving = at_s % 1800 < 120
        grown = 0.15 * (1.0 - math.exp(-self._age_s / 3600.0))
        free = 0.75 - grown - (0.1 if saving else 0.0) + 0.01 * self._ar["mem"][:, :1]
        return {"mem_available_ratio": free, "run_dir_free_bytes": np.full((self.nodes, 1), 5e11)}

    def _move(self, column: F64, kind: Kind, precursor: Precursor, at_s: float) -> None:
        strength = precursor.strength(at_s)
        place = (precursor.node, precursor.device % column.shape[1])
        if kind.counts:
            column[place] += self._rng.poisson(strength * kind.limit * self.tick_s / 3600.0) / self.tick_s
        elif kind.decades:
            column[place] *= 10.0 ** (strength * (kind.limit + 0.1))
        else:
            column[place] += strength * (kind.limit - _settled(column[place], kind))

    def _matrix(self, family: str, table: dict[str, F64]) -> FamilyMatrix:
        wide = next(iter(table.values())).shape[1]
        prefix = {"gpu": "gpu", "nic": "eth", "port": "port"}.get(family, family)
        names = [prefix] if wide == 1 else [f"{prefix}{d}" for d in range(wide)]
        entities = tuple((node_name(n), name) for n in range(self.nodes) for name in names)
        values = np.stack([column.ravel() for column in table.values()], axis=1).astype(np.float32)
        return FamilyMatrix(family, entities, tuple(table), values)


def _first(values: F64) -> F64:
    return values[:, :1]


def warmed(nodes: int, minutes: int, since: int, by_c: float) -> list[Frame]:
    """A healthy fleet whose optical modules are all `by_c` warmer from minute `since` on; only its ports report."""
    frames = enumerate(Fleet(nodes, 2, seed=3, nuisance=0.0).frames(minutes))
    return [warmer(frame, by_c if minute >= since else 0.0) for minute, frame in frames]


def warmer(frame: Frame, by_c: float) -> Frame:
    """A frame of one tick in which all optical modules are `by_c` warmer, and of which only the ports are left."""
    tick = frame.ticks[0]
    ports = tick.families["port"]
    values = ports.values.copy()
    values[:, ports.metrics.index("module_temp_c")] += by_c
    return replace(frame, ticks=(replace(tick, families={"port": replace(ports, values=values)}),))


def _settled(value: Any, kind: Kind) -> float:
    """The level without the precursor, kept on the healthy side of the limit."""
    return min(float(value), kind.limit) if not kind.falling else max(float(value), kind.limit)
