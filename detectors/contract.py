"""What every detector must withstand, whoever wrote it: run by the tests for each registered detector, and by plugin authors for theirs.

A detector takes part by stating its false-alarm rate and by having ``example()``: a class method that gives an `Example` (frames, and the
kind and entity it must name). Each check raises `AssertionError` with one sentence of what went wrong.

Examples
--------
The whole test file of a detector that lives outside this project::

    import pytest
    from detectors.contract import CHECKS, SLOW_CHECKS, Check
    from my_plugin import HotAisle

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check: Check) -> None:
        check(HotAisle)

    @pytest.mark.slow                      # a million ticks take minutes
    @pytest.mark.parametrize("check", SLOW_CHECKS, ids=lambda check: check.__name__)
    def test_endurance(check: Check) -> None:
        check(HotAisle)

and the part of the detector that the suite asks for::

    class HotAisle(Detector):
        name = "hot_aisle"
        kinds = ("device_state",)
        false_alarms_per_node_day = 0.001          # opinions that could open an incident, per node and day of health
        supporting_per_hour = 2.0                  # optional: how often it may say what only supports others, in a small cluster

        @classmethod
        def example(cls) -> Example:
            hot = Scene(host={(2, "inlet_celsius"): 51.0})
            frames = SyntheticCluster(seed=1).frames(60, lambda second: hot if second >= 30 else None)
            return Example(frames, "device_state", node_entity(2))
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np

from detectors import disturbances as change
from detectors.base import Detector, Frame
from detectors.risk import poisson_at_least
from detectors.synthetic import Example, Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.policy import KINDS
from trainwarden.records import Reach, StepReport, Verdict
from trainwarden.topology import Topology

__all__ = [
    "CHECKS", "SLOW_CHECKS", "Check", "Example", "Scene", "SyntheticCluster", "alarms", "check_detector", "example_of", "healthy", "run",
]  # fmt: skip

HEALTHY_SECONDS = 600
LONG_SECONDS, LONG_NODES = 1800, 8
RATE_RISK = 0.01
"""A detector fails when so many alarms as it raised would come this rarely at the rate it states."""
Check = Callable[[type[Detector]], None]


def run(detector: Detector, frames: Sequence[Frame]) -> list[Verdict]:
    """All verdicts on `frames`, in order."""
    return [verdict for frame in frames for verdict in detector.update(frame)]


def alarms(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Those that would become an incident: kinds that only support others are not counted."""
    return [v for v in verdicts if not v.clears and KINDS[v.kind].reach in (Reach.NOTIFY, Reach.ACT)]


def example_of(kind: type[Detector]) -> Example:
    """The detector's declared example."""
    make = getattr(kind, "example", None)
    assert make is not None, f"{kind.__name__} declares no example(): add a class method that returns an Example"
    example: Example = make()
    return example


@cache
def healthy(nodes: int = 4, seconds: int = HEALTHY_SECONDS, seed: int = 7) -> tuple[Frame, ...]:
    """A healthy run with evaluations, saves, unequal ranks and noise."""
    return tuple(SyntheticCluster(nodes, seed).frames(seconds))


@cache
def long_healthy() -> tuple[Frame, ...]:
    """Half an hour of another, slower job on more nodes: what a stated false-alarm rate is held against."""
    return tuple(
        SyntheticCluster(LONG_NODES, seed=23, step_ms=500.0, evaluate_every=120, save_every=60).frames(LONG_SECONDS)
    )


def silent_on_health(kind: type[Detector]) -> None:
    """Ten minutes of health raise no alarm, and supporting verdicts stay under the declared rate."""
    verdicts = run(kind(), healthy())
    assert not alarms(verdicts), (
        f"{kind.name} raised {alarms(verdicts)[0].kind} on healthy data: {alarms(verdicts)[0].text}"
    )
    limit = _supporting(kind, HEALTHY_SECONDS)
    spoken = [v for v in verdicts if not v.clears]
    assert len(spoken) <= limit, (
        f"{kind.name} spoke {len(spoken)} times in {HEALTHY_SECONDS} s of health, it declares at most {limit:.1f}"
    )


