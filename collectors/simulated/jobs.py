"""The life of a job: steps, checkpoints, evaluations, halts and restarts, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from collectors.simulated import past as pasts
from collectors.simulated.drivers import Drivers
from collectors.simulated.noise import F64, Bools, Drift, Noise
from collectors.simulated.past import Halt, Past
from collectors.simulated.placement import Grid
from collectors.simulated.spec import GPUS
from collectors.simulated.steps import BACKWARD, Outcome, Work, run

OPTIMIZER = 0.02
LAST_STAGE = 0.04
"""The last stage also computes the loss; even a well-divided model is that much longer there."""

PAUSE_CHANCE = 2e-4
SLOW_SHARE, SLOW_PHI = 0.4, 0.975
"""Part of a rank's own variation that forgets slowly: neighbours, caches, placement."""

TEMPER = 0.4
"""Spread of how restless jobs of one profile are."""

RESTARTS_PER_S = 1 / 10_000
DAY_S = 86_400.0


@dataclass(frozen=True)
class Plan:
    """What a job is like for good, drawn from the seed."""

    step_s: float
    checkpoint_every_s: float
    checkpoint_s: float
    evaluate_every: int
    restart_every_s: float
    first_step: int
    begin_s: float
    day_phase: float


@dataclass(frozen=True)
class Restart:
    """A job's processes are gone from `from_s` to `to_s`; `planned` when nothing was wrong."""

    from_s: float
    to_s: float
    planned: bool
    attempt: int


