"""Who made a job stand: the rules of the hang detector, one situation each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from detectors.steps.exits import UNKNOWN_CODE, Exit, culprit_of
from detectors.steps.hang import HangDetector
from detectors.synthetic import Scene, SyntheticCluster
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

Script = Callable[[int], Scene | None]


def exit_of(node: int, code: int | str, rank: int | None = None) -> tuple[int, str, dict[str, str], int]:
    rank = node if rank is None else rank
    return node, f"worker_exit:{code}", {"rank": str(rank), "exit_code": str(code)}, rank


def said(script: Script, seconds: int = 60, nodes: int = 4) -> list[Verdict]:
    detector = HangDetector()
    return [v for frame in SyntheticCluster(nodes, seed=2).frames(seconds, script) for v in detector.update(frame)]


def spoken(verdicts: list[Verdict]) -> list[tuple[str, str]]:
    return sorted({(v.kind, v.entity.name) for v in verdicts if not v.clears})


def stands_after(second: int, *events: tuple[int, str, dict[str, str], int], attempt: int = 0) -> Script:
    def script(now: int) -> Scene | None:
        if now == second:
            return Scene(standing=True, log_events=list(events), attempt=attempt)
        return Scene(standing=True, attempt=attempt) if now > second else None

    return script


def test_killed_rank_is_named_within_a_second_of_its_end() -> None:
    verdicts = said(stands_after(20, exit_of(2, -9), exit_of(0, 1), exit_of(1, 1), exit_of(3, 1)))
    assert spoken(verdicts) == [("rank_killed", "n2")]
    assert verdicts[0].rank == 2
    assert verdicts[0].window_end_ns - verdicts[0].onset_at_ns < NS_PER_S
    assert set(verdicts[0].victims) == {"n0", "n1", "n3"}


def test_victim_whose_end_is_heard_first_is_not_blamed() -> None:
    assert spoken(said(stands_after(20, exit_of(0, 1), exit_of(2, -9)))) == [("rank_killed", "n2")]


def test_rank_that_fails_by_itself_before_the_others_is_named() -> None:
    verdicts = said(stands_after(20, exit_of(1, 1), exit_of(0, 1), exit_of(2, 1)))
    assert spoken(verdicts) == [("rank_killed", "n1")]
    assert verdicts[0].confidence < 0.9


@pytest.mark.parametrize("code", [-15, 0])
def test_ranks_that_were_told_to_stop_are_no_culprits(code: int) -> None:
    def script(now: int) -> Scene | None:
        if now == 20:
            return Scene(standing=True, log_events=[exit_of(n, code) for n in range(4)])
        return Scene(standing=now < 25, attempt=1) if now > 20 else None

    assert spoken(said(script)) == []


def test_a_slow_restart_after_an_ordered_stop_blames_nobody() -> None:
    """No new attempt for a minute: the launcher is slow, nobody was killed."""
    assert spoken(said(stands_after(20, *(exit_of(n, -15) for n in (3, 0, 1, 2))), 90)) == []


def test_one_rank_that_somebody_terminated_is_named_when_no_restart_follows() -> None:
    verdicts = said(stands_after(20, exit_of(2, -15), exit_of(0, 1), exit_of(1, 1)), 60)
    assert spoken(verdicts) == [("rank_killed", "n2")]


def test_launcher_that_kills_a_frozen_rank_does_not_make_it_a_killed_one() -> None:
    def script(now: int) -> Scene | None:
        if now == 26:
            return Scene(standing=True, log_events=[exit_of(1, -9), *(exit_of(n, -15) for n in (0, 2, 3))])
        if now > 26:
            return Scene(attempt=1, standing=now < 34)
        return Scene(states={1: 4}, standing=True) if now >= 20 else None

    verdicts = said(script)
    assert spoken(verdicts) == [("rank_frozen", "n1")]
    assert any(v.clears and v.attempt == 1 for v in verdicts)


def test_failed_rounds_of_a_restart_belong_to_the_first_failure() -> None:
    def script(now: int) -> Scene | None:
        if now == 20:
            return Scene(standing=True, log_events=[exit_of(2, -9), exit_of(0, 1)])
        if now in (28, 36):
            return Scene(standing=True, attempt=now // 12, log_events=[exit_of(n, 1) for n in (3, 0, 1)])
        return Scene(standing=now < 45, attempt=0 if now < 24 else 2 if now < 32 else 3) if now > 20 else None

    assert spoken(said(script)) == [("rank_killed", "n2")]


def test_second_kill_after_the_restart_is_said_again() -> None:
    def script(now: int) -> Scene | None:
        if now in (20, 45):
            return Scene(standing=True, attempt=now // 45, log_events=[exit_of(2, -9)])
        return Scene(standing=20 < now < 25 or now > 45, attempt=int(now > 22))

    killed = [v for v in said(script) if v.kind == "rank_killed" and not v.clears]
    assert [v.attempt for v in killed] == [0, 1]


def test_frozen_process_is_named_within_five_seconds() -> None:
    verdicts = said(lambda now: Scene(states={3: 4}, standing=True) if now >= 20 else None, 40)
    first = verdicts[0]
    assert (first.kind, first.entity.name, first.rank) == ("rank_frozen", "n3", 3)
    assert first.window_end_ns - first.onset_at_ns < 5 * NS_PER_S


def test_stop_of_one_second_is_a_hiccup() -> None:
    assert said(lambda now: Scene(states={3: 4}, standing=True) if now == 20 else None, 40) == []


def test_silent_node_in_a_standing_job_is_lost() -> None:
    assert spoken(said(lambda now: Scene(silent={3}, standing=True) if now >= 20 else None, 34)) == [
        ("node_lost", "n3")
    ]


def test_silent_node_in_a_job_that_goes_on_lost_its_telemetry_only() -> None:
    verdicts = said(lambda now: Scene(silent={3}) if 20 <= now < 40 else None)
    assert spoken(verdicts) == [("telemetry_lost", "n3")]
    assert verdicts[-1].clears


def test_a_node_that_was_absent_at_first_is_followed_from_its_first_tick() -> None:
    """Its collector started a second after the others, as in every job that starts: it is missed like any other."""
    late = lambda now: Scene(silent={3}) if now < 3 or 20 <= now < 40 else None  # noqa: E731
    verdicts = said(late)
    assert spoken(verdicts) == [("telemetry_lost", "n3")]
    assert verdicts[-1].clears


def test_failures_behind_a_silent_node_blame_the_node() -> None:
    def script(now: int) -> Scene | None:
        events = [exit_of(0, 1), exit_of(1, 1)] if now == 21 else []
        return Scene(silent={3}, standing=True, log_events=events) if now >= 20 else None

    assert ("node_lost", "n3") in spoken(said(script, 40))
    assert not any(kind == "rank_killed" for kind, _ in spoken(said(script, 40)))


def test_when_everybody_is_silent_nobody_is_lost() -> None:
    assert spoken(said(lambda now: Scene(silent={0, 1, 2, 3}, standing=True) if now >= 20 else None, 60)) == []


def test_job_that_stands_without_a_culprit_hangs_after_its_patience() -> None:
    verdicts = said(lambda now: Scene(standing=True) if now >= 20 else None, 50)
    assert spoken(verdicts) == [("job_hang", "synthetic")]
    assert verdicts[0].value >= 15


def test_long_evaluation_is_no_hang() -> None:
    assert said(lambda now: Scene(standing=True, phase="eval") if 20 <= now < 100 else None, 110) == []


def test_one_busy_process_among_waiting_ones_is_the_frozen_one() -> None:
    script: Script = lambda now: Scene(standing=True, cpu_cores={2: 1.0}) if now >= 20 else None  # noqa: E731
    assert spoken(said(script, 50)) == [("rank_frozen", "n2")]


def test_process_that_is_gone_without_a_report_was_killed() -> None:
    assert spoken(said(lambda now: Scene(standing=True, states={2: 0}) if now >= 20 else None, 30)) == [
        ("rank_killed", "n2")
    ]


def test_culprit_of_a_finished_job_is_nobody() -> None:
    assert culprit_of([Exit(0, "n0", 0, 1, 1), Exit(1, "n1", 1, 2, 2)]) is None


def test_unknown_codes_are_judged_by_time() -> None:
    found = culprit_of([Exit(1, "n1", UNKNOWN_CODE, 9, 9), Exit(2, "n2", UNKNOWN_CODE, 3, 9)])
    assert found is not None
    assert found.node == "n2"


def test_abort_after_another_failure_is_a_consequence() -> None:
    found = culprit_of([Exit(1, "n1", 1, 1, 1), Exit(2, "n2", -6, 3, 3)])
    assert found is not None
    assert found.node == "n1"