def fires_on_its_example(kind: type[Detector]) -> None:
    """The declared kind and entity are named, nobody else is blamed, and the verdict can be read."""
    example = example_of(kind)
    verdicts = [v for v in run(kind(), example.frames) if not v.clears]
    named = [v for v in verdicts if v.kind == example.kind and v.entity == example.entity]
    assert named, (
        f"{kind.name} did not say {example.kind} of {example.entity}; it said {[(v.kind, str(v.entity)) for v in verdicts]}"
    )
    wrong = [v for v in alarms(verdicts) if v.entity != example.entity]
    assert not wrong, f"{kind.name} also blamed {wrong[0].entity} ({wrong[0].kind}): {wrong[0].text}"
    first = named[0]
    assert first.text, f"{kind.name}: the verdict has no text"
    assert first.evidence, f"{kind.name}: the verdict has no evidence"
    assert 0 < first.confidence <= 1, f"{kind.name}: confidence {first.confidence} is not a probability"
    assert first.onset_at_ns <= first.window_end_ns, f"{kind.name}: the onset lies after the window"
    assert first.reach is not Reach.STORE, (
        f"{kind.name}: the verdict goes no farther than the store: make it by `self.verdict(...)`, or say its `reach`"
    )
    assert first.kind in kind.kinds, f"{kind.name}: {first.kind} is not among its declared kinds"
    assert all(len(msgspec.msgpack.encode(e)) < 2048 for e in first.evidence), f"{kind.name}: evidence above 2 kB"


def survives_gaps(kind: type[Detector]) -> None:
    """A fifth of all ticks and reports is missing."""
    _quiet(
        kind, [change.thinned(frame, number) for number, frame in enumerate(healthy())], "a fifth of the input missing"
    )


def survives_duplicates(kind: type[Detector]) -> None:
    """Every report and log event comes twice; the verdicts are those of a single delivery."""
    example = example_of(kind)
    doubled = [replace(f, steps=f.steps + f.steps, logs=f.logs + f.logs) for f in example.frames]
    once, twice = _said(run(kind(), example.frames)), _said(run(kind(), doubled))
    assert once == twice, f"{kind.name} says {twice} of doubled input and {once} of single"


def survives_reordering(kind: type[Detector]) -> None:
    """Reports come in any order, some a frame late."""
    rng = np.random.default_rng(3)
    frames: list[Frame] = []
    held: tuple[StepReport, ...] = ()
    for frame in healthy():
        late = tuple(r for r in frame.steps if rng.random() < 0.2)
        now = [r for r in (*held, *frame.steps) if r not in late]
        order = rng.permutation(len(now))
        frames.append(replace(frame, steps=tuple(now[i] for i in order)))
        held = late
    _quiet(kind, frames, "reports out of order")


def survives_nan(kind: type[Detector]) -> None:
    """A twentieth of all samples, and whole families at times, are not a number."""
    rng = np.random.default_rng(5)
    _quiet(kind, [change.with_nan(frame, rng) for frame in healthy()], "a twentieth of the samples missing")


def survives_clock_steps(kind: type[Detector]) -> None:
    """The clock of one node is an hour off from second 200 on, and the pipeline's own clock jumps by five minutes in second 400."""
    frames = []
    for number, frame in enumerate(healthy()):
        steps = tuple(
            change.shifted(r, 3600 * NS_PER_S) if r.node == "n2" and number >= 400 else r for r in frame.steps
        )
        frames.append(replace(frame, steps=steps, now_ns=frame.now_ns + (300 * NS_PER_S if number >= 800 else 0)))
    _quiet(kind, frames, "a clock an hour off")


def survives_other_members(kind: type[Detector]) -> None:
    """A node leaves with an attempt of three ranks, another joins later: nobody is blamed for it."""
    before = SyntheticCluster(5, seed=11)

    def script(second: int) -> Scene:
        if second < 60:
            return Scene(members=(0, 1, 2, 3))
        return Scene(members=(0, 1, 3), attempt=1) if second < 120 else Scene(members=(0, 1, 3, 4), attempt=2)

    _quiet(kind, before.frames(180, script), "members that change")


def survives_one_node(kind: type[Detector]) -> None:
    """A job of one rank has no peers."""
    _quiet(kind, healthy(nodes=1, seconds=120), "a job of one node")


def ignores_node_order(kind: type[Detector]) -> None:
    """Nodes in another order give the same verdicts."""
    example = example_of(kind)
    turned = [replace(f, ticks=tuple(change.turned(t) for t in f.ticks), steps=f.steps[::-1]) for f in example.frames]
    one, other = _said(run(kind(), example.frames)), _said(run(kind(), turned))
    assert one == other, f"{kind.name} says {other} when nodes come in reverse order and {one} otherwise"


