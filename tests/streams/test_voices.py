"""One voice a node: a collector that starts again is heard, one who only says that he is it is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from streams.voices import HELD_LIMIT, Voices
from trainwarden.clock import NS_PER_S
from trainwarden.records import LogEvent, Record, Tick

START_NS = 10**18


@dataclass(frozen=True)
class Item:
    record: Record


def said(boot: str, at_s: float, node: str = "n") -> Item:
    return Item(
        LogEvent(node=node, boot_id=boot, observed_at_ns=START_NS + int(at_s * NS_PER_S), line=f"{boot}@{at_s:g}")
    )


class Ear:
    """Voices with a note of what was heard and refused."""

    def __init__(self) -> None:
        self.voices: Voices[Item] = Voices()
        self.lines: list[str] = []
        self.reasons: list[str] = []

    def hear(self, at_s: float, *items: Item) -> list[str]:
        admitted, refused = self.voices.admit(items, START_NS + int(at_s * NS_PER_S))
        told = [item.record.line for item in admitted if isinstance(item.record, LogEvent)]
        self.lines += told
        self.reasons += [reason for _, reason in refused]
        return told


def test_an_impostor_is_refused_with_the_next_word_of_the_true_one() -> None:
    ear = Ear()
    ear.hear(0, said("true", 0))
    assert ear.hear(0.5, said("false", 0.5)) == []
    assert ear.hear(1, said("true", 1)) == ["true@1"]
    assert len(ear.reasons) == 1
    assert "boot false speaks as n while boot true does" in ear.reasons[0]


def test_an_impostor_who_dates_his_words_ahead_gets_nothing_either() -> None:
    ear = Ear()
    for second in range(100):
        ear.hear(second, said("true", second), said("false", second + 3600))
    assert len(ear.lines) == 100
    assert not any("false" in line for line in ear.lines)


def test_a_collector_that_starts_again_is_heard_and_nothing_of_it_is_lost() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    for tenth in range(5, 40):
        ear.hear(tenth / 10, *([said("new", tenth / 10)] if tenth % 10 == 5 else []))
    assert ear.lines == ["old@0", "new@0.5", "new@1.5", "new@2.5", "new@3.5"]
    assert ear.reasons == []


def test_what_the_old_one_had_kept_is_sent_by_the_new_one_and_counts() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    ear.hear(10, said("new", 10))
    assert ear.hear(10.1, said("old", 1), said("old", 2)) == ["old@1", "old@2"]
    ear.hear(11, said("new", 11))
    assert ear.hear(12, said("old", 3)) == ["old@3"]
    assert ear.hear(13, said("new", 13)) == ["new@13"]
    assert ear.lines.count("new@10") == 1
    assert ear.reasons == []


def test_of_a_backlog_both_are_heard_at_once() -> None:
    ear = Ear()
    backlog = [said("old", second) for second in range(100)] + [
        said("new", 100 + second) for second in range(HELD_LIMIT + 100)
    ]
    ear.hear(1000, *backlog)
    assert len(ear.lines) == len(backlog)
    assert ear.reasons == []


def test_who_got_a_node_in_a_moment_of_silence_loses_it_when_the_true_one_speaks_on() -> None:
    ear = Ear()
    ear.hear(0, said("true", 0))
    ear.hear(3, said("false", 3))
    assert ear.hear(4, said("true", 4)) == ["true@4"]
    assert ear.hear(5, said("false", 5)) == []
    assert ear.hear(8, said("false", 8)) == [], "who was found out once waits longer than a moment"
    assert ear.hear(9, said("true", 9)) == ["true@9"]


def test_many_impostors_take_turns_and_the_others_wait_in_no_memory() -> None:
    ear = Ear()
    ear.hear(0, said("true", 0))
    ear.hear(0.1, *(said(f"false{number}", 0.1) for number in range(1000)), *(said("false0", 0.2) for _ in range(1000)))
    assert len(list(ear.voices.held())) == HELD_LIMIT
    ear.hear(1, said("true", 1))
    assert ear.lines == ["true@0", "true@1"]
    assert len(ear.reasons) == 2000


@pytest.mark.parametrize("node", ["", "n"])
def test_records_of_nobody_count(node: str) -> None:
    ear = Ear()
    assert len(ear.hear(0, *(Item(LogEvent(node=node, line="x")) for _ in range(2)))) == 2


def test_a_worker_whose_clock_is_set_back_still_hands_over() -> None:
    ear = Ear()
    ear.hear(3600, said("old", 0))
    ear.hear(1, said("new", 1))
    assert ear.hear(3.1) == ["new@1"]


def test_who_waits_still_does_after_a_restart_of_the_worker() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    ear.hear(0.5, said("new", 0.5))
    successor = Ear()
    successor.voices.restore(ear.voices.snapshot(), list(ear.voices.held()))
    assert successor.hear(1) == []
    assert successor.hear(2.1) == ["new@0.5"]


def next_of(before: str, boot: str, at_s: float) -> Item:
    """The first word of a collector that names the one before it."""
    return Item(Tick(node="n", boot_id=boot, observed_at_ns=START_NS + int(at_s * NS_PER_S), succeeds=before))


def boots(ear: Ear, at_s: float, *items: Item) -> list[str]:
    admitted, refused = ear.voices.admit(items, START_NS + int(at_s * NS_PER_S))
    ear.reasons += [reason for _, reason in refused]
    return [item.record.boot_id for item in admitted]


def test_who_names_the_one_before_him_is_heard_at_once_even_where_somebody_has_lied() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0), said("false", 0))
    ear.hear(0.5, said("old", 0.5))
    assert ear.hear(1, said("new", 1)) == []
    assert boots(ear, 1.2, next_of("old", "new", 1.2)) == ["new", "new"]
    assert sorted(ear.hear(1.3, said("old", 0.9), said("new", 1.3))) == ["new@1.3", "old@0.9"]
    assert len(ear.reasons) == 1


def test_a_claim_does_not_keep_the_true_successor_out() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    ear.hear(0.5, said("false", 0.5))
    assert boots(ear, 1, next_of("old", "new", 1)) == ["new"]
    assert len(ear.reasons) == 1


def test_a_node_that_was_lost_in_a_silence_is_taken_back_by_the_true_successor_and_kept() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    assert ear.hear(3, said("false", 3)) == ["false@3"]
    assert boots(ear, 5, next_of("old", "new", 5)) == ["new"]
    for second in range(6, 30):
        assert ear.hear(second, said("false", second)) == []
        assert boots(ear, second + 0.5, next_of("old", "new", second)) == ["new"]
    assert len(ear.reasons) == 24


def test_whoever_names_somebody_else_proves_nothing() -> None:
    ear = Ear()
    ear.hear(0, said("old", 0))
    for name in ("older", "false", ""):
        assert boots(ear, 1, next_of(name, "false", 1)) == []
    assert boots(ear, 2, next_of("x", "old", 2)) == ["old"]


def test_several_starts_in_one_backlog_follow_each_other() -> None:
    ear = Ear()
    ear.hear(0, said("a", 0))
    assert boots(ear, 9, next_of("c", "d", 3), next_of("b", "c", 2), next_of("a", "b", 1)) == ["b", "c", "d"]
