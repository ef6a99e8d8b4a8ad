"""A small training cluster out of random numbers: frames for the contract suite, for detectors' examples and for benchmarks.

It is no simulator of hardware: it has the structure that detectors rely on (ranks that wait for the slowest, probes between all nodes,
evaluations and saves, noise with a heavy tail), and a script says what is wrong in each second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from detectors.base import AlignedTick, FamilyMatrix, Frame
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, EntityKind, LogEvent, StepReport, StepRow, TopologyEvent
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
JOB = "synthetic"
_PROCESS = ("alive", "state", "cpu_cores", "throttled_ratio", "last_step", "step_age_s", "phase")
_NIC = ("up", "carrier", "rx_bytes_per_s", "tx_bytes_per_s", "carrier_changes_per_s", "role")
_HOST = ("cpu_busy_ratio", "load1", "mem_available_ratio", "tcp_retrans_per_s", "disk_busy_ratio", "psi_io_some_ratio")
_MESH = ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count")
_GPU = ("busy_ratio", "power_w", "temp_c", "sm_clock_mhz", "pcie_width_lanes", "pcie_width_max_lanes", "pcie_gen", "pcie_gen_max",
        "clocks_event_reasons_bits", "thermal_violation_ratio", "ecc_uncorrectable_count", "ecc_correctable_per_s", "row_remap_pending",
        "row_remap_failure", "nvlink_inactive_count", "nvlink_recoveries_per_s", "pcie_replay_per_s")  # fmt: skip
_PHASES = {"first": 1.0, "train": 2.0, "eval": 3.0, "checkpoint": 4.0}


@dataclass
class Scene:
    """What is wrong in one second; ranks and nodes by number. Milliseconds.

    `host` maps (node, metric) to a value that replaces the usual one. `log_events` are (node, code, attributes, rank), 50 ms apart.
    `phase` is what the processes are at. `leaves`, `rails` and `racks` are read when an attempt begins. `gpu` maps (node, GPU, metric) to
    a value that replaces the usual one, `lost_gpus` are (node, GPU) that do not report; both need a cluster with `gpus`.
    """

    compute_ms: dict[int, float] = field(default_factory=dict)
    data_ms: dict[int, float] = field(default_factory=dict)
    network_ms: float = 0.0
    standing: bool = False
    states: dict[int, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    rtt_ms: dict[int, float] = field(default_factory=dict)
    dead_links: set[int] = field(default_factory=set)
    no_carrier: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)
    odd_sums: set[int] = field(default_factory=set)
    host: dict[tuple[int, str], float] = field(default_factory=dict)
    log_events: list[tuple[int, str, dict[str, str], int]] = field(default_factory=list)
    members: tuple[int, ...] | None = None
    attempt: int = 0
    phase: str = "train"
    cpu_cores: dict[int, float] = field(default_factory=dict)
    leaves: dict[int, str] = field(default_factory=dict)
    rails: dict[int, str] = field(default_factory=dict)
    racks: dict[int, str] = field(default_factory=dict)
    gpu: dict[tuple[int, int, str], float] = field(default_factory=dict)
    lost_gpus: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Example:
    """What a detector must say: `kind` about `entity` somewhere in `frames`."""

    frames: list[Frame]
    kind: str
    entity: Entity


def node_name(number: int) -> str:
    """Name of a node."""
    return f"n{number}"


def node_entity(number: int) -> Entity:
    """A node as the entity of a verdict."""
    return Entity(EntityKind.NODE, node_name(number), node_name(number))


@dataclass
class SyntheticCluster:
    """Frames of a data-parallel job with one rank per node.

    Parameters
    ----------
    nodes, seed, step_ms
        Size, randomness, usual step. Rank 1 is a little slower by design: unequal ranks are no fault.
    evaluate_every, save_every
        Steps between evaluations (one second) and saves.
    gpus
        GPUs of each node that report samples; 0 = none do. They draw from a generator of their own.
    """

    nodes: int = 4
    seed: int = 0
    step_ms: float = 65.0
    evaluate_every: int = 400
    save_every: int = 150
    gpus: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._gpu_rng = np.random.default_rng((self.seed, 1))
        self._step = 0
        self._topology = Topology()
        self._attempt = -1
        self._drift = np.zeros(self.nodes)

    def frames(self, seconds: int, script: Callable[[int], Scene | None] = lambda second: None) -> list[Frame]:
        """Two frames a second: one with the tick and the step reports, one with what logs said since."""
        made: list[Frame] = []
        for second in range(seconds):
            scene = script(second) or Scene()
            at_ns = START_NS + second * NS_PER_S
            members = scene.members if scene.members is not None else tuple(range(self.nodes))
            self._place(scene, members, at_ns)
            reports = () if scene.standing else self._reports(scene, members, at_ns)
            tick = self._tick(scene, members, at_ns + NS_PER_S, second)
            logs = tuple(self._log(at_ns, number, *event) for number, event in enumerate(scene.log_events))
            made.append(Frame(at_ns + NS_PER_S + 300 * NS_PER_MS, (tick,), reports, (), self._topology))
            made.append(Frame(at_ns + NS_PER_S + 800 * NS_PER_MS, (), (), logs, self._topology))
        return made

    def _place(self, scene: Scene, members: tuple[int, ...], at_ns: int) -> None:
        if scene.attempt == self._attempt:
            return
        self._attempt = scene.attempt
        topology = Topology()
        for number in range(self.nodes):
            facts = {
                "leaf": scene.leaves.get(number, "leaf0"),
                "rail": scene.rails.get(number, ""),
                "rack": scene.racks.get(number, ""),
            }
            topology.apply(TopologyEvent(entity=f"node:{node_name(number)}", origin="scheduler", valid_from_ns=at_ns,
                                         attributes={key: value for key, value in facts.items() if value}))  # fmt: skip
        ranks = tuple((rank, node_name(number), "gpu0") for rank, number in enumerate(members))
        topology.apply(
            TopologyEvent(
                entity=f"job:{JOB}", origin="scheduler", valid_from_ns=at_ns, attempt=scene.attempt, ranks=ranks
            )
        )
        self._topology = topology

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def _reports(self, scene: Scene, members: tuple[int, ...], at_ns: int) -> tuple[StepReport, ...]:
        rows: list[list[StepRow]] = [[] for _ in members]
        elapsed_ms = 0.0
        while elapsed_ms < 1000.0:
            elapsed_ms += self._one_step(scene, members, at_ns + int(elapsed_ms * NS_PER_MS), rows)
        seq = (at_ns - START_NS) // NS_PER_S
        return tuple(
            StepReport(node=node_name(number), seq=seq, observed_at_ns=at_ns + NS_PER_S, boot_id="b", job=JOB, attempt=scene.attempt,
                       rank=rank, world=len(members), rows=tuple(rows[rank]))
            for rank, number in enumerate(members) if number not in scene.silent
        )  # fmt: skip

    def _one_step(self, scene: Scene, members: tuple[int, ...], at_ns: int, rows: list[list[StepRow]]) -> float:
        rng, size = self._rng, len(members)
        self._step += 1
        phase = "eval" if self._step % self.evaluate_every == 0 else "train"
        saving = self._step % self.save_every == 0
        data = 1.0 + rng.exponential(0.5, size) + [scene.data_ms.get(number, 0.0) for number in members]
        compute = rng.normal(0.7 * self.step_ms, 0.05 * self.step_ms, size) + rng.exponential(0.04 * self.step_ms, size)
        compute += rng.random(size) ** 150 * self.step_ms + [
            scene.compute_ms.get(number, 0.0) + 2.0 * (number == 1) for number in members
        ]
        local = data + compute + (1000.0 if phase == "eval" else 0.0)
        duration = local.max() + 0.15 * self.step_ms + scene.network_ms + rng.exponential(0.02 * self.step_ms)
        poisoned = bool(scene.not_finite)
        for rank, number in enumerate(members):
            own = number in scene.not_finite
            checkpoint_ms = float(rng.uniform(20, 60)) if saving else math.nan
            rows[rank].append(StepRow(
                step=self._step, phase=phase, started_at_ns=at_ns, duration_ms=float(duration) + (checkpoint_ms if saving else 0.0),
                data_ms=float(data[rank]), forward_ms=float(compute[rank] * 0.6), backward_ms=float(compute[rank] * 0.3),
                wait_ms=float(duration - local[rank]), optimizer_ms=float(compute[rank] * 0.1), checkpoint_ms=checkpoint_ms,
                arrived_at_ns=at_ns + int(local[rank] * NS_PER_MS), loss=math.nan if own else 2.0, finite=not poisoned,
                grad_norm_local=math.nan if own else 0.5, grad_norm=math.nan if poisoned else 0.4, samples=64,
                param_checksum=(1.5 if number in scene.odd_sums else 1.0) if self._step % 5 == 0 else math.nan,
            ))  # fmt: skip
        return float(duration)

    # --- ticks ---------------------------------------------------------------------------------------------------------------

    def _tick(self, scene: Scene, members: tuple[int, ...], at_ns: int, second: int) -> AlignedTick:
        numbers = list(range(self.nodes))
        heard = [number for number in numbers if number not in scene.silent]
        self._drift = 0.98 * self._drift + 0.1 * self._rng.normal(size=self.nodes)
        families = {
            "host": self._host(scene, heard, second), "process": self._processes(scene, members, heard),
            "nic": self._nics(scene, heard), "mesh": self._probes(scene, heard),
        }  # fmt: skip
        if self.gpus:
            families["gpu"] = self._gpu_samples(scene, heard)
        nodes = tuple(node_name(number) for number in numbers)
        return AlignedTick(at_ns, 1000, nodes, np.array([number in heard for number in numbers]), families)

    def _host(self, scene: Scene, heard: list[int], second: int) -> FamilyMatrix:
        rows = []
        for number in heard:
            busy = float(
                np.clip(
                    0.6 + 0.03 * self._drift[number] + 0.02 * self._rng.normal() + 0.05 * math.sin(second / 120), 0, 1
                )
            )
            usual = {"cpu_busy_ratio": busy, "load1": 4 * busy + 0.1 * self._rng.normal(), "mem_available_ratio": 0.5,
                     "tcp_retrans_per_s": float(self._rng.poisson(2)), "disk_busy_ratio": float(self._rng.beta(1, 40)),
                     "psi_io_some_ratio": float(self._rng.beta(1, 60))}  # fmt: skip
            rows.append([scene.host.get((number, metric), usual[metric]) for metric in _HOST])
        return _matrix("host", [(node_name(number), "host") for number in heard], _HOST, rows)

    def _processes(self, scene: Scene, members: tuple[int, ...], heard: list[int]) -> FamilyMatrix:
        entities, rows = [], []
        for rank, number in enumerate(members):
            if number in heard:
                state = scene.states.get(number, 2)
                cpu = scene.cpu_cores.get(number, 0.0 if scene.standing else float(0.4 + 0.03 * self._rng.normal()))
                age_s = math.nan if scene.standing else 0.05
                entities.append((node_name(number), f"rank{rank}"))
                rows.append(
                    [float(state not in (0, 5)), float(state), cpu, 0.0, float(self._step), age_s, _PHASES[scene.phase]]
                )
        return _matrix("process", entities, _PROCESS, rows)

    def _nics(self, scene: Scene, heard: list[int]) -> FamilyMatrix:
        rows = []
        for number in heard:
            traffic = 0.0 if scene.standing else float(4e7 * (1 + 0.05 * self._rng.normal()))
            rows.append([1.0, float(number not in scene.no_carrier), traffic, traffic, 0.0, 1.0])
        return _matrix("nic", [(node_name(number), "eth0") for number in heard], _NIC, rows)

    def _gpu_samples(self, scene: Scene, heard: list[int]) -> FamilyMatrix:
        rng, idle = self._gpu_rng, scene.standing
        entities, rows = [], []
        for number in heard:
            for gpu in range(self.gpus):
                noise = rng.normal(size=4)
                if (number, gpu) in scene.lost_gpus:
                    continue
                busy = 0.0 if idle else float(np.clip(0.93 + 0.03 * noise[0], 0, 1))
                usual: dict[str, float] = dict.fromkeys(_GPU, 0.0) | {
                    "busy_ratio": busy, "power_w": 120.0 + 500.0 * busy + 10 * noise[1], "temp_c": 35.0 + 30.0 * busy + noise[2],
                    "sm_clock_mhz": 1980.0 - 10 * abs(noise[3]), "pcie_width_lanes": 16.0, "pcie_width_max_lanes": 16.0,
                    "pcie_gen": 5.0 if busy else 1.0, "pcie_gen_max": 5.0,
                }  # fmt: skip
                entities.append((node_name(number), f"gpu{gpu}"))
                rows.append([scene.gpu.get((number, gpu, metric), usual[metric]) for metric in _GPU])
        return _matrix("gpu", entities, _GPU, rows)

    def _probes(self, scene: Scene, heard: list[int]) -> FamilyMatrix:
        entities, rows = [], []
        for prober in heard:
            for peer in range(self.nodes):
                if peer == prober:
                    continue
                entities.append((node_name(prober), node_name(peer)))
                if scene.dead_links & {prober, peer}:
                    rows.append([math.nan, math.nan, 3.0, 3.0])
                    continue
                extra = scene.rtt_ms.get(prober, 0.0) + scene.rtt_ms.get(peer, 0.0)
                usual = 0.2 * math.exp(0.3 * self._rng.normal()) + (
                    3.0 * self._rng.random() if self._rng.random() < 0.02 else 0.0
                )
                rows.append([usual + extra, 1.5 * usual + extra, 3.0, 0.0])
        return _matrix("mesh", entities, _MESH, rows)

    def _log(self, at_ns: int, seq: int, number: int, code: str, attributes: dict[str, str], rank: int) -> LogEvent:
        severity = "critical" if code.startswith(("xid", "worker_exit")) else "error"
        return LogEvent(node=node_name(number), seq=seq, observed_at_ns=at_ns + NS_PER_S + 400 * NS_PER_MS + seq * 50 * NS_PER_MS,
                        boot_id="b", source="synthetic", severity=severity, code=code, line=code, attributes=attributes, job=JOB,
                        attempt=self._attempt, rank=rank)  # fmt: skip


def _matrix(
    family: str, entities: list[tuple[str, str]], metrics: tuple[str, ...], rows: list[list[float]]
) -> FamilyMatrix:
    values = np.array(rows, dtype=np.float32).reshape(len(entities), len(metrics))
    return FamilyMatrix(family, tuple(entities), metrics, values)
