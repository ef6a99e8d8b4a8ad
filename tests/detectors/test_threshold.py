"""Lines that follow history, load, phase and peers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detectors.synthetic import Scene, SyntheticCluster
from detectors.threshold.dynamic import ThresholdDetector, ThresholdSettings
from detectors.threshold.tails import Tails
from trainwarden.policy import KINDS
from trainwarden.records import EntityKind, Reach, Verdict

Script = Callable[[int], Scene | None]


def said(script: Script, seconds: int = 120, risk: float = 1e-5) -> list[Verdict]:
    detector = ThresholdDetector(ThresholdSettings(risk=risk))
    return [v for frame in SyntheticCluster(seed=6).frames(seconds, script) for v in detector.update(frame)]


def series(verdicts: list[Verdict]) -> set[str]:
    return {v.entity.name for v in verdicts if not v.clears}


def test_series_that_leaves_history_and_peers_is_named_after_some_ticks() -> None:
    verdicts = said(lambda s: Scene(host={(1, "tcp_retrans_per_s"): 5000.0}) if s >= 90 else None)
    assert series(verdicts) == {"n1/host/host.tcp_retrans_per_s"}
    assert verdicts[0].entity.kind is EntityKind.SERIES
    assert verdicts[0].entity.node == "n1"
    assert verdicts[0].window_end_ns - verdicts[0].onset_at_ns <= 5_000_000_000


def test_what_all_peers_do_at_once_is_nobodys_anomaly() -> None:
    everybody = Scene(host={(number, "tcp_retrans_per_s"): 5000.0 for number in range(4)})
    assert said(lambda s: everybody if s >= 90 else None) == []


def test_a_spike_of_three_ticks_is_not_said() -> None:
    assert said(lambda s: Scene(host={(1, "tcp_retrans_per_s"): 5000.0}) if 90 <= s < 93 else None) == []


def test_lasting_shift_becomes_usual() -> None:
    verdicts = said(lambda s: Scene(host={(1, "disk_busy_ratio"): 0.4 + 0.01 * (s % 3)}) if s >= 90 else None, 1500)
    assert [v.clears for v in verdicts] == [False, True]


def test_verdict_only_supports_others() -> None:
    assert KINDS["threshold"].reach is Reach.CORRELATE


@pytest.mark.parametrize("risky", [1e-4, 1e-3])
def test_larger_risk_lowers_every_line(risky: float) -> None:
    tails, at = _tails()
    assert (tails.height(*at, risky) < tails.height(*at, 1e-6)).all()


def test_line_lies_where_the_tail_puts_it() -> None:
    """Exponential excesses of mean 1 over the 98 % point of either side: the line for risk q lies ln(0.04 / q) above it."""
    tails, at = _tails()
    assert tails.height(*at, 1e-4)[0] == pytest.approx(tails.level[0, 0, 0] + np.log(0.04 / 1e-4), rel=0.15)


def _tails() -> tuple[Tails, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    tails = Tails.of(1, 1)
    rng = np.random.default_rng(0)
    zero = np.zeros(1, np.int64)
    for excess in rng.exponential(1.0, 4000).astype(np.float32):
        tails.add(zero, zero, zero, np.array([excess]), np.full(1, 1e4, np.float32))
    tails.level[:] = 3.0
    return tails, (zero, zero, zero)


def test_value_that_load_explains_is_expected() -> None:
    """A metric that doubles with the load of its node is on its line in both states, once both were seen."""

    def script(second: int) -> Scene:
        busy = 0.9 if second // 20 % 2 else 0.3
        return Scene(host={(1, "cpu_busy_ratio"): busy, (1, "disk_busy_ratio"): busy / 2})

    assert "n1/host/host.disk_busy_ratio" not in series(said(script, 400))
