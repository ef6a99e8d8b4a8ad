"""The cluster, interval by interval. A simulator is a pure function of its specification and its incidents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from collectors.simulated import incidents as faults
from collectors.simulated.chatter import Chatter
from collectors.simulated.drivers import Drivers
from collectors.simulated.families import FAMILIES, columns
from collectors.simulated.faults.base import Show, Stop, amount_of
from collectors.simulated.gpus import Gpus
from collectors.simulated.hosts import Hosts
from collectors.simulated.incidents import Incident
from collectors.simulated.jobs import JobRun
from collectors.simulated.layout import Layout
from collectors.simulated.levels import levels
from collectors.simulated.network import Network
from collectors.simulated.noise import F32, F64, Bools, Drift, Noise
from collectors.simulated.past import Past, activity
from collectors.simulated.placement import place
from collectors.simulated.spec import GPUS, Spec
from collectors.simulated.state import Interval, Load, Log, Steps
from trainwarden.records import Metric

PHASES = {"first": 1.0, "train": 2.0, "eval": 3.0, "checkpoint": 4.0}
RUNNING, SLEEPING, BLOCKED, STOPPED = 1.0, 2.0, 3.0, 4.0
MISSING_TICK, MISSING_VALUE = 2e-4, 2e-4
SKEWED_SHARE, SKEW_MS, USUAL_SKEW_MS = 0.01, 500.0, 3.0
LIGHT_COMPUTE = 0.3
WHOLE = ("rows", "errors", "units")


class Simulator:
    """Produces intervals, in order.

    Parameters
    ----------
    spec
        The cluster.
    incidents
        Faults to come; all of them are known beforehand, so that whatever is asked first, the answer is the same.
    """

    def __init__(self, spec: Spec, incidents: Sequence[Incident] = ()) -> None:
        self.spec = spec
        self.noise = Noise(spec.seed)
        self.layout = Layout(spec)
        self.placement = place(spec, self.noise)
        self.incidents = tuple(incidents)
        self.levels = levels(self.layout, self.placement, self.noise)
        self.drivers = Drivers(self.layout, len(self.placement.grids))
        self.jobs = [self._job(index) for index in range(len(self.placement.grids))]
        self._gpus = Gpus(self.layout, self.levels, self.noise, spec.interval_s)
        self._network = Network(self.layout, self.placement, self.levels, self.noise, spec.interval_s)
        self._hosts = Hosts(self.layout, self.levels, self.noise, spec.interval_s)
        self._chatter = Chatter(self.layout, self.placement, self.noise, spec.disorder)
        self._light = Drift((len(self.placement.light),), 0.97**spec.interval_s, self.noise.stream("light use"))
        self._offset_ms = self._clock_errors()
        self._repeated: dict[str, F32] = {}
        self._number = 0

    def _job(self, index: int) -> JobRun:
        grid = self.placement.grids[index]
        return JobRun(grid, self.noise, self.spec.disorder, self.layout.rail_of_gpu.tolist(), faults.halts(self.incidents, grid),
                      faults.blocks(self.incidents, grid))  # fmt: skip

    def _clock_errors(self) -> F64:
        """Errors of the nodes' clocks: milliseconds for most, up to a second for one in a hundred."""
        stream, size = self.noise.stream("clocks"), self.layout.size
        usual = USUAL_SKEW_MS * stream.standard_normal(size)
        bad = stream.random(size) < SKEWED_SHARE
        wide = np.clip(SKEW_MS * stream.standard_normal(size), -1000.0, 1000.0)
        return self.spec.disorder * np.where(bad, wide, usual)

    def intervals(self, count: int) -> Iterator[Interval]:
        """The next `count` intervals."""
        for _ in range(count):
            yield self.advance()

    def advance(self) -> Interval:
        """The next interval."""
        number, width = self._number, self.spec.interval_s
        begin, end = number * width, (number + 1) * width
        self._number += 1
        self._strike(begin)
        ended = [run.advance(end, self.drivers) for run in self.jobs]
        load = self._load(number, begin, end)
        values = self._values(number, begin, load)
        interval = Interval(
            number, end, values, [s for run, pasts in zip(self.jobs, ended, strict=True) for s in map(self._steps_of(run), pasts)],
            list(self._logs(number, begin, end, ended)), self._heard(number), self.drivers["silent"] > 0, self.drivers["late_s"].copy(),
            self._offset_ms + self.drivers["skew_ms"], np.array([run.attempt for run in self.jobs], dtype=np.int64),
            [run.grid.index for run in self.jobs if run.restarts and begin <= run.restarts[-1].to_s < end],
        )  # fmt: skip
        for run in self.jobs:
            run.forget(end)
        return interval

    # --- causes ----------------------------------------------------------------------------------------------------------------

    def _strike(self, at_s: float) -> None:
        self.drivers.reset()
        for incident in self.incidents:
            if incident.start_s <= at_s < incident.end_s:
                incident.strike(self.drivers, at_s)

    def _load(self, number: int, begin: float, end: float) -> Load:
        load = Load.empty(self.layout.size)
        for run in self.jobs:
            self._add_job(load, run, begin, end)
        drawn = self._light.advance(self.noise.stream("light", number))
        light = self.placement.light
        load.compute[light] = (0.6 * LIGHT_COMPUTE * np.clip(1.0 + drawn, 0.0, 3.0))[:, None]
        load.spin[light] = np.maximum(0.0, 1.0 - load.compute[light])
        load.usual[light] = LIGHT_COMPUTE
        return load

    def _add_job(self, load: Load, run: JobRun, begin: float, end: float) -> None:
        span, shape = run.grid.span, (run.grid.nodes, GPUS)
        load.usual[span] = run.usual_compute
        for past in run.recent:
            if past.begin < end and past.end > begin:
                done = activity(past, begin, end, run.nominal_s)
                load.compute[span] += done.compute.reshape(shape)
                load.spin[span] += done.spin.reshape(shape)
                load.data[span] += done.data.reshape(shape)
                load.traffic[span] += done.traffic.reshape(shape)
                load.checkpoint[span] += done.checkpoint
        self._add_processes(load, run, end)

    def _add_processes(self, load: Load, run: JobRun, end: float) -> None:
        span, shape = run.grid.span, (run.grid.nodes, GPUS)
        past = run.current(end - 1e-6)
        if run.absent(end - 1e-6):
            return
        load.alive[span] = 1.0
        load.phase[span] = PHASES.get(past.phase, 0.0) if past else 0.0
        last = run.last
        load.last_step[span] = last.number if last else run.plan.first_step - 1
        load.step_age_s[span] = end - last.shown_s if last else end
        load.proc_state[span] = RUNNING
        if past and past.halt and past.halt.at_s < end:
            struck = past.halt.culprits.reshape(shape)
            alive, state = _struck(past.halt.stop)
            load.alive[span] = np.where(struck, alive, 1.0)
            load.proc_state[span] = np.where(struck, state, RUNNING)

    # --- what shows --------------------------------------------------------------------------------------------------------------

    def _values(self, number: int, begin: float, load: Load) -> dict[str, F32]:
        def stream(name: str) -> np.random.Generator:
            return self.noise.stream(name, number)

        drivers, network, hosts = self.drivers, self._network, self._hosts
        sent, received = network.traffic(load, drivers, stream("traffic"))
        inlet_c = hosts.inlet_c(begin, drivers, stream("inlet"))
        of_gpu = sent[:, self.layout.rail_of_gpu] * (self.spec.rails / GPUS)
        gpu = self._gpus.values(load, drivers, stream("gpu"), of_gpu, inlet_c)
        values = {
            "host": hosts.host(load, drivers, stream("host"), self._offset_ms + drivers["skew_ms"]), "gpu": gpu,
            "nic": network.nic(sent, received, load, drivers, stream("nic")), "port": network.port(stream("port")),
            "process": hosts.process(load, stream("process")), "mesh": network.mesh(sent, drivers, stream("mesh")),
            "board": hosts.board(inlet_c, gpu[..., columns("gpu")["power_w"]], stream("board")),
        }  # fmt: skip
        self._show(number, begin, values)
        self._lose(number, values)
        self._repeat(values)
        return values

    def _show(self, number: int, begin: float, values: dict[str, F32]) -> None:
        for incident in self.incidents:
            strength = incident.strength(begin)
            if strength > 0.0:
                stream = self.noise.stream(f"show {incident.index}", number)
                for show in incident.shows:
                    self._show_one(show, incident, strength, values, stream)

    def _show_one(
        self, show: Show, incident: Incident, strength: float, values: dict[str, F32], stream: np.random.Generator
    ) -> None:
        family, column, rows = faults.places(show, incident.target)
        array = values[family][..., columns(family)[column]]
        metric = FAMILIES[family].metrics[columns(family)[column]]
        amount = amount_of(show.amount, incident.magnitude)
        array[rows] = changed(array[rows], show.how, amount, strength, metric, self.spec.interval_s, stream)

    def _lose(self, number: int, values: dict[str, F32]) -> None:
        """Single values go missing, anywhere."""
        stream = self.noise.stream("missing", number)
        for array in values.values():
            count = stream.poisson(MISSING_VALUE * self.spec.disorder * array.size)
            array.reshape(-1)[stream.integers(array.size, size=count)] = np.nan

    def _repeat(self, values: dict[str, F32]) -> None:
        """A stuck collector says again what it said last."""
        stuck = self.drivers["stuck"] > 0
        if not stuck.any():
            self._repeated = {}
            return
        for name, array in values.items():
            kept = self._repeated.setdefault(name, np.full_like(array, np.nan))
            fresh = stuck & np.isnan(kept).all(axis=(1, 2))
            kept[fresh] = array[fresh]
            array[stuck] = kept[stuck]

    def _heard(self, number: int) -> Bools:
        stream = self.noise.stream("heard", number)
        lost = stream.random(self.layout.size) < MISSING_TICK * self.spec.disorder
        return np.asarray(~lost & (self.drivers["silent"] == 0))

    def _logs(self, number: int, begin: float, end: float, ended: Sequence[Sequence[Past]]) -> Iterator[Log]:
        yield from self._chatter.harmless(number, begin, end)
        for incident in self.incidents:
            if incident.start_s < end and incident.end_s > begin:
                yield from self._chatter.of_fault(incident, begin, end, self.jobs)
        for run, pasts in zip(self.jobs, ended, strict=True):
            fails = self.drivers["save_fails"][run.grid.index] > 0
            for past in pasts:
                yield from self._chatter.of_step(run, past, fails)
            if run.recent and run.recent[-1].halt:
                yield from self._chatter.of_halt(run, run.recent[-1], begin, end)
            if run.restarts:
                yield from self._chatter.of_restart(run, run.restarts[-1], begin, end)

    # --- steps ---------------------------------------------------------------------------------------------------------------------

    def _steps_of(self, run: JobRun) -> _StepMaker:
        return _StepMaker(run, self.noise, self.drivers)


