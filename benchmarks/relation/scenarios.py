"""Runs of the simulator with known answers: which faults, where, when, how much.

A run has slots, each with one fault (or two, or slow work with no bad node) per job. Magnitudes follow from the slowdown asked for:
what slows computing takes about 85 % of a step, what slows the network the job's share of reduction. At least half of all slow
slots but the last have no bad node and no sick sub-network. The last slot of every run is a fault in unequal groups: a stage, some
sequences or some experts become longer by design, and at the same moment a node or a sub-network becomes sick.
"""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from collectors.simulated.layout import Layout, leaf_name, pdu_name, rack_name, zone_name
from collectors.simulated.profiles import PROFILES
from collectors.simulated.spec import Spec

SPLITS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("splits.toml").read_text(encoding="utf-8"))
COMPUTE_SHARE = 0.85
SLOWDOWNS = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
SIZES = (128, 1024, 4096)
JOBS_AT_ONCE = {128: 4, 1024: 1, 4096: 1}
SLOTS = {128: 4, 1024: 4, 4096: 4}
UNEQUAL_STREAM = 1
"""The last slot is drawn from a stream of its own: the others are what they were before there was one."""
EVERYWHERE = ("rail_degraded", "fabric_congestion")
"""These strike all jobs of a cluster: where there are several, only the first draws them, so that two do not overlap."""
UNEQUAL = ("stage_imbalance", "length_imbalance", "expert_imbalance")
"""By design some do more than others."""
GROUPS = ("node", "subnet", "two", "unequal", "nobody")
NAMES = ("dense", "pipeline", "moe", "longseq", "ddp", "recsys")


@dataclass(frozen=True)
class Slot:
    """What is wrong in one job for a while. `truth` are (kind, name) to be named; empty: nobody is to blame."""

    job: int
    group: str
    kinds: tuple[str, ...]
    slowdown: float
    start_s: float
    end_s: float
    truth: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scenario:
    """A run: `faults` as the simulator takes them."""

    split: str
    seed: int
    size: int
    nodes: int
    jobs: str
    profiles: tuple[str, ...]
    faults: str
    slots: tuple[Slot, ...]
    length_s: float

    @property
    def name(self) -> str:
        """Differs wherever the run does: same seed and other slowdowns are another run."""
        return f"{self.split}-{self.size}-{self.seed}-{zlib.crc32(self.faults.encode()):08x}"


def scenario(
    split: str, size: int, seed: int, slowdowns: Sequence[float] = SLOWDOWNS, groups: Sequence[str] = ()
) -> Scenario:
    """The run of a seed; with `groups`, another one in which all slots are of these."""
    stream = np.random.default_rng((seed, size))
    last = np.random.default_rng((seed, size, UNEQUAL_STREAM))
    count = JOBS_AT_ONCE[size]
    turn = seed % len(NAMES)
    profiles = tuple(NAMES[(turn + i) % len(NAMES)] for i in range(count))
    layout = Layout(Spec(nodes=size * count, seed=seed))
    kinds, timing = allowed(split), SPLITS["slots"]
    slots: list[Slot] = []
    items: list[str] = []
    for number in range(SLOTS[size]):
        start_s = timing["first_s"] + number * (timing["lasts_s"] + timing["gap_s"])
        for job, profile in enumerate(profiles):
            ends = number == SLOTS[size] - 1 and not groups
            drawn = last if ends else stream
            group = "unequal" if ends else _group(stream, number + job + seed, groups)
            slowdown = float(slowdowns[int(drawn.integers(len(slowdowns)))])
            made = _slot(drawn, layout, kinds, group, job, size, profile, slowdown, start_s, float(timing["lasts_s"]))
            slots.append(made[0])
            items += made[1]
    length_s = timing["first_s"] + SLOTS[size] * (timing["lasts_s"] + timing["gap_s"])
    return Scenario(split, seed, size, size * count, ",".join(f"{size}:{p}" for p in profiles), profiles, ",".join(items) or "none",
                    tuple(slots), float(length_s))  # fmt: skip


def allowed(split: str) -> dict[str, list[str]]:
    """Kinds by group; those held out are in the test split only."""
    held = SPLITS["held_out_kinds"]
    return {group: [k for k in names if split == "test" or k not in held] for group, names in SPLITS["kinds"].items()}


