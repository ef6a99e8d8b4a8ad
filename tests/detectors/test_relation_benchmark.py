"""The benchmark of node relations: what is held out stays out, half of what is slow has no bad node, and answers are marked rightly."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks.relation.__main__ import _arguments
from benchmarks.relation.episodes import Played, play
from benchmarks.relation.scenarios import (
    GROUPS,
    JOBS_AT_ONCE,
    SIZES,
    SLOTS,
    SPLITS,
    UNEQUAL,
    Scenario,
    Slot,
    allowed,
    magnitude,
    scenario,
)
from benchmarks.relation.score import Sheet, answers_at, calm_scores, figures
from collectors.simulated.faults import kinds
from detectors.relation.floors.base import named, registry, steady
from trainwarden.commands.train import FIRST_LESSON, FIRST_PROOF, LESSON_KINDS, lessons

SPLIT_FILE = Path(__file__).parents[2] / "benchmarks" / "relation" / "splits.toml"


def test_seeds_and_kinds_held_out_are_in_no_lesson() -> None:
    splits = tomllib.loads(SPLIT_FILE.read_text())
    seen = {lesson.seed for first in (FIRST_LESSON, FIRST_PROOF) for lesson in lessons(first, 12)}
    assert seen.isdisjoint({*splits["train"]["seeds"], *splits["tune"]["seeds"], *splits["test"]["seeds"]})
    assert {*splits["train"]["seeds"], *splits["tune"]["seeds"]}.isdisjoint(splits["test"]["seeds"])
    assert set(LESSON_KINDS).isdisjoint(splits["held_out_kinds"])
    tuned = {kind for names in allowed("tune").values() for kind in names}
    assert tuned.isdisjoint(splits["held_out_kinds"])
    assert not any(kinds()[kind].bad_node for kind in LESSON_KINDS), "nothing is learnt from faults of machines"


def test_half_of_all_slow_slots_have_no_bad_node_and_every_kind_comes() -> None:
    slots = [slot for size in SIZES for seed in SPLITS["test"]["seeds"] for slot in scenario("test", size, seed).slots]
    calm = [slot for slot in slots if not slot.truth]
    assert 2 * len(calm) >= sum(slot.group != "unequal" for slot in slots)
    assert {kind for slot in slots for kind in slot.kinds} == {
        kind for names in SPLITS["kinds"].values() for kind in names
    }
    assert {slot.group for slot in slots} == set(GROUPS)


def test_the_last_slot_is_a_fault_in_unequal_groups_with_the_fault_alone_as_the_answer() -> None:
    runs = [scenario("test", 128, seed) for seed in SPLITS["test"]["seeds"]]
    last = [slot for run in runs for slot in run.slots if slot.start_s == run.slots[-1].start_s]
    assert len(last) == len(runs) * JOBS_AT_ONCE[128]
    assert {slot.group for slot in last} == {"unequal"}
    assert {slot.kinds[0] for slot in last} == set(UNEQUAL)
    assert all(len(slot.truth) == 1 and slot.kinds[1] not in UNEQUAL for slot in last)


def test_a_run_of_chosen_groups_has_no_others() -> None:
    run = scenario("train", 1024, 2001, groups=("two",))
    assert [slot.group for slot in run.slots] == ["two"] * SLOTS[1024]
    assert run.name != scenario("train", 1024, 2001).name


def test_a_group_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _arguments(["--groups", "three"])
    assert "expected some of node, subnet, two, unequal, nobody" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [kind for names in SPLITS["kinds"].values() for kind in names])
def test_every_kind_is_known_and_more_slowdown_is_more_of_it(kind: str) -> None:
    assert kind in kinds()
    sizes = [magnitude(kind, "dense", slowdown) for slowdown in (1.02, 1.1, 1.5, 2.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def small() -> Played:
    slot = Slot(0, "node", ("weak_node",), 1.3, 150.0, 270.0, (("node", "n00005"),))
    made = Scenario("check", 7, 16, 16, "16:dense", ("dense",), "weak_node@n00005:150+120x1.3", (slot,), 320.0)
    return next(play(made, None))


@pytest.fixture(scope="module")
def played() -> Played:
    return small()


def test_in_group_mad_finds_a_slow_node(played: Played) -> None:
    scores = registry().get("in_group_mad_past")().score(played.episode)
    line = float(calm_scores(scores, played).max())
    sheet = Sheet("mad")
    sheet.take(played, answers_at(scores, played, line))
    assert sheet.slots[0].hit == 1
    assert sheet.slots[0].delay_s[0] <= 40


@pytest.mark.parametrize("name", registry().all())
def test_floors_look_back_only_and_score_everybody(name: str, played: Played) -> None:
    episode, floor = played.episode, registry().get(name)()
    floor.fit([episode])
    scores = floor.score(episode)
    assert scores.shape == (len(episode.node), len(episode.graph.nodes))
    assert np.isfinite(scores).all()
    cut = type(episode)(episode.graph, episode.node[:40], episode.port[:40], episode.step_ms[:40], episode.warm)
    assert floor.score(cut) == pytest.approx(scores[:40], abs=1e-3)


def test_two_thirds_of_a_rack_are_the_rack(played: Played) -> None:
    flags = np.zeros(16, dtype=np.bool_)
    flags[[0, 1, 2, 3, 4, 6, 12]] = True
    assert named(flags, played.episode.graph) == [("rack", "rack-000"), ("node", "n00012")]


def test_a_score_counts_when_it_lasts_two_rounds() -> None:
    assert steady(np.array([[9.0], [1.0], [5.0], [6.0]], dtype=np.float32)).ravel().tolist() == [0.0, 1.0, 1.0, 5.0]


def test_wrong_and_missing_answers_are_marked(played: Played) -> None:
    sheet = Sheet("x")
    sheet.take(played, [(10, "node", "n00001"), (35, "port", "n00005/2"), (36, "node", "n00009")])
    mark = sheet.slots[0]
    assert (mark.hit, mark.wrong_nodes, mark.exact) == (1, 1, False)
    assert sheet.false_isolations == 2
    assert mark.delay_s == [30.0]
    found = figures(sheet.slots)
    assert found["node_precision"] == 0.5
    assert found["node_recall"] == 1.0