class _StepMaker:
    """Adds to a step what the optimiser saw: loss, gradient norms, checksums."""

    def __init__(self, run: JobRun, noise: Noise, drivers: Drivers) -> None:
        self._run = run
        self._noise = noise
        self._drivers = drivers

    def __call__(self, past: Past) -> Steps:
        grid, number = self._run.grid, past.number
        stream = self._noise.stream("loss", grid.index, number)
        factor = float(self._drivers["loss_factor"][grid.index])
        wrong = np.maximum(1.0, self._drivers["diverged"][grid.span].ravel())
        loss = factor * (1.8 + 6.0 * math.exp(-number / 6000.0)) * float(stream.lognormal(0.0, 0.01))
        local = factor * stream.lognormal(math.log(0.9), 0.12, grid.world) * wrong
        norm = float(np.sqrt(np.mean(local**2))) if math.isfinite(factor) else math.nan
        return Steps(grid, past, loss if math.isfinite(loss) else math.nan, norm, np.where(np.isfinite(local), local, np.nan),
                     self._checksum(number, wrong), math.isfinite(factor))  # fmt: skip

    def _checksum(self, number: int, wrong: F64) -> F64:
        """Sum of the parameters, every tenth step, where all ranks hold the same ones."""
        grid = self._run.grid
        if grid.tp * grid.pp * grid.ep > 1 or number % 10:
            return np.full(grid.world, np.nan)
        right = 1000.0 + (number * 7919 % 10_007) / 64.0
        return np.where(wrong > 1.0, right * 1.0005, right)


