"""Probes between pairs that change every ten seconds, as the collectors of a large network choose them: a sick node, port or leaf is
named as on fixed pairs, and what is kept of pairs that never come again is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from collectors.topology.rotation import Place, Rotation
from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.mesh import pairs
from detectors.mesh.links import MeshLinkDetector
from detectors.mesh.pairs import RING, Pairs
from trainwarden.clock import NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent, Verdict
from trainwarden.topology import Topology

START_NS = 1_700_000_000 * NS_PER_S
NODES, BELOW, SICK_FROM_S, SECONDS = 128, 16, 40, 56
COLUMNS = ("rtt_ms", "rtt_max_ms", "sent_count", "lost_count")
Numbers = NDArray[np.float64]
Extra = Callable[[NDArray[np.int64]], Numbers]
"""Pairs × (prober, target) → milliseconds more; infinite = lost."""


def matrix(keys: tuple[tuple[str, str], ...], rtt: Numbers) -> FamilyMatrix:
    sent = np.full(len(keys), 3.0)
    values = np.stack([rtt, 1.3 * rtt, sent, np.where(np.isfinite(rtt), 0.0, sent)], axis=1)
    return FamilyMatrix("mesh", keys, COLUMNS, values.astype(np.float32))


def report(second: int, at_ns: int, step_ms: float, rng: np.random.Generator) -> StepReport:
    rows = tuple(
        StepRow(
            step=5 * second + i,
            phase="train",
            started_at_ns=at_ns - NS_PER_S,
            duration_ms=step_ms + float(rng.normal()),
        )
        for i in range(5)
    )
    return StepReport(node="n000", observed_at_ns=at_ns, job="j", rank=0, world=NODES, rows=rows)


def frames(extra: Extra | None) -> Iterator[Frame]:
    rng, topology = np.random.default_rng(1), Topology()
    names = tuple(f"n{i:03d}" for i in range(NODES))
    places = {name: Place(f"leaf{i // BELOW}") for i, name in enumerate(names)}
    for name, place in places.items():
        facts = {"leaf": place.leaf}
        topology.apply(
            TopologyEvent(entity=f"node:{name}", origin="scheduler", valid_from_ns=START_NS, attributes=facts)
        )
    ranks = tuple((i, name, "gpu0") for i, name in enumerate(names))
    topology.apply(TopologyEvent(entity="job:j", origin="scheduler", valid_from_ns=START_NS, ranks=ranks))
    rotations = [Rotation(name, places, 8) for name in names]
    usual_ms: dict[tuple[str, str], float] = {}
    for second in range(SECONDS):
        at_ns = START_NS + (second + 1) * NS_PER_S
        epoch = rotations[0].epoch_at(at_ns)
        keys = tuple((name, peer) for name, own in zip(names, rotations, strict=True) for peer in own.peers(epoch))
        base = np.array([usual_ms.setdefault(key, 0.08 * float(np.exp(0.3 * rng.normal()))) for key in keys])
        sick = extra is not None and second >= SICK_FROM_S
        more = np.zeros(len(keys))
        if extra is not None and sick:
            more = extra(np.array([(int(a[1:]), int(b[1:])) for a, b in keys]))
        rtt = np.where(np.isfinite(more), base * np.exp(0.2 * rng.normal(size=len(keys))) + more, np.nan)
        tick = AlignedTick(at_ns, 1000, names, np.ones(NODES, dtype=bool), {"mesh": matrix(keys, rtt)})
        yield Frame(at_ns, (tick,), (report(second, at_ns, 280.0 if sick else 200.0, rng),), (), topology)


def said(extra: Extra | None) -> list[Verdict]:
    detector = MeshLinkDetector()
    return [verdict for frame in frames(extra) for verdict in detector.update(frame)]


def of(nodes: range) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
    return lambda ends: np.asarray(np.isin(ends, list(nodes)).any(axis=1))


@pytest.mark.parametrize(
    ("extra", "kind", "name"),
    [
        (lambda ends: 8.0 * of(range(70, 71))(ends), "link_slow", "n070"),
        (lambda ends: np.where(of(range(70, 71))(ends), np.inf, 0.0), "link_slow", "n070"),
        (lambda ends: 0.4 * of(range(48, 64))(ends), "subnet_slow", "leaf3"),
    ],
    ids=["a slow node", "a dead link while the job goes on", "a slow leaf"],
)
def test_what_is_sick_is_named_on_rotated_probes_too(extra: Extra, kind: str, name: str) -> None:
    verdicts = said(extra)
    assert {(v.kind, v.entity.name) for v in verdicts} == {(kind, name)}
    assert verdicts[0].window_end_ns <= START_NS + (SICK_FROM_S + 12) * NS_PER_S


def test_pairs_that_come_and_go_are_no_sign_of_anything() -> None:
    assert said(None) == []


def test_of_very_many_pairs_those_not_probed_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_MOST_PAIRS", 100)
    kept = Pairs()
    for second in range(200):
        keys = (*((f"a{i}", f"b{i}") for i in range(20)), *((f"a{i}", f"b{second}") for i in range(20, 24)))
        kept.put(START_NS + second * NS_PER_S, matrix(keys, np.full(len(keys), 0.1)))
    assert len(kept.keys) <= 20 + 4 * (RING + 2)
    assert set(keys) <= set(kept.keys)
    assert kept.known.shape == kept.idle.shape == (len(kept.keys),)


def test_a_few_pairs_are_remembered_for_ten_minutes() -> None:
    kept = Pairs()
    kept.put(START_NS, matrix((("a", "b"), ("a", "c")), np.full(2, 0.1)))
    for second in range(1, 599):
        kept.put(START_NS + second * NS_PER_S, matrix((("a", "b"),), np.full(1, 0.1)))
    assert kept.keys == (("a", "b"), ("a", "c"))
