"""Which nodes each job has, and how its ranks are grouped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from collectors.simulated.noise import Ints, Noise
from collectors.simulated.profiles import PROFILES, Profile, divisor
from collectors.simulated.spec import GPUS, Spec
from trainwarden.errors import UsageError

SIZES = (128, 64, 32, 16, 8, 4, 2)
CHANCES = (0.08, 0.12, 0.20, 0.20, 0.20, 0.12, 0.08)
ITEM = re.compile(r"(?:(\d+)x)?(\d+)(?::(\w+))?")


@dataclass(frozen=True)
class Grid:
    """Parallel groups of one job: ranks are numbered tensor first, then data, then pipeline (Megatron's default order)."""

    index: int
    name: str
    first_node: int
    nodes: int
    profile: Profile

    @property
    def world(self) -> int:
        """Ranks."""
        return self.nodes * GPUS

    @cached_property
    def tp(self) -> int:
        """Ranks of a tensor group; all in one node."""
        return self.profile.tp

    @cached_property
    def pp(self) -> int:
        """Stages. A stage is whole nodes."""
        return divisor(self.profile.pp, self.nodes)

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.world // (self.tp * self.pp)

    @cached_property
    def ep(self) -> int:
        """Replicas of one expert group."""
        return divisor(self.profile.ep, self.dp)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(stage, replica, tensor place); in this order the flat index is the rank."""
        return self.pp, self.dp, self.tp

    @property
    def span(self) -> slice:
        """Its nodes."""
        return slice(self.first_node, self.first_node + self.nodes)

    def rank_of(self, node: int, gpu: int) -> int:
        """Rank on a GPU of one of its nodes (index in the cluster)."""
        return (node - self.first_node) * GPUS + gpu

    def stage_nodes(self, stage: int) -> Ints:
        """Nodes of a stage."""
        each = self.nodes // self.pp
        return np.arange(self.first_node + stage * each, self.first_node + (stage + 1) * each)

    def facts(self) -> dict[str, str]:
        """Attributes of the job's topology records."""
        return {"world": str(self.world), "tp": str(self.tp), "pp": str(self.pp), "dp": str(self.dp), "ep": str(self.ep),
                "order": "tp-dp-pp", "profile": self.profile.name}  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """Jobs, and the nodes that are lightly used (notebooks, debugging) or idle."""

    grids: tuple[Grid, ...]
    light: Ints

    def job_of(self, node: int) -> Grid | None:
        """The job on a node."""
        return next((g for g in self.grids if g.first_node <= node < g.first_node + g.nodes), None)


def place(spec: Spec, noise: Noise) -> Placement:
    """Put the jobs of `spec` on nodes, lowest first; what is left over is light or idle.

    Raises
    ------
    UsageError
        The list of jobs cannot be read, names an unknown profile or needs more nodes than there are.
    """
    wanted = _mixed(spec, noise) if spec.jobs == "mix" else _listed(spec)
    grids: list[Grid] = []
    node = 0
    for size, profile in wanted:
        grids.append(Grid(len(grids), f"job-{len(grids):03d}", node, size, PROFILES[profile]))
        node += size
    rest = noise.stream("light").permutation(np.arange(node, spec.nodes))
    return Placement(tuple(grids), np.sort(rest[: round(spec.light_share * spec.nodes)]))


def _mixed(spec: Spec, noise: Noise) -> list[tuple[int, str]]:
    stream = noise.stream("placement")
    left = max(1, round(spec.nodes * (1.0 - spec.idle_share - spec.light_share)))
    jobs: list[tuple[int, str]] = []
    while left > 0:
        fitting = [i for i, size in enumerate(SIZES) if size <= max(2, spec.nodes // 4) and size <= left] or [-1]
        chances = np.array([CHANCES[i] for i in fitting])
        size = min(left, SIZES[int(stream.choice(fitting, p=chances / chances.sum()))])
        jobs.append((size, _profile_for(size, stream)))
        left -= size
    return jobs


def _profile_for(size: int, stream: np.random.Generator) -> str:
    names = ("dense", "pipeline", "moe", "longseq") if size >= 8 else ("dense", "ddp", "ddp", "recsys", "longseq")
    return str(stream.choice(names))


def _listed(spec: Spec) -> list[tuple[int, str]]:
    jobs: list[tuple[int, str]] = []
    for item in filter(None, (word.strip() for word in spec.jobs.split(","))):
        found = ITEM.fullmatch(item)
        if found is None or int(found[2]) == 0:
            raise UsageError(f"--jobs: {item!r} found, expected mix or COUNTxNODES:PROFILE, for example 2x16:pipeline")
        profile = found[3] or "dense"
        if profile not in PROFILES:
            raise UsageError(f"--jobs: no profile is called {profile!r}, known are {', '.join(PROFILES)}")
        jobs += [(int(found[2]), profile)] * int(found[1] or 1)
    needed = sum(size for size, _ in jobs)
    if needed > spec.nodes:
        raise UsageError(f"--jobs: {needed} nodes needed, --nodes gives {spec.nodes}: raise one or lower the other")
    return jobs
