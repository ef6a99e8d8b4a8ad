"""The live residual model: names the odd node and its metrics, pools peers, keeps its budget and its memory."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base import Frame
from detectors.series.pool import ROWS_PER_TICK, Pool
from detectors.series.table import node_table
from detectors.series.unusual import MOST_FEATURES, SeriesResidual
from detectors.synthetic import Scene, SyntheticCluster, node_name
from trainwarden.records import Verdict


def said(frames: list[Frame], detector: SeriesResidual | None = None) -> list[Verdict]:
    detector = detector or SeriesResidual()
    return [verdict for frame in frames for verdict in detector.update(frame)]


def test_metrics_that_no_longer_fit_are_named_and_taken_back() -> None:
    usual = {
        "cpu_busy_ratio": 0.4,
        "load1": 6.0,
        "mem_available_ratio": 0.3,
        "disk_busy_ratio": 0.4,
        "psi_io_some_ratio": 0.3,
    }
    odd = Scene(host={(1, metric): value for metric, value in usual.items()})
    frames = SyntheticCluster(seed=4).frames(480, lambda second: odd if 330 <= second < 400 else None)
    found = [v for v in said(frames) if v.entity.node == node_name(1)]
    assert [v.clears for v in found][:2] == [False, True]
    assert sum(metric in found[0].text for metric in usual) >= 2
    assert 0 < found[0].window_end_ns - found[0].onset_at_ns < 60e9


def test_the_table_is_the_same_in_any_order_of_devices() -> None:
    tick = SyntheticCluster(seed=1).frames(1)[0].ticks[0]
    turned = {
        name: type(m)(m.family, m.entities[::-1], m.metrics, m.values[::-1].copy()) for name, m in tick.families.items()
    }
    one, other = node_table(tick), node_table(type(tick)(tick.at_ns, 1000, tick.nodes, tick.present, turned))
    assert one[:2] == other[:2]
    np.testing.assert_allclose(one[2], other[2], rtol=1e-6)


def pool_of(nodes: int, features: int) -> Pool:
    return Pool.of("job", [f"f.{i:03d}_ratio" for i in range(features)])


def feed(pool: Pool, nodes: int, ticks: int, rng: np.random.Generator) -> None:
    names = [f"n{i:04d}" for i in range(nodes)]
    for _ in range(ticks):
        load = rng.normal(size=(nodes, 1))
        values = (0.5 + 0.1 * load + 0.02 * rng.normal(size=(nodes, len(pool.features)))).astype(np.float32)
        _, banded = pool.follow(names, values)
        pool.learn(banded)


def test_a_large_pool_takes_turns() -> None:
    pool, rng = pool_of(700, 6), np.random.default_rng(0)
    names = [f"n{i:04d}" for i in range(700)]
    seen: set[int] = set()
    for _ in range(3):
        rows, _ = pool.follow(names, rng.random((700, 6), dtype=np.float32))
        assert len(rows) <= ROWS_PER_TICK
        seen |= set(rows.tolist())
    assert len(seen) == 700


def test_the_fit_finds_what_the_metrics_share() -> None:
    pool, rng = pool_of(20, 6), np.random.default_rng(1)
    feed(pool, 20, 200, rng)
    pool.fit()
    assert len(pool.ranks) == len(pool.sigma)
    assert pool.vectors.shape[1] == max(pool.ranks)
    first = np.abs(pool.vectors[:, 0].reshape(-1, 6)).sum(axis=0)
    assert first.min() > 0.5 * first.max(), "the load moves all metrics alike"


def test_members_come_and_go_and_keep_their_state() -> None:
    pool = pool_of(3, 2)
    pool.follow(["a", "c"], np.array([[1, 2], [3, 4]], dtype=np.float32))
    pool.follow(["a", "b", "c"], np.array([[1, 2], [9, 9], [3, 4]], dtype=np.float32))
    assert pool.nodes == ["a", "b", "c"]
    assert pool.place[:, 0].tolist() == [1, 9, 3]
    assert pool.seen.tolist() == [2, 1, 2]


@pytest.mark.parametrize("risk", [1e-3, 1e-6])
def test_the_line_follows_the_tail(risk: float) -> None:
    pool, rng = pool_of(1, 2), np.random.default_rng(2)
    for _ in range(3000):
        score = (rng.exponential(0.3, 50) - 1.0).astype(np.float32)
        pool.follow_tail(score, score, risk)
    assert pool.limit(risk) == pytest.approx(0.3 * np.log(1 / risk) - 1.0, abs=0.6)


def test_features_are_bounded() -> None:
    assert len(SeriesResidual()._pool("job", [f"f.m{i:03d}" for i in range(200)]).features) == MOST_FEATURES
