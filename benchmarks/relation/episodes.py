"""Scenarios played once and kept: rounds of every job, with what our own model made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.relation.scenarios import Scenario, Slot
from collectors.simulated.run import build
from collectors.simulated.spec import VERSION, Spec
from detectors.relation.features import ANSWERED, OWN, ROUND_S, RTT, WARM_ROUNDS, Past, Round
from detectors.relation.floors.base import Episode
from trainwarden.commands.simulated_rounds import RATE_HZ, graph_of_job, rounds_of

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Played:
    """One job of a scenario."""

    scenario: Scenario
    job: int
    episode: Episode
    rounds: tuple[Round, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.scenario.slots if slot.job == self.job)

    @property
    def node_days(self) -> float:
        return len(self.episode.graph.nodes) * len(self.rounds) * ROUND_S / 86400


def play(scenario: Scenario, cache: Path | None) -> Iterator[Played]:
    """The jobs of a scenario, from the cache where they are kept."""
    simulator = build(
        Spec(nodes=scenario.nodes, seed=scenario.seed, jobs=scenario.jobs, rate_hz=RATE_HZ),
        scenario.faults,
        scenario.length_s,
    )
    graphs = [graph_of_job(simulator.layout, run.grid) for run in simulator.jobs]
    path = cache / f"v{VERSION}-{scenario.name}.npz" if cache else None
    if path is None or not path.exists():
        made = [_stacked(jobs) for jobs in zip(*rounds_of(simulator, round(scenario.length_s * RATE_HZ)), strict=True)]
        flat = {f"{job}-{name}": value for job, arrays in enumerate(made) for name, value in arrays.items()}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".part.npz")
            np.savez(fresh, **flat)  # type: ignore[arg-type]
            fresh.replace(path)
    else:
        with np.load(path) as kept:
            flat = {name: kept[name] for name in kept.files}
    for job, graph in enumerate(graphs):
        mine = {name.partition("-")[2]: value for name, value in flat.items() if name.startswith(f"{job}-")}
        rounds = tuple(_round(mine, t) for t in range(len(mine["at"])))
        node = mine["node"].copy()
        node[:, OWN] = _own(rounds, len(graph.nodes))
        episode = Episode(graph, node, _port(mine["port"]), mine["step"].astype(np.float64), WARM_ROUNDS + 8)
        yield Played(scenario, job, episode, rounds)


def _stacked(rounds: tuple[Round, ...]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {
        name: np.stack([getattr(r, name) for r in rounds]) for name in ("node", "gpu", "port")
    }
    found |= {"at": np.array([r.at_ns for r in rounds]), "step": np.array([r.step_ms for r in rounds])}
    return {**found, "port": found["port"].astype(np.float16)}


def _round(kept: dict[str, NDArray[Any]], t: int) -> Round:
    return Round(
        int(kept["at"][t]), float(kept["step"][t]), kept["node"][t], kept["gpu"][t], kept["port"][t].astype(np.float32)
    )


def _port(kept: NDArray[Any]) -> F32:
    """Floors get one round trip per port: the smaller of what it asks for and what it answers."""
    port = kept.astype(np.float32)
    port[:, RTT] = np.fmin(port[:, RTT], port[:, ANSWERED])
    return port[:, :ANSWERED]


def _own(rounds: tuple[Round, ...], nodes: int) -> F32:
    """The computing share over its past, as the detector's own features make it: floors get the same metric."""
    past = Past()
    frozen = np.zeros(nodes, dtype=np.bool_)
    found = []
    for seen in rounds:
        found.append(past.advance(seen, frozen).node[OWN] * past.scale[OWN])
    return np.stack(found).astype(np.float32)
