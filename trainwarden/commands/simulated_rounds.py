"""The simulator's arrays as the rounds that the relation detector sees, without the way over records and frames.

Training and benchmarks read thousands of node-hours; packing them into messages only to unpack them would take most of the time.
`tests/detectors/relation/test_live.py` compares both ways. One tick of the simulator is one round: it is run at 0.2 Hz.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from collectors.simulated.engine import Simulator
from collectors.simulated.families import columns
from collectors.simulated.layout import Layout, leaf_name, pdu_name, rack_name, zone_name
from collectors.simulated.noise import F32
from collectors.simulated.placement import Grid
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Interval, Steps
from detectors.relation import features
from detectors.relation.features import ROUND_S, Round
from detectors.relation.gather import ERRORS
from detectors.relation.graph import Graph, graph_of
from trainwarden.clock import NS_PER_S
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

RATE_HZ = 1.0 / ROUND_S


def graph_of_job(layout: Layout, grid: Grid) -> Graph:
    """The graph that the job's topology records describe."""
    topology = Topology()
    for node in range(grid.first_node, grid.first_node + grid.nodes):
        places = {"rack": rack_name(int(layout.rack[node])), "leaf": leaf_name(int(layout.pod[node])),
                  "pdu": pdu_name(int(layout.pdu[node])), "zone": zone_name(int(layout.zone[node]))}  # fmt: skip
        topology.apply(TopologyEvent(entity=f"node:{layout.names[node]}", origin="operator", attributes=places))
    ranks = tuple(
        (rank, layout.names[grid.first_node + rank // GPUS], f"gpu{rank % GPUS}") for rank in range(grid.world)
    )
    topology.apply(TopologyEvent(entity=f"job:{grid.name}", origin="hook", attributes=grid.facts(), ranks=ranks))
    job = topology.job(grid.name)
    assert job is not None, "a job that was just announced"
    return graph_of(job, topology)


def rounds_of(simulator: Simulator, count: int) -> Iterator[list[Round]]:
    """One round of every job per interval, jobs in their order."""
    answered = _answered(simulator.layout)
    for interval in simulator.intervals(count):
        whole = _Cluster(interval, simulator.layout, answered)
        yield [whole.round_of(run.grid, simulator.spec.start_ns) for run in simulator.jobs]


def _answered(layout: Layout) -> tuple[F32, F32]:
    """(prober, probe) of the probe that each node answers over each rail, -1 for none."""
    rails = layout.spec.rails
    prober, probe = np.full((2, layout.size, rails), -1, dtype=np.int64)
    for k, rail in enumerate(layout.peer_rail.tolist()):
        prober[layout.peers[:, k], rail] = np.arange(layout.size)
        probe[layout.peers[:, k], rail] = k
    return prober.astype(np.float32), probe.astype(np.float32)


@dataclass
class _Cluster:
    """An interval's arrays, reduced to channels for all nodes at once."""

    interval: Interval
    layout: Layout
    answered: tuple[F32, F32]

    def __post_init__(self) -> None:
        gpu, board, host = (self.interval.family(name) for name in ("gpu", "board", "host"))
        at = columns("gpu")
        node = np.full((len(features.NODE_CHANNELS), self.layout.size), np.nan, dtype=np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):
            node[features.CLOCK] = -np.log(_least(gpu[..., at["sm_clock_mhz"]]))
            node[features.POWER] = -np.log(_middle(gpu[..., at["power_w"]]))
        node[features.TEMP] = -_least(-gpu[..., at["temp_c"]])
        node[features.INLET] = board[:, 0, columns("board")["inlet_temp_c"]]
        node[features.CPU] = host[:, 0, columns("host")["psi_cpu_some_ratio"]]
        node[:, ~self.interval.heard] = np.nan
        self.node = node
        self.gpu = features.gpu_log(gpu[..., at["tensor_active_ratio"]])
        self.gpu[~self.interval.heard] = np.nan
        self.port = self._ports()
        self.port[:, ~self.interval.heard] = np.nan

    def round_of(self, grid: Grid, start_ns: int) -> Round:
        steps = [s for s in self.interval.steps if s.grid.index == grid.index and s.past.phase == "train"]
        node = self.node[:, grid.span].copy()
        node[: features.OWN], step_ms = _step_channels(steps, grid)
        at_ns = start_ns + round(self.interval.at_s * NS_PER_S)
        return Round(at_ns, step_ms, node, self.gpu[grid.span], self.port[:, grid.span])

    def _ports(self) -> F32:
        rails = self.layout.spec.rails
        nic, port = self.interval.family("nic")[:, :rails], self.interval.family("port")
        at = columns("nic")
        out = np.empty((len(features.PORT_CHANNELS) + 1, self.layout.size, rails), dtype=np.float32)
        out[[features.RTT, features.ANSWERED]] = self._rtt()
        out[features.MARKS] = np.log1p(np.nan_to_num(nic[..., at["ecn_marked_per_s"]] + nic[..., at["cnp_sent_per_s"]]))
        errors = sum(np.nan_to_num(nic[..., at[name]]) for name in ERRORS)
        out[features.ERRORS] = np.log1p(errors + np.nan_to_num(port[..., columns("port")["pause_tx_per_s"]]))
        out[features.SPEED] = -np.log(np.maximum(nic[..., at["speed_mbps"]], 1.0))
        return out

    def _rtt(self) -> F32:
        """Of each port two log round trips: what it asks for and what it answers."""
        mesh = self.interval.family("mesh")
        trip = features.rtt_log(mesh[..., columns("mesh")["rtt_ms"]])
        asked = np.full((self.layout.size, self.layout.spec.rails), np.nan, dtype=np.float32)
        for k, rail in enumerate(self.layout.peer_rail.tolist()):
            asked[:, rail] = trip[:, k]
        prober, probe = (a.astype(np.int64) for a in self.answered)
        answers = np.where(prober >= 0, trip[prober, probe], np.nan)
        return np.stack([asked, answers])


def _least(values: F32) -> F32:
    known = np.where(np.isnan(values), np.inf, values).min(axis=1)
    return np.where(np.isfinite(known), known, np.nan).astype(np.float32)


def _middle(values: F32) -> F32:
    known = np.isfinite(values).sum(axis=1)
    return np.where(known > 0, np.nan_to_num(values).sum(axis=1) / np.maximum(known, 1), np.nan).astype(np.float32)


def _step_channels(steps: list[Steps], grid: Grid) -> tuple[F32, float]:
    if not steps:
        return np.full((2, grid.nodes), np.nan, dtype=np.float32), float("nan")
    outcomes = [s.past.outcome for s in steps]
    local = np.stack([1000.0 * (o.data + o.forward + o.backward).reshape(-1) for o in outcomes])
    data = np.stack([1000.0 * o.data.reshape(-1) for o in outcomes])
    whole = np.broadcast_to(np.array([[1000.0 * (s.past.end - s.past.begin)] for s in steps]), local.shape)
    return features.step_channels(local, data, whole, np.repeat(np.arange(grid.nodes), GPUS), grid.nodes)
