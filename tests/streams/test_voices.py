"""One voice a node: a collector that starts again is heard, one who only says that he is it is not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from streams.voices import HELD_LIMIT, Voices
from trainwarden.clock import NS_PER_S
from trainwarden.records import LogEvent, Record

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