def _group(stream: np.random.Generator, turn: int, groups: Sequence[str]) -> str:
    """Half of the slots have no bad node; the rest are nodes, sub-networks, and two at once. Or one of `groups`."""
    if groups:
        return str(stream.choice(tuple(groups)))
    if turn % 2:
        return "nobody"
    return str(stream.choice(("node", "node", "subnet", "subnet", "two")))


def _slot(
    stream: np.random.Generator, layout: Layout, kinds: dict[str, list[str]], group: str, job: int, size: int, profile: str,
    slowdown: float, start_s: float, lasts_s: float,
) -> tuple[Slot, list[str]]:  # fmt: skip
    first = {"two": "node", "unequal": "nobody"}.get(group, group)
    wanted = [first, str(stream.choice(("node", "subnet")))] if group in ("two", "unequal") else [first]
    chosen: list[str] = []
    truth: list[tuple[str, str]] = []
    items: list[str] = []
    for each in wanted:
        fitting = [k for k in kinds[each] if _suits(k, profile) and k not in chosen and not (job and k in EVERYWHERE)]
        fitting = [k for k in fitting if group != "unequal" or each != "nobody" or k in UNEQUAL]
        kind = str(stream.choice(fitting))
        target, answer = _target(stream, layout, kind, job, size, profile)
        chosen.append(kind)
        truth += [answer] if answer[0] != "nobody" else []
        items.append(f"{kind}@{target}:{start_s:g}+{lasts_s:g}x{magnitude(kind, profile, slowdown):.5g}")
    return Slot(job, group, tuple(chosen), slowdown, start_s, start_s + lasts_s, tuple(truth)), items


def _suits(kind: str, profile: str) -> bool:
    if kind == "stage_imbalance":
        return PROFILES[profile].pp > 1
    return PROFILES[profile].ep > 1 if kind == "expert_imbalance" else True


def _target(
    stream: np.random.Generator, layout: Layout, kind: str, job: int, size: int, profile: str
) -> tuple[str, tuple[str, str]]:
    """Where it strikes, in the simulator's words, and the answer."""
    node = job * size + int(stream.integers(size))
    name, part = layout.names[node], int(stream.integers(8))
    if kind in ("weak_node", "node_power_cap", "loader_slow", "cpu_slow_clock"):
        return name, ("node", name)
    if kind in ("weak_gpu", "clock_stuck_low", "gpu_thermal"):
        return f"{name}/gpu{part}", ("node", name)
    if kind in ("port_slow", "packet_loss", "slow_receiver"):
        return f"{name}/{layout.rail_devices[part]}", ("node", name)
    places = {"leaf_degraded": leaf_name(int(layout.pod[node]), part), "leaf_congestion": leaf_name(int(layout.pod[node]), part),
              "rail_degraded": f"rail{part}", "rack_cooling": rack_name(int(layout.rack[node])),
              "zone_cooling": zone_name(int(layout.zone[node])), "pdu_power_brake": pdu_name(int(layout.pdu[node]))}  # fmt: skip
    if kind in places:
        return places[kind], (kind.partition("_")[0], places[kind])
    if kind == "stage_imbalance":
        stages = max(d for d in range(1, PROFILES[profile].pp + 1) if size % d == 0)
        return f"job-{job:03d}/stage{stages - 1}", ("nobody", "")
    return ("fabric" if kind == "fabric_congestion" else f"job-{job:03d}"), ("nobody", "")


def magnitude(kind: str, profile: str, slowdown: float) -> float:
    """What makes a step about so many times slower."""
    own = 1.0 + (slowdown - 1.0) / COMPUTE_SHARE
    width = 1.0 / (1.0 + (slowdown - 1.0) / PROFILES[profile].reduce)
    found = {
        "weak_node": own, "weak_gpu": own, "clock_stuck_low": own, "cpu_slow_clock": own, "bad_release": own,
        "gpu_thermal": 1 - 1 / own, "rack_cooling": 1 - 1 / own, "zone_cooling": 1 - 1 / own, "pdu_power_brake": 1 - 1 / own,
        "node_power_cap": 1 - own**-2.4, "loader_slow": slowdown - 1, "storage_slow": slowdown - 1, "stage_imbalance": own - 1,
        "port_slow": 1 / width, "packet_loss": (1 / width - 1) / 60, "pauses": 2.0 * (slowdown - 1),
        "length_imbalance": min(0.4, 0.5 * (slowdown - 1)), "expert_imbalance": min(0.5, 0.8 * (slowdown - 1)),
    }  # fmt: skip
    return float(found.get(kind, 1 - width))