class JobRun:
    """One job. Steps are computed at the tick in which they begin, with the drivers of that tick.

    Parameters
    ----------
    halts
        When faults stop it, in order of time.
    blocks
        When its network does not work at all, and nobody gives up yet.

    Attributes
    ----------
    lasted
        (begin, duration) in seconds of the training steps that ended.
    """

    def __init__(
        self,
        grid: Grid,
        noise: Noise,
        disorder: float,
        rail_of_gpu: Sequence[int],
        halts: Sequence[Halt] = (),
        blocks: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.grid = grid
        self.plan = _plan(grid, noise, disorder)
        self.attempt = 0
        self.number = self.plan.first_step
        self.serial = 0
        self.recent: deque[Past] = deque()
        self.restarts: list[Restart] = []
        self.last: Past | None = None
        self.lasted: list[tuple[float, float]] = []
        self._noise = noise
        self._disorder = disorder
        self._rails = list(rail_of_gpu)
        self._halts = deque(sorted(halts, key=lambda halt: halt.at_s))
        self._blocks = tuple(sorted(blocks))
        self._next_s = self.plan.begin_s
        self._first = False
        self._checkpoint_at_s = self.plan.begin_s + self.plan.checkpoint_every_s * 0.7
        self._restart_at_s = self.plan.restart_every_s
        born = noise.stream("job", grid.index)
        profile = grid.profile
        nodes = np.repeat(born.lognormal(0.0, profile.unequal * min(disorder, 1.0), grid.nodes), GPUS)
        each = born.lognormal(0.0, 0.5 * profile.unequal * min(disorder, 1.0), grid.world)
        self._lasting = (nodes * each).reshape(grid.shape)
        self._temper = disorder * float(born.lognormal(0.0, TEMPER))
        self._common = Drift((), profile.common_phi, born)
        self._own = Drift(grid.shape, profile.rank_phi, born)
        self._slowly = Drift(grid.shape, SLOW_PHI, born)
        healthy = run(self._healthy())
        self.nominal_s = healthy.finish
        self.usual_compute = float((healthy.own.mean() + 0.6 * healthy.optimizer.mean()) / healthy.finish)

    # --- time --------------------------------------------------------------------------------------------------------------

    def advance(self, until_s: float, drivers: Drivers) -> list[Past]:
        """Let steps begin until `until_s`; returns those that ended, in order."""
        while self._next_s < until_s:
            self._step(drivers)
        return self._ended(until_s)

    def forget(self, before_s: float) -> None:
        """Drop what no later interval needs."""
        while self.recent and self.recent[0].end <= before_s:
            self.recent.popleft()

    def absent(self, at_s: float) -> bool:
        """Whether the job's processes do not exist at this moment."""
        return bool(self.restarts) and self.restarts[-1].from_s <= at_s < self.restarts[-1].to_s

    def current(self, at_s: float) -> Past | None:
        """The step under way at a moment."""
        return next((p for p in reversed(self.recent) if p.begin <= at_s < p.end), None)

    def _ended(self, until_s: float) -> list[Past]:
        after = self.last.shown_s if self.last else -1.0
        found = [p for p in self.recent if after < p.shown_s <= until_s]
        if found:
            self.last = found[-1]
            self.lasted += [(p.begin, p.finish - p.begin) for p in found if p.phase == "train"]
        return found

    # --- one step ------------------------------------------------------------------------------------------------------------

    def _step(self, drivers: Drivers) -> None:
        begin = self._next_s
        if self._halts and self._halts[0].at_s < begin:
            self._stay_down(self._halts.popleft())
            return
        if begin >= self._restart_at_s:
            self._restart_at_s += self.plan.restart_every_s
            self._down(begin, begin, planned=True)
            return
        laid = self._laid(begin, drivers)
        if self._halts and self._halts[0].at_s < laid.end:
            self._halt(laid, self._halts.popleft())
            return
        self.recent.append(laid)
        self._next_s = laid.end
        if laid.phase != "eval":
            self.number += 1

    def _laid(self, begin: float, drivers: Drivers) -> Past:
        self.serial += 1
        stream = self._noise.stream("step", self.grid.index, self.serial)
        evaluates = self._disorder > 0 and self.serial % self.plan.evaluate_every == 0
        outcome = run(self._work(begin, drivers, stream, evaluates))
        phase = "eval" if evaluates else "first" if self._first else "train"
        checkpoint_s = 0.0
        if not evaluates:
            outcome = self._blocked(begin, outcome)
            checkpoint_s = self._checkpoint(begin, outcome.finish, drivers, stream)
            phase = "checkpoint" if checkpoint_s and phase == "train" else phase
            self._first = False
        return pasts.lay(outcome, self.number, phase, self.attempt, begin, checkpoint_s)

    def _blocked(self, begin: float, outcome: Outcome) -> Outcome:
        """Nothing flows while the network is cut: reductions that meet a cut end later."""
        delay = 0.0
        for low, high in self._blocks:
            first, last = begin + float(outcome.reducing.min()), begin + outcome.finish + delay
            if low < last and high > first:
                delay += high - max(low, first)
        if delay == 0.0:
            return outcome
        return Outcome(outcome.data, outcome.forward, outcome.backward, outcome.own, outcome.arrived, outcome.reducing,
                       outcome.reduced + delay, outcome.finish + delay)  # fmt: skip

    def _checkpoint(self, begin: float, finish: float, drivers: Drivers, stream: np.random.Generator) -> float:
        if self._disorder == 0 or begin + finish < self._checkpoint_at_s:
            return 0.0
        self._checkpoint_at_s = begin + finish + self.plan.checkpoint_every_s
        return (
            self.plan.checkpoint_s * float(stream.lognormal(0.0, 0.1)) * float(drivers["checkpoint"][self.grid.index])
        )

    # --- halts ---------------------------------------------------------------------------------------------------------------

    def _halt(self, laid: Past, halt: Halt) -> None:
        stopped = pasts.halted(laid, halt, self._coupled(halt))
        self.recent.append(stopped)
        self._down(halt.leaves_s, halt.until_s, planned=False)

    def _stay_down(self, halt: Halt) -> None:
        """A halt that meets a job already down: it comes back later."""
        if halt.until_s > self._next_s:
            self._next_s = halt.until_s + 30.0
            if self.restarts:
                self.restarts[-1] = Restart(self.restarts[-1].from_s, self._next_s, False, self.attempt)

    def _down(self, gone_s: float, back_s: float, planned: bool) -> None:
        self.attempt += 1
        pause = 20.0 + 20.0 * float(self._noise.stream("restart", self.grid.index, self.attempt).random())
        self._next_s = back_s + pause
        self._first = True
        self.restarts.append(Restart(gone_s, self._next_s, planned, self.attempt))

    def _coupled(self, halt: Halt) -> Bools:
        """Ranks that meet the struck ones within the step: their replicas, when these are made of several ranks."""
        if self.grid.tp * self.grid.pp == 1:
            return halt.culprits
        replicas = np.unique(np.nonzero(halt.culprits.reshape(self.grid.shape))[1])
        coupled = np.zeros(self.grid.shape, dtype=bool)
        coupled[:, replicas, :] = True
        return coupled.ravel()

    # --- what a step has to do -------------------------------------------------------------------------------------------------

    def _healthy(self) -> Work:
        grid, profile, plan = self.grid, self.grid.profile, self.plan
        stages, replicas, places = grid.shape
        busy = plan.step_s * (1.0 - profile.data - profile.reduce - OPTIMIZER)
        each = busy / ((profile.micro_batches + stages - 1) * (1.0 + BACKWARD))
        stage = np.ones(stages)
        stage[-1] += LAST_STAGE if stages > 1 else 0.0
        forward = np.broadcast_to(
            (each * (1.0 - profile.tensor) * stage)[:, None, None], (stages, replicas, profile.micro_batches)
        )
        group, rank = np.ones((stages, replicas)), np.ones(grid.shape)
        data = np.zeros(grid.shape)
        data[0] = profile.data * plan.step_s
        return Work(forward, self._lasting, 0.0 * rank, data, each * profile.tensor * group, plan.step_s * profile.hop * group,
                    np.ones(forward.shape), np.full((stages, places), profile.reduce * plan.step_s), OPTIMIZER * plan.step_s,
                    grid.ep)  # fmt: skip

    def _work(self, begin: float, drivers: Drivers, stream: np.random.Generator, evaluates: bool) -> Work:
        base, index = self._healthy(), self.grid.index
        network = self._network(drivers)
        links = self._of_gpus(drivers, "nvlink")
        reduce_s = base.reduce_s / np.maximum((network * (0.7 + 0.3 * links)).min(axis=1), 1e-3)
        exchange = base.tensor_s / np.maximum(links.min(axis=2), 0.02)
        if self.grid.ep > 1:
            exchange = exchange + 0.1 * base.forward_s[:, :, 0] / np.maximum(network.min(axis=2), 0.02)
        repeats = 10.0 if evaluates else 1.0
        return Work(
            base.forward_s * self._lengths(stream, float(drivers["lengths"][index])) * repeats,
            self._slowness(begin, drivers, stream), self._pauses(drivers, stream), self._data(base, drivers, stream), exchange,
            base.hop_s / np.maximum(network.min(axis=2), 0.02), self._experts(stream, drivers), reduce_s * (0.1 if evaluates else 1.0),
            base.optimizer_s * (0.0 if evaluates else 1.0), self.grid.ep, 0.0 if evaluates else BACKWARD,
        )  # fmt: skip

    def _slowness(self, begin: float, drivers: Drivers, stream: np.random.Generator) -> F64:
        profile, index = self.grid.profile, self.grid.index
        common = self._common.advance(stream)
        own = (1 - SLOW_SHARE) ** 0.5 * self._own.advance(stream) + SLOW_SHARE**0.5 * self._slowly.advance(stream)
        day = 0.01 * np.sin(2 * np.pi * begin / DAY_S + self.plan.day_phase)
        noise = np.exp(self._temper * (profile.common * common + profile.rank * own) + self._disorder * day)
        slow = self._lasting * noise * drivers["work"][index]
        if not drivers.calm("clock", "power_cap", "compute"):
            cap = np.minimum(1.0, self._of_gpus(drivers, "power_cap")) ** (1 / 2.4)
            slow = slow * self._of_gpus(drivers, "compute") / (self._of_gpus(drivers, "clock") * cap)
        if not drivers.calm("launch", "pcie"):
            slow = (
                slow * self._of_nodes(drivers, "launch") * (1.0 + 0.03 * (1.0 / self._of_gpus(drivers, "pcie") - 1.0))
            )
        if drivers["last_stage"][index] and self.grid.pp > 1:
            slow = slow.copy()
            slow[-1] *= 1.0 + drivers["last_stage"][index]
        return np.asarray(slow)

    def _pauses(self, drivers: Drivers, stream: np.random.Generator) -> F64:
        pauses = np.zeros(self.grid.world)
        count = stream.poisson(PAUSE_CHANCE * self._disorder * self.grid.world)
        where = stream.integers(self.grid.world, size=count)
        pauses[where] += np.minimum(2.0, stream.lognormal(np.log(0.15), 0.8, size=count))
        mean = float(drivers["job_pause_s"][self.grid.index])
        pauses[int(stream.integers(self.grid.world))] += mean * float(stream.exponential())
        extra = self._of_gpus(drivers, "pause_s")
        return pauses.reshape(self.grid.shape) + extra * stream.exponential(size=self.grid.shape)

    def _lengths(self, stream: np.random.Generator, extra: float) -> F64:
        profile = self.grid.profile
        spread = np.hypot(profile.replica * self._disorder, extra) * profile.micro_batches**0.5
        drawn = stream.standard_normal((self.grid.dp, profile.micro_batches))
        return np.asarray(np.exp(spread * drawn - 0.5 * spread * spread))

    def _experts(self, stream: np.random.Generator, drivers: Drivers) -> F64:
        profile, grid = self.grid.profile, self.grid
        shape = (grid.pp, grid.dp, profile.micro_batches)
        if grid.ep == 1:
            return np.ones(shape)
        spread = np.hypot(profile.experts * self._disorder, drivers["experts"][grid.index])
        return np.asarray(np.exp(spread * stream.standard_normal(shape)))

    def _data(self, base: Work, drivers: Drivers, stream: np.random.Generator) -> F64:
        drawn = np.exp(0.2 * min(self._disorder, 1.0) * stream.standard_normal(self.grid.shape))
        late = self._of_nodes(drivers, "data") * self.plan.step_s
        late = late * np.exp(0.15 * stream.standard_normal(self.grid.shape))
        return np.asarray(base.data_s * drawn / np.maximum(self._of_gpus(drivers, "pcie"), 0.05) + late)

    def _network(self, drivers: Drivers) -> F64:
        """Bandwidth of each rank's way out of its node, of the healthy one."""
        if self.grid.nodes == 1:
            return np.ones(self.grid.shape)
        ports = drivers["bandwidth"][self.grid.span][:, self._rails]
        ways = ports * np.minimum(1.0, drivers["pcie"][self.grid.span])
        return ways.reshape(self.grid.shape)

    def _of_gpus(self, drivers: Drivers, name: str) -> F64:
        return drivers[name][self.grid.span].reshape(self.grid.shape)

    def _of_nodes(self, drivers: Drivers, name: str) -> F64:
        return np.repeat(drivers[name][self.grid.span], GPUS).reshape(self.grid.shape)


def _plan(grid: Grid, noise: Noise, disorder: float) -> Plan:
    stream = noise.stream("plan", grid.index)
    low, high = grid.profile.step_s
    step_s = float(np.exp(stream.uniform(np.log(low), np.log(high))))
    return Plan(
        step_s, float(stream.uniform(300, 1500)), float(stream.uniform(3, 15)), int(stream.integers(150, 400)),
        float(stream.exponential(1 / RESTARTS_PER_S / max(disorder, 1e-9))) + 120.0, int(stream.integers(500, 20_000)),
        step_s * float(stream.random()), float(stream.uniform(0, 2 * np.pi)),
    )  # fmt: skip
