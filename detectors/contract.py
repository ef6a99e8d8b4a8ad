"""What every detector must withstand, whoever wrote it: run by the tests for each registered detector, and by plugin authors for theirs.

A detector takes part by having ``example()``: a class method that gives an `Example` (frames, and the kind and entity it must name).
Each check raises `AssertionError` with one sentence of what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame
from detectors.synthetic import Example, Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.policy import KINDS
from trainwarden.records import Reach, StepReport, Verdict

HEALTHY_SECONDS = 600
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


def silent_on_health(kind: type[Detector]) -> None:
    """Ten minutes of health raise no alarm, and supporting verdicts stay under the declared rate."""
    verdicts = run(kind(), healthy())
    assert not alarms(verdicts), (
        f"{kind.name} raised {alarms(verdicts)[0].kind} on healthy data: {alarms(verdicts)[0].text}"
    )
    limit = float(getattr(kind, "supporting_per_hour", 0.0)) * HEALTHY_SECONDS / 3600
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
    assert first.kind in kind.kinds, f"{kind.name}: {first.kind} is not among its declared kinds"
    assert all(len(msgspec.msgpack.encode(e)) < 2048 for e in first.evidence), f"{kind.name}: evidence above 2 kB"


def survives_gaps(kind: type[Detector]) -> None:
    """A fifth of all ticks and reports is missing."""
    _quiet(kind, [_thinned(frame, number) for number, frame in enumerate(healthy())], "a fifth of the input missing")


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
    _quiet(kind, [_with_nan(frame, rng) for frame in healthy()], "a twentieth of the samples missing")


def survives_clock_steps(kind: type[Detector]) -> None:
    """The clock of one node is an hour off from second 200 on, and the pipeline's own clock jumps by five minutes in second 400."""
    frames = []
    for number, frame in enumerate(healthy()):
        steps = tuple(_shifted(r, 3600 * NS_PER_S) if r.node == "n2" and number >= 400 else r for r in frame.steps)
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
    turned = [replace(f, ticks=tuple(_turned(t) for t in f.ticks), steps=f.steps[::-1]) for f in example.frames]
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
    """The same frames give the same verdicts, to the last bit."""
    frames = example_of(kind).frames
    one, other = run(kind(), frames), run(kind(), frames)
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


CHECKS: tuple[Check, ...] = (
    silent_on_health, fires_on_its_example, survives_gaps, survives_duplicates, survives_reordering, survives_nan, survives_clock_steps,
    survives_other_members, survives_one_node, ignores_node_order, snapshot_is_exact, is_deterministic, memory_is_bounded,
)  # fmt: skip


def _quiet(kind: type[Detector], frames: Sequence[Frame], what: str) -> None:
    found = [v for v in alarms(run(kind(), frames)) if KINDS[v.kind].reach is Reach.ACT]
    assert not found, f"{kind.name} blames {found[0].entity} ({found[0].kind}) for {what}: {found[0].text}"


def _said(verdicts: Sequence[Verdict]) -> list[tuple[str, str, bool]]:
    return sorted({(v.kind, str(v.entity), v.clears) for v in verdicts})


def _thinned(frame: Frame, number: int) -> Frame:
    rng = np.random.default_rng(number)
    ticks = frame.ticks if rng.random() > 0.2 else ()
    return replace(frame, ticks=ticks, steps=tuple(r for r in frame.steps if rng.random() > 0.2))


def _with_nan(frame: Frame, rng: np.random.Generator) -> Frame:
    ticks = []
    for tick in frame.ticks:
        families = {}
        for name, matrix in tick.families.items():
            hidden = rng.random(matrix.values.shape) < (1.0 if rng.random() < 0.02 else 0.05)
            families[name] = replace(matrix, values=np.where(hidden, np.float32(np.nan), matrix.values))
        ticks.append(replace(tick, families=families))
    steps = tuple(_with_nan_rows(report, rng) for report in frame.steps)
    return replace(frame, ticks=tuple(ticks), steps=steps)


def _with_nan_rows(report: StepReport, rng: np.random.Generator) -> StepReport:
    blank = {"data_ms": float("nan"), "wait_ms": float("nan"), "grad_norm_local": float("nan"), "loss": float("nan")}
    rows = tuple(msgspec.structs.replace(row, **blank) if rng.random() < 0.05 else row for row in report.rows)
    return msgspec.structs.replace(report, rows=rows)


def _shifted(report: StepReport, by_ns: int) -> StepReport:
    rows = tuple(
        msgspec.structs.replace(r, started_at_ns=r.started_at_ns + by_ns, arrived_at_ns=r.arrived_at_ns + by_ns)
        for r in report.rows
    )
    return msgspec.structs.replace(report, rows=rows, observed_at_ns=report.observed_at_ns + by_ns)


def _turned(tick: AlignedTick) -> AlignedTick:
    families = {name: _turned_rows(matrix) for name, matrix in tick.families.items()}
    return replace(tick, nodes=tick.nodes[::-1], present=tick.present[::-1].copy(), families=families)


def _turned_rows(matrix: FamilyMatrix) -> FamilyMatrix:
    return replace(matrix, entities=matrix.entities[::-1], values=matrix.values[::-1].copy())
