"""How probable a foretelling is: the law, its table, and the fit that writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.foretell import Forecast, fitted, write_table
from detectors.series import reliability as law
from detectors.series.reliability import Signs, probability


def test_what_has_come_far_or_is_close_to_its_limit_is_likelier_to_reach_it() -> None:
    far = [probability(Signs(done, 0.3, again=False)) for done in (0.0, 0.3, 0.6, 1.0)]
    soon = [probability(Signs(0.3, share, again=False)) for share in (1.0, 0.3, 0.1, 0.0)]
    assert far == sorted(far)
    assert soon == sorted(soon)


def test_a_trend_that_was_taken_back_and_is_still_far_from_its_limit_is_likely_to_stall_again() -> None:
    assert probability(Signs(0.3, 0.3, again=True)) < probability(Signs(0.3, 0.3, again=False))
    assert probability(Signs(1.0, 0.0, again=True)) > 0.75


def test_nobody_is_quite_sure() -> None:
    assert 0 < probability(Signs(0.0, 1e9, again=True)) < probability(Signs(1.0, 0.0, again=True)) < 1


def test_a_table_of_other_terms_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_table({"one": 1.0, "luck": 2.0}, tmp_path / law.TABLE, "nobody")
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"has the terms \['luck', 'one'\], expected .*fit it anew"):
        law.weights.__wrapped__()


def test_the_fit_finds_the_law_that_made_the_outcomes() -> None:
    rng = np.random.default_rng(0)
    signs = [Signs(float(rng.random()), float(rng.random()), bool(rng.random() < 0.4)) for _ in range(4000)]
    true = {"one": -1.0, "done": 2.0, "log_time": -0.5, "again": -2.0, "again_done": 3.0}
    chance = [1 / (1 + np.exp(-sum(true[n] * v for n, v in s.terms().items()))) for s in signs]
    found = fitted([Forecast(s, 0.5, bool(rng.random() < c)) for s, c in zip(signs, chance, strict=True)])
    assert found == pytest.approx(true, abs=0.5)
