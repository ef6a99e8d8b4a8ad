"""The scorer of all series at once: what must hold whatever the numbers are, its stated risk, and each kind of change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.threshold.lines import Lines, LineSettings, Readings

Draw = Callable[[np.random.Generator, int], np.ndarray]
SHORT = LineSettings(risk=1e-3, warm_ticks=10, least_height=0.0)


def heavy(seed: int, ticks: int, series: int, missing: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(3, (ticks, series)).astype(np.float32)
    values[rng.random(values.shape) < missing] = np.nan
    return values


def scored(lines: Lines, values: np.ndarray, **given_too: np.ndarray) -> np.ndarray:
    """Dense scores of each tick, ticks × series."""
    out = []
    for tick, row in enumerate(values):
        extra = {name: array[tick] for name, array in given_too.items()}
        scores = lines.step(row.reshape(lines.shape), dense=True, **extra).scores
        assert scores is not None
        out.append(scores.reshape(-1).copy())
    return np.array(out)


def last(lines: Lines, values: np.ndarray) -> Readings:
    for row in values[:-1]:
        lines.step(row.reshape(lines.shape))
    return lines.step(values[-1].reshape(lines.shape), dense=True)


# --- what holds for any numbers -------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.125, 4.0, 1024.0]))
def test_unit_of_the_values_does_not_matter(seed: int, unit: float) -> None:
    values = heavy(seed, 150, 5)
    one = scored(Lines(5, 1, SHORT, floor=0.01), values)
    other = scored(Lines(5, 1, SHORT, floor=0.01 * unit), values * np.float32(unit))
    np.testing.assert_array_equal(one, other)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(-50.0, 50.0))
def test_offset_of_the_values_does_not_matter(seed: int, offset: float) -> None:
    values = heavy(seed, 120, 4)
    one = scored(Lines(4, 1, SHORT, floor=0.1), values)
    other = scored(Lines(4, 1, SHORT, floor=0.1), values + np.float32(offset))
    np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.0, 40.0, width=32), min_size=2, max_size=6))
def test_farther_is_never_less_unusual(seed: int, distances: list[float]) -> None:
    values = heavy(seed, 100, len(distances))
    values[:] = values[:, :1]
    values[-1] = np.sort(np.array(distances, np.float32)) + 10.0
    scores = last(Lines(len(distances), 1, SHORT), values).scores
    assert scores is not None
    assert (np.diff(scores[:, 0]) >= 0).all()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2]))
def test_all_series_at_once_is_each_alone(seed: int, missing: float) -> None:
    values = heavy(seed, 160, 7, missing)
    load, phase = (
        np.random.default_rng(seed).random((160, 7)).astype(np.float32),
        np.arange(160)[:, None] // 40 % 2 + np.zeros((1, 7), np.int64),
    )
    together = scored(Lines(7, 1, SHORT, phases=2), values, load=load, phase=phase)
    for number in range(7):
        only = slice(number, number + 1)
        alone = scored(Lines(1, 1, SHORT, phases=2), values[:, only], load=load[:, only], phase=phase[:, only])
        np.testing.assert_array_equal(together[:, only], alone)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = heavy(3, 120, 40)
    whole = scored(Lines(10, 4, SHORT, alike=False), values)
    monkeypatch.setattr("detectors.threshold.lines._BLOCK_SERIES", 12)
    np.testing.assert_array_equal(whole, scored(Lines(10, 4, SHORT, alike=False), values))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 140))
def test_snapshot_goes_on_exactly(seed: int, cut: int) -> None:
    values = heavy(seed, 160, 6, 0.05)
    lines = Lines(3, 2, SHORT, alike=True)
    expected = scored(lines, values)
    before, after = Lines(3, 2, SHORT, alike=True), Lines(3, 2, SHORT, alike=True)
    first = scored(before, values[:cut])
    after.restore(before.snapshot())
    np.testing.assert_array_equal(np.concatenate([first, scored(after, values[cut:])]), expected)
    assert after.snapshot() == lines.snapshot()


def test_missing_values_teach_and_say_nothing() -> None:
    values = heavy(0, 200, 3)
    lines = Lines(3, 1, SHORT)
    scored(lines, values)
    places = lines.state.places
    before = places.place.copy(), places.spread.copy(), places.seen.copy()
    readings = lines.step(np.full((3, 1), np.nan, np.float32), dense=True)
    assert readings.scores is not None
    assert np.isnan(readings.scores).all()
    assert not len(readings.beyond.row)
    for old, new in zip(before, (places.place, places.spread, places.seen), strict=True):
        np.testing.assert_array_equal(old, new)


def test_series_without_a_line_is_not_judged() -> None:
    values = heavy(0, 40, 2)
    values[:25, 1] = np.nan
    lines = Lines(2, 1, LineSettings(warm_ticks=30))
    scores = scored(lines, values)
    assert np.isnan(scores[:30, 0]).all()
    assert np.isfinite(scores[31:, 0]).all()
    assert np.isnan(scores[:, 1]).all()
    assert lines.warm().tolist() == [[True], [False]]


def test_memory_is_flat() -> None:
    values = heavy(0, 50, 8)
    lines = Lines(4, 2, SHORT)
    scored(lines, values)
    bytes_before, snapshot_before = lines.state_bytes, len(lines.snapshot())
    for _ in range(20):
        scored(lines, values)
    assert (lines.state_bytes, len(lines.snapshot())) == (bytes_before, snapshot_before)


def test_new_series_leave_the_old_ones_as_they_were() -> None:
    values = heavy(0, 120, 6)
    small, grown = Lines(3, 2, SHORT), Lines(3, 2, SHORT)
    scored(small, values[:60])
    scored(grown, values[:60])
    grown.grow(4, 3)
    grown.set_columns(3, 1e-6, 0.0, None)
    wide = np.full((60, 4, 3), np.nan, np.float32)
    wide[:, :3, :2] = values[60:].reshape(60, 3, 2)
    found = scored(grown, wide.reshape(60, 12)).reshape(60, 4, 3)
    np.testing.assert_array_equal(found[:, :3, :2].reshape(60, 6), scored(small, values[60:]))
    assert np.isnan(found[:, 3]).all()
    grown.keep(np.array([True, True, True, False]))
    assert grown.shape == (3, 3)


# --- the stated risk ------------------------------------------------------------------------------------------------------------


DRAWS: dict[str, Draw] = {
    "t3": lambda rng, n: rng.standard_t(3, n),
    "lognormal": lambda rng, n: rng.lognormal(0.0, 1.0, n),
    "laplace": lambda rng, n: rng.laplace(size=n),
}


@pytest.mark.parametrize("name", sorted(DRAWS))
def test_false_alarms_of_a_million_points_keep_to_the_risk(name: str) -> None:
    """Within a factor of three of the stated risk, on 500 series of 2,000 ticks after 3,000 to learn from."""
    risk, series, ticks, learning = 1e-3, 500, 2000, 3000
    rng = np.random.default_rng(5)
    lines = Lines(series, 1, LineSettings(risk=risk, least_height=0.0))
    alarms = 0
    for tick in range(learning + ticks):
        readings = lines.step(DRAWS[name](rng, series).astype(np.float32).reshape(series, 1))
        alarms += len(readings.beyond.row) if tick >= learning else 0
    assert risk / 3 < alarms / (series * ticks) < 3 * risk


# --- each kind of change --------------------------------------------------------------------------------------------------------


def noise(ticks: int, series: int = 3, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(10.0, 1.0, (ticks, series)).astype(np.float32)


def test_spike_is_beyond_at_once_and_only_there() -> None:
    values = noise(400)
    values[-1, 1] = 25.0
    beyond = last(Lines(3, 1), values).beyond
    assert beyond.row.tolist() == [1]
    assert beyond.side.tolist() == [0]
    assert beyond.score[0] > 5


def test_fall_is_found_on_the_other_side() -> None:
    values = noise(400)
    values[-1, 2] = -5.0
    beyond = last(Lines(3, 1), values).beyond
    assert (beyond.row.tolist(), beyond.side.tolist()) == ([2], [1])


@pytest.mark.parametrize(("shape", "most_ticks"), [(lambda t: 2.0 * (t >= 0), 40), (lambda t: 0.05 * np.maximum(t, 0.0), 90)],
                         ids=["shift of two spreads", "drift of a twentieth a tick"])  # fmt: skip
def test_shift_and_drift_within_the_line_are_found(shape: Callable[[np.ndarray], np.ndarray], most_ticks: int) -> None:
    values = noise(500)
    values[:, 0] += shape(np.arange(500.0) - 300).astype(np.float32)
    lines = Lines(3, 1)
    said = [(tick, *pair) for tick, row in enumerate(values) for pair in lines.step(row.reshape(3, 1)).shifts.tolist()]
    assert [row for _, row, _ in said] == [0]
    assert 300 < said[0][0] <= 300 + most_ticks


def test_shift_that_became_usual_settles() -> None:
    values = noise(1500)
    values[300:, 0] += 2.0
    lines = Lines(3, 1)
    settled = [tick for tick, row in enumerate(values) if len(lines.step(row.reshape(3, 1)).settled)]
    assert len(settled) == 1
    assert 350 < settled[0] < 1200


def test_load_explains_what_follows_it() -> None:
    rng = np.random.default_rng(0)
    load = np.repeat(rng.uniform(0.2, 0.9, 60), 20).astype(np.float32)
    values = (50.0 * load + rng.normal(0, 0.5, 1200)).astype(np.float32)
    with_load, without = Lines(1, 1), Lines(1, 1)
    for tick in range(1200):
        with_load.step(values[tick].reshape(1, 1), load=load[tick : tick + 1])
        without.step(values[tick].reshape(1, 1))
    assert with_load.state.places.spread[0, 0] < 0.3 * without.state.places.spread[0, 0]


def test_each_phase_has_its_own_place() -> None:
    rng = np.random.default_rng(0)
    phase = np.arange(800) // 50 % 2
    values = np.where(phase == 1, 90.0, 10.0).astype(np.float32) + rng.normal(0, 1, 800).astype(np.float32)
    lines = Lines(1, 1, phases=2)
    outs = [len(lines.step(values[t].reshape(1, 1), phase=phase[t : t + 1]).beyond.row) for t in range(800)]
    assert sum(outs[200:]) == 0
    assert lines.state.places.place[0, :, 0] == pytest.approx([10.0, 90.0], abs=1.0)


def test_what_peers_do_too_is_not_out() -> None:
    values = noise(300)
    values[-1] += 30.0
    lines = Lines(3, 1)
    for row in values[:-1]:
        lines.step(row.reshape(3, 1), common=np.zeros((3, 1), np.float32))
    assert not len(lines.step(values[-1].reshape(3, 1), common=np.full((3, 1), 30.0, np.float32)).beyond.row)


def test_load_may_excuse_a_shift_and_never_accuses() -> None:
    lines = Lines(3, 1, SHORT, floor=0.01)
    for tick in range(40):
        lines.step(np.array([[1.0], [1.0], [1.0]], np.float32) + np.float32(0.01 * (tick % 3)))
    pairs = np.array([[0, 0], [1, 0], [2, 0]])
    lines.state.shifts.walk[1, :, 0] = 50.0
    now = np.array([[1.01], [0.5], [np.nan]], np.float32)
    assert lines.apart_without_load(pairs, now, np.zeros(3, np.int64)).tolist() == [False, True, True]


def drifting_after(turns: Sequence[int], begins: int, ticks: int) -> list[int]:
    """Ticks at which a series is said to have shifted: from `begins` on it lies two spreads higher; work begins or ends at `turns`."""
    lines, rng, found = Lines(1, 1, phases=3), np.random.default_rng(5), []
    for tick in range(ticks):
        phase = np.array([sum(tick >= turn for turn in turns) % 2])
        value = np.array([[5.0 + rng.normal() + 2.0 * (tick >= begins)]], np.float32)
        found += [tick] * len(lines.step(value, phase=phase).shifts)
    return found


def test_no_shift_is_judged_until_places_are_sure_again_after_work_began_anew() -> None:
    (first,) = drifting_after([1], 600, 800)[:1]
    assert 605 <= first <= 640, "work began long ago"
    assert drifting_after([1, 500, 560], 600, 860) == []
    late = drifting_after([1, 500, 560], 900, 1000)
    assert late
    assert 905 <= late[0] <= 940, "found as soon once 300 ticks have passed"


def test_a_node_that_is_late_for_a_few_ticks_has_not_begun_anew() -> None:
    assert drifting_after([1, 550, 554], 600, 800) == drifting_after([1], 600, 800)


def smoothed(ticks_of_memory: float, ticks: int, series: int) -> np.ndarray:
    """Noise as a load average shows it: each value keeps what is left of those before. Its spread is 1."""
    rng, kept = np.random.default_rng(11), float(np.exp(-1.0 / ticks_of_memory))
    values = [rng.normal(size=series)]
    for _ in range(ticks - 1):
        values.append(kept * values[-1] + np.sqrt(1.0 - kept**2) * rng.normal(size=series))
    return np.array(values, np.float32)


def shifted(values: np.ndarray, floor: float = 1e-3) -> int:
    lines = Lines(values.shape[1], 1, floor=floor)
    return sum(len(lines.step(row[:, None]).shifts) for row in values)


def test_what_wanders_by_its_memory_has_not_shifted_and_what_has_none_is_found_as_before() -> None:
    assert shifted(smoothed(60.0, 900, 40), floor=2.0) == 0
    quick = np.random.default_rng(12).normal(size=(800, 40)).astype(np.float32)
    assert shifted(quick) == 0
    quick[600:, :8] += 2.0
    assert shifted(quick) >= 8


def test_the_present_does_not_excuse_itself() -> None:
    """A series that hardly moves and then lies elsewhere has no memory of that before a window of it has closed."""
    values = (1e-4 * np.random.default_rng(13).normal(size=(700, 4))).astype(np.float32)
    values[610:, 1] += 2.5e-3
    assert shifted(values) == 1
