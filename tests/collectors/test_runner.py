"""Asking the sources: those that are due, and what stands between."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collectors.base import Sample, Source, SourceError
from collectors.runner import TIMES_PER_OBSERVATION, Round
from tests.collectors.kit import bench
from trainwarden.records import Gap
from trainwarden.selfmetrics import Metrics


class Seldom(Source):
    """Says how often it was asked; every third time it has nothing."""

    name = "seldom"
    every_ticks = 3
    asked = 0

    @dataclass(frozen=True)
    class Settings:
        """None."""

    def sample(self, now_ns: int) -> Sample:
        self.asked += 1
        if self.asked == 3:
            raise SourceError("missing", "nothing")
        return Sample(gaps=(Gap(self.name, f"asked:{self.asked}"),))


class SeldomInline(Seldom):
    """The same without a thread."""

    name = "seldom_inline"
    inline = True


class EachTick(SeldomInline):
    """Asked every time."""

    every_ticks = 1


@pytest.mark.parametrize("kind", [Seldom, SeldomInline])
def test_a_source_that_is_asked_seldom_stands_by_its_word(tmp_path: Path, kind: type[Seldom]) -> None:
    source: Any = bench(tmp_path).build(kind)
    metrics = Metrics("test")
    rounds = Round([source], metrics, deadline_s=60.0)
    reasons = [[gap.reason for sample in rounds.collect(tick) for gap in sample.gaps] for tick in range(8)]
    assert reasons == [["asked:1"]] * 3 + [["asked:2"]] * 3 + [["missing"]] * 2
    assert metrics.value("tw_source_gaps_total", source=source.name, reason="asked:2") == 3
    rounds.close()


def test_how_long_a_source_took_is_told_once_for_several_times(tmp_path: Path) -> None:
    source: Any = bench(tmp_path).build(EachTick)
    metrics = Metrics("test")
    rounds = Round([source], metrics, deadline_s=60.0)
    counts = []
    for tick in range(2 * TIMES_PER_OBSERVATION + 1):
        rounds.collect(tick)
        counts.append(metrics.value("tw_source_ms_count", source="seldom_inline"))
    expected = [TIMES_PER_OBSERVATION * (tick // TIMES_PER_OBSERVATION) for tick in range(1, len(counts) + 1)]
    assert counts == expected
    rounds.close()
