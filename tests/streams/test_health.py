"""What the worker says of itself: how far behind it is, and how long a tick takes on its way."""

from __future__ import annotations

import math

import pytest

from streams.app import lag
from streams.detect import Pipeline
from streams.stage import RawStage
from tests.streams.fingerprint import Detectors, Fingerprint
from tests.streams.synthetic import START_NS, Cluster
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_MS, NS_PER_S, SimulatedClock
from trainwarden.config import from_table
from trainwarden.records import encode
from trainwarden.selfmetrics import Metrics, quantile_ms


def test_lag_is_what_lies_on_the_broker_and_is_in_no_frame() -> None:
    ends = {"tw.ticks/0": 12, "tw.ticks/1": 5, "tw.steps/0": 7, "tw.logs/0": None}
    assert lag(ends, {"tw.ticks/0": 10, "tw.ticks/1": 5, "tw.steps/0": 9}) == {"tw.ticks": 2, "tw.steps": 0}


def test_the_way_of_a_tick_is_counted_once_it_is_published_and_falls_into_its_buckets() -> None:
    metrics = Metrics("worker")
    config = from_table({"cluster": "c"})
    pipeline = Pipeline(config, Detectors(Fingerprint), metrics)  # type: ignore[arg-type]
    stage = RawStage(config, pipeline, SimulatedClock(START_NS), "b", metrics)
    records = [*Cluster().announcements(), *Cluster().second(0)]
    stage.take(Message(topic, 0, n, b"", encode(record), 0) for n, (topic, _, record) in enumerate(records))
    result = stage.cut(START_NS + 300 * NS_PER_MS)
    assert metrics.value("tw_tick_delay_ms_count") == 0
    stage.delivered(result, START_NS + 450 * NS_PER_MS)
    assert (metrics.value("tw_tick_delay_ms_count"), metrics.value("tw_tick_delay_ms_sum")) == (1, 450.0)
    assert metrics.value("tw_tick_delay_ms_bucket", le="400") == 0
    assert metrics.value("tw_tick_delay_ms_bucket", le="500") == 1
    assert metrics.value("tw_tick_delay_ms_bucket", le="+Inf") == 1
    stage.delivered(stage.cut(START_NS + NS_PER_S), START_NS + 2 * NS_PER_S)
    assert metrics.value("tw_tick_delay_ms_count") == 1, "a frame without a tick has no way to count"


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, 100.0), (0.75, 150.0), (0.99, math.inf)],
)
def test_quantiles_of_buckets(share: float, expected: float) -> None:
    assert (
        quantile_ms(
            {100.0: 50, 200.0: 98, math.inf: 100} if share > 0.9 else {100.0: 50, 200.0: 100, math.inf: 100}, share
        )
        == expected
    )
    assert quantile_ms({}, share) is None
