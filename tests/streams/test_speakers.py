"""The second stage hears one collector a node, whatever partition somebody else chose to speak in its name."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from detectors.base import Frame
from streams.align import AlignSettings
from streams.merge import Merger
from streams.speakers import each_node_once, words_of
from tests.streams.synthetic import START_NS
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap, LogEvent, Record, Sheet, Summary, Tick


def summary(block: int, second: int, said: dict[str, str], value: float = 1.0) -> Summary:
    """A block whose nodes have spoken with these boot ids ("" is absent); each has two devices of one column."""
    nodes, at_ns = tuple(sorted(said)), START_NS + second * NS_PER_S
    there = [node for node in nodes if said[node]]
    heard = np.array([at_ns if said[node] else 0 for node in nodes], dtype="<i8").tobytes()
    rows = tuple((node, ("a", "b")) for node in there)
    values = np.full(2 * len(there), value, dtype="<f4").tobytes()
    return Summary(
        block=block, at_ns=at_ns, closed_at_ns=at_ns + NS_PER_S // 2, nodes=nodes, present=bytes(bool(said[n]) for n in nodes),
        sheets=(Sheet("host", ("x",), (), rows, values),) if there else (), gaps=tuple((n, (Gap(f"of {block}", "r"),)) for n in there),
        boots=tuple(said[n] for n in nodes), heard=heard,
    )  # fmt: skip


def line(node: str, boot: str, at_s: float) -> LogEvent:
    return LogEvent(
        node=node, boot_id=boot, observed_at_ns=START_NS + int(at_s * NS_PER_S), line=boot, seq=int(10 * at_s)
    )


@dataclass
class Share:
    """A unit of the second stage, fed by hand."""

    merger: Merger = field(default_factory=lambda: Merger(AlignSettings(lateness_ms=0)))
    offset: int = 0

    def hear(self, second: float, *records: Record) -> list[Frame]:
        now_ns = START_NS + int((second + 0.6) * NS_PER_S)
        for record in records:
            self.offset += 1
            self.merger.add("tw.summaries" if isinstance(record, Summary) else "tw.logs", 0, self.offset, record)
        frames = [self.merger.cut(now_ns)]
        while self.merger.more(now_ns):
            frames.append(self.merger.cut(now_ns))
        return [frame for frame in frames if frame is not None]

    def reasons(self) -> list[str]:
        return [rejected.reason for rejected in self.merger.take_rejected()]


def lines(frames: list[Frame]) -> list[str]:
    return [event.line for frame in frames for event in frame.logs]


def values_of(frame: Frame, node: str) -> list[float]:
    """Values of the node's rows, a node that is there twice would have four."""
    family = frame.ticks[0].families["host"]
    return [float(row[0]) for (name, _), row in zip(family.entities, family.values, strict=True) if name == node]


def test_a_line_in_a_nodes_name_is_refused_with_the_next_tick_of_its_collector() -> None:
    share = Share()
    for second in range(8):
        told = share.hear(
            second, summary(0, second, {"n": "true"}), line("n", "false", second + 0.1), line("n", "true", second)
        )
        assert lines(told) == ["true"]
    assert len(share.reasons()) >= 6
    assert share.reasons() == []


def test_a_collector_that_starts_again_is_heard_whole() -> None:
    share, found = Share(), []
    for second in range(10):
        boot = "old" if second < 4 else "new"
        told = share.hear(second, summary(0, second, {"n": "" if second == 4 else boot}), line("n", boot, second))
        found += lines(told)
    assert found == ["old"] * 4 + ["new"] * 6
    assert share.reasons() == []


def test_who_names_the_one_before_him_is_heard_at_once_after_a_forgery() -> None:
    share = Share()
    for second in range(3):
        share.hear(second, summary(0, second, {"n": "old"}), line("n", "false", second))
    first = replace(summary(0, 3, {"n": "new"}), succeeds=("old",))
    assert lines(share.hear(3, line("n", "new", 2.9), first)) == ["new"]


def test_an_impostor_in_another_partition_gets_no_row() -> None:
    share, frames = Share(), []
    for second in range(8):
        liar = ({"m": "other"} if second < 5 else {}) | ({"n": "false"} if second > 2 else {})
        frames += share.hear(second, summary(1, second, {"n": "true"}, 1.0), summary(0, second, liar, 66.0))
    assert [values_of(frame, "n") for frame in frames] == [[1.0, 1.0]] * 8
    assert [values_of(frame, "m") for frame in frames] == [[66.0, 66.0]] * 5 + [[]] * 3
    assert all(frame.ticks[0].present.all() for frame in frames)
    assert {gap.source for gap in frames[-1].ticks[0].gaps["n"]} == {"of 1"}
    assert any("boot false speaks as n while boot true does" in reason for reason in share.reasons())


def test_a_moment_of_silence_is_not_filled_by_an_impostor() -> None:
    share = Share()
    share.hear(0, summary(0, 0, {"n": "true"}), summary(1, 0, {"m": "other"}))
    (frame,) = share.hear(1, summary(0, 1, {"n": ""}), summary(1, 1, {"n": "false", "m": "other"}))
    assert dict(zip(frame.ticks[0].nodes, frame.ticks[0].present.tolist(), strict=True)) == {"m": True, "n": False}
    assert values_of(frame, "n") == []


def test_a_node_that_moves_to_another_partition_is_there_once_and_present() -> None:
    """Its rack was renamed: the old block still expects it for a while, whichever of the two has the lower number."""
    for old, new in ((0, 1), (1, 0)):
        share, frames = Share(), []
        for second in range(8):
            here, there = ("boot1", "") if second < 3 else ("", "boot2")
            parts = [
                summary(old, second, {"n": here}),
                summary(new, second, {"m": "other"} | ({"n": there} if there else {})),
            ]
            frames += share.hear(second, *parts)
        assert [frame.ticks[0].nodes for frame in frames] == [("m", "n")] * 8
        present = [bool(frame.ticks[0].present[1]) for frame in frames]
        assert present[:3] == [True] * 3
        assert present[6:] == [True] * 2, present
        assert share.reasons() == []


def test_summaries_of_an_older_worker_say_nobodys_word() -> None:
    parts = [summary(block, 0, {"n": "" if block else "x"}) for block in (0, 1)]
    older = [Summary(**{n: getattr(p, n) for n in p.__struct_fields__ if n not in ("boots", "heard")}) for p in parts]
    assert not [word for part in older for word in words_of(part)]
    kept = each_node_once(older, lambda node: "")
    assert [part.nodes for part in kept] == [("n",), ()]


def test_words_are_ticks_of_those_who_spoke() -> None:
    words = list(words_of(summary(3, 5, {"a": "x", "b": ""})))
    assert words == [Tick(node="a", boot_id="x", observed_at_ns=START_NS + 5 * NS_PER_S)]