def _struck(stop: Stop) -> tuple[float, float]:
    """(alive, state) of a struck process."""
    return {
        Stop.DIE: (0.0, 0.0), Stop.VANISH: (0.0, 0.0), Stop.BLOCKED: (1.0, BLOCKED), Stop.STOPPED: (1.0, STOPPED),
        Stop.ABSENT: (1.0, SLEEPING), Stop.NETWORK: (1.0, RUNNING), Stop.NONE: (1.0, RUNNING),
    }[stop]  # fmt: skip


def changed(
    old: F32, how: str, amount: float, strength: float, metric: Metric, interval_s: float, stream: np.random.Generator
) -> F32:
    """A column's values under a direct effect: absent ones stay absent, ratios stay ratios, whole things stay whole."""
    size = math.floor(amount * strength) if metric.unit in WHOLE else amount * strength
    if how == "add":
        new = old + size
    elif how == "mul":
        new = old * (1.0 + (amount - 1.0) * strength)
    elif how == "bits":
        new = (np.nan_to_num(old).astype(np.int64) | int(amount)).astype(np.float32)
    elif how == "count":
        new = old + (stream.poisson(amount * strength * interval_s, old.shape) / interval_s).astype(np.float32)
    else:
        new = np.full_like(old, amount)
    if metric.unit == "ratio":
        new = np.clip(new, 0.0, 1.0)
    return np.where(np.isnan(old), old, new).astype(np.float32)