def snapshot_is_exact(kind: type[Detector]) -> None:
    """A detector restored at any quarter goes on exactly as the one that never stopped."""
    frames = example_of(kind).frames
    whole = kind()
    expected = [run(whole, [frame]) for frame in frames]
    moving = kind()
    for number, frame in enumerate(frames):
        if number % max(1, len(frames) // 4) == len(frames) // 8:
            moved = kind()
            moved.restore(moving.snapshot())
            moving = moved
        found = run(moving, [frame])
        assert found == expected[number], f"{kind.name} differs after a restore at frame {number}: {_said(found)}"
    assert moving.snapshot() == whole.snapshot(), (
        f"{kind.name}: the state after restores differs from the uninterrupted one"
    )


def is_deterministic(kind: type[Detector]) -> None:
    """The same frames give the same verdicts, to the last bit, whatever the global random numbers are."""
    frames = example_of(kind).frames
    one = run(kind(), frames)
    random.seed(1)
    np.random.seed(1)
    other = run(kind(), frames)
    assert one == other, f"{kind.name} gives two answers to the same input"


def memory_is_bounded(kind: type[Detector]) -> None:
    """State does not grow between three and ten minutes of the same work."""
    frames = healthy()
    detector = kind()
    run(detector, frames[: len(frames) * 3 // 10])
    early = len(detector.snapshot())
    run(detector, frames[len(frames) * 3 // 10 :])
    late = len(detector.snapshot())
    assert late <= 1.25 * early + 4096, f"{kind.name}: state grew from {early} to {late} bytes in seven minutes"


def states_its_false_alarm_rate(kind: type[Detector]) -> None:
    """Half an hour of health on eight nodes brings no more than the rate it states makes plausible (Poisson, one in a hundred)."""
    rate = kind.false_alarms_per_node_day
    assert math.isfinite(rate), (
        f"{kind.__name__} does not state its false-alarm rate: set `false_alarms_per_node_day`, the opinions per node and day of health"
    )
    assert rate >= 0, f"{kind.name} states {rate} false alarms per node-day, expected 0 or more"
    verdicts = run(kind(), long_healthy())
    spoken = {
        (v.kind, v.entity, v.onset_at_ns) for v in (alarms(verdicts) if _can_alarm(kind) else verdicts) if not v.clears
    }
    node_days = LONG_NODES * LONG_SECONDS / 86400
    allowed = rate * node_days + (0.0 if _can_alarm(kind) else _supporting(kind, LONG_SECONDS))
    assert poisson_at_least(len(spoken), allowed) >= RATE_RISK, (
        f"{kind.name} spoke {len(spoken)} times in {node_days:.2f} node-days of health, its stated rate makes {allowed:.3f} likely"
    )


def survives_vanished_and_new_nodes(kind: type[Detector]) -> None:
    """A spare node falls silent, is forgotten, and comes back beside one never seen before: no job uses them, nobody is to blame."""
    frames = []
    for number, frame in enumerate(SyntheticCluster(6, seed=13).frames(300, lambda _: Scene(members=(0, 1, 2, 3)))):
        second = number // 2
        ticks = frame.ticks if second >= 120 else tuple(change.without(t, "n5", forgotten=True) for t in frame.ticks)
        if 60 <= second < 200:
            ticks = tuple(change.without(t, "n4", forgotten=second >= 120) for t in ticks)
        frames.append(replace(frame, ticks=ticks))
    _quiet(kind, frames, "a spare node that comes and goes")


def survives_empty_frames(kind: type[Detector]) -> None:
    """Frames with nothing, ticks without nodes, families without rows or of an unknown name, before and within health."""
    topology, nothing = Topology(), np.zeros(0, dtype=np.bool_)
    detector = kind()
    for number, frame in enumerate(healthy(seconds=60)):
        blank = Frame(frame.now_ns, (), (), (), topology if number % 2 else frame.topology)
        bare = [replace(t, nodes=(), present=nothing, families={}) for t in frame.ticks]
        odd = [
            replace(change.emptied(t), families={**change.emptied(t).families, "?": next(iter(t.families.values()))})
            for t in frame.ticks
        ]
        for empty in (blank, replace(blank, ticks=tuple(bare)), replace(blank, ticks=tuple(odd)), frame):
            found = [v for v in alarms(run(detector, [empty])) if KINDS[v.kind].reach is Reach.ACT]
            assert not found, (
                f"{kind.name} blames {found[0].entity} ({found[0].kind}) for empty frames: {found[0].text}"
            )


def survives_odd_names(kind: type[Detector]) -> None:
    """Nodes with huge and odd names (separators, quotes, 253 letters, other scripts) get the same verdicts."""
    example = example_of(kind)
    known = sorted({node for frame in example.frames for tick in frame.ticks for node in tick.nodes})
    for turn in (0, 4):
        names = {
            node: change.ODD_NAMES[(i + turn) % len(change.ODD_NAMES)]
            for i, node in enumerate(known[: len(change.ODD_NAMES)])
        }
        expected = {(v.kind, *change.named(v.entity, names), v.clears) for v in run(kind(), example.frames)}
        verdicts = run(kind(), change.renamed(example.frames, names))
        found = {(v.kind, *change.named(v.entity, {}), v.clears) for v in verdicts}
        assert found == expected, (
            f"{kind.name} says {sorted(found)} of nodes with odd names and {sorted(expected)} otherwise"
        )
        assert all(len(msgspec.msgpack.encode(e)) < 4096 for v in verdicts for e in v.evidence), (
            f"{kind.name}: evidence above 4 kB"
        )


def memory_is_flat(kind: type[Detector], ticks: int = 4000) -> None:
    """State after `ticks` ticks, with jobs and nodes that come and go, is no larger than after half of them.

    Half is more than half an hour, after which a detector must have forgotten jobs that nobody hears of.
    """
    detector, early = kind(), 0
    for number, frame in enumerate(change.cheap_frames(ticks, churn_every=max(100, ticks // 1000))):
        detector.update(frame)
        if number == ticks // 2:
            early = len(detector.snapshot())
    late = len(detector.snapshot())
    assert late <= 1.25 * early + 4096, (
        f"{kind.name}: state grew from {early} to {late} bytes in {ticks - ticks // 2} ticks"
    )


def memory_is_flat_over_a_million_ticks(kind: type[Detector]) -> None:
    """The same over 1,000,000 ticks, and the process does not grow either (16 MiB are the allocator's)."""
    run(kind(), list(change.cheap_frames(2000)))
    before = _resident_bytes()
    memory_is_flat(kind, 1_000_000)
    grown = _resident_bytes() - before
    assert grown < 16 * 2**20, f"{kind.name}: the process grew by {grown / 2**20:.1f} MiB over 1,000,000 ticks"


def check_detector(kind: type[Detector], slow: bool = False) -> None:
    """Every check, one after the other; `slow` adds those that take minutes."""
    for check in (*CHECKS, *(SLOW_CHECKS if slow else ())):
        check(kind)


CHECKS: tuple[Check, ...] = (
    silent_on_health, fires_on_its_example, states_its_false_alarm_rate, survives_gaps, survives_duplicates, survives_reordering,
    survives_nan, survives_clock_steps, survives_other_members, survives_one_node, survives_vanished_and_new_nodes, survives_empty_frames,
    survives_odd_names, ignores_node_order, snapshot_is_exact, is_deterministic, memory_is_bounded, memory_is_flat,
)  # fmt: skip
SLOW_CHECKS: tuple[Check, ...] = (memory_is_flat_over_a_million_ticks,)


def _can_alarm(kind: type[Detector]) -> bool:
    return any(KINDS[name].reach in (Reach.NOTIFY, Reach.ACT) for name in kind.kinds)


def _supporting(kind: type[Detector], seconds: float) -> float:
    return float(getattr(kind, "supporting_per_hour", 0.0)) * seconds / 3600


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as counts:
        return int(counts.read().split()[1]) * 4096


def _quiet(kind: type[Detector], frames: Sequence[Frame], what: str) -> None:
    found = [v for v in alarms(run(kind(), frames)) if KINDS[v.kind].reach is Reach.ACT]
    assert not found, f"{kind.name} blames {found[0].entity} ({found[0].kind}) for {what}: {found[0].text}"


def _said(verdicts: Sequence[Verdict]) -> list[tuple[str, str, bool]]:
    return sorted({(v.kind, str(v.entity), v.clears) for v in verdicts})
