"""The journal: the export format in pieces and broken, the place over restarts, a child that ends."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.logs.journal import MAX_FIELD_BYTES, Entry, JournalReader
from collectors.sources.journal import JournalSource
from tests.collectors.kit import Bench, bench


def exported(fields: dict[str, bytes]) -> bytes:
    """An entry as journalctl writes it."""
    out = b""
    for name, value in fields.items():
        plain = b"\n" not in value and all(byte >= 32 or byte == 9 for byte in value)
        size = len(value).to_bytes(8, "little")
        out += name.encode() + (b"=" + value if plain else b"\n" + size + value) + b"\n"
    return out + b"\n"


NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,20}", fullmatch=True)
ENTRIES = st.lists(st.dictionaries(NAMES, st.binary(max_size=200), min_size=1, max_size=6), max_size=5)


@settings(max_examples=40, deadline=None)
@given(entries=ENTRIES, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_entries_in_any_pieces(entries: list[dict[str, bytes]], cuts: list[int]) -> None:
    data, reader, got, at, turn = b"".join(map(exported, entries)), JournalReader(), list[Entry](), 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        got += reader.feed(data[at : at + step])
        at, turn = at + step, turn + 1
    assert [entry.fields for entry in got] == entries
    assert reader.broken == 0


@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(st.binary(max_size=300), max_size=10))
def test_rubbish_never_raises_and_what_follows_an_empty_line_is_read(pieces: list[bytes]) -> None:
    reader = JournalReader()
    for piece in pieces:
        reader.feed(piece)
    fresh = JournalReader()
    fresh.feed(b"not a field\nA=1\n\n")
    assert fresh.broken == 1
    assert fresh.feed(exported({"MESSAGE": b"x"}))[0].fields == {"MESSAGE": b"x"}


def test_a_huge_field_is_cut_and_the_next_one_is_whole() -> None:
    reader = JournalReader()
    data = exported({"MESSAGE": b"\n" + b"x" * 5_000_000, "_PID": b"7"})
    got = [entry for at in range(0, len(data), 100_000) for entry in reader.feed(data[at : at + 100_000])]
    assert [len(got[0].fields["MESSAGE"]), got[0].text("_PID")] == [MAX_FIELD_BYTES, "7"]
    assert reader.feed(b"MESSAGE=" + b"y" * 10_000_000 + b"\n\n")[0].text("MESSAGE").startswith("yyy")
    assert len(reader._buffer) == 0


def test_a_size_that_no_field_has_is_a_broken_stream() -> None:
    reader = JournalReader()
    assert reader.feed(b"MESSAGE\n" + b"\xff" * 8 + b"\n\n") == []
    assert reader.broken == 1


def journal(tmp_path: Path, **given: object) -> tuple[Bench, JournalSource]:
    board = bench(tmp_path)
    source = board.build(JournalSource, follow=True, **given)
    assert isinstance(source, JournalSource)
    return board, source


XID = b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python, GPU has fallen off the bus."


def test_known_lines_become_events_of_their_unit_and_the_place_is_kept(tmp_path: Path) -> None:
    board, source = journal(tmp_path)
    source.take(
        exported(
            {
                "__CURSOR": b"s=1;i=5",
                "__REALTIME_TIMESTAMP": b"1700000000000000",
                "_TRANSPORT": b"kernel",
                "MESSAGE": XID,
            }
        )
    )
    source.take(exported({"__CURSOR": b"s=1;i=6", "_SYSTEMD_UNIT": b"kubelet.service", "MESSAGE": b"nothing"}))
    [(event, urgent)] = board.outlet.logs
    assert (event.source, event.code, urgent) == ("journal/kernel", "xid:79", True)
    source._save()
    again = board.build(JournalSource, follow=True, matches=["_TRANSPORT=kernel"])
    assert isinstance(again, JournalSource)
    assert again.command()[-4:] == ["-n", "all", "--after-cursor=s=1;i=6", "_TRANSPORT=kernel"]
    again._refusals = 2
    assert "--since=@1700000000.000000" in again.command()


def test_without_a_place_only_what_comes_is_read(tmp_path: Path) -> None:
    _, source = journal(tmp_path, directory="/host/var/log/journal")
    assert source.command()[-3:] == ["--directory=/host/var/log/journal", "-n", "0"]


def test_a_message_of_many_lines_is_one_failure(tmp_path: Path) -> None:
    board, source = journal(tmp_path)
    lines = 'Traceback (most recent call last):\n  File "/srv/a.py", line 3, in f\nValueError: no\n'
    source.take(exported({"SYSLOG_IDENTIFIER": b"train", "MESSAGE": lines.encode()}))
    board.clock.sleep(3)
    source._settle()
    [(event, _)] = board.outlet.logs
    assert (event.code, event.attributes["exception"]) == ("traceback", "ValueError")


def test_a_child_that_ends_is_told_and_started_again_behind_the_last_entry(tmp_path: Path) -> None:
    data = tmp_path / "entry"
    data.write_bytes(exported({"__CURSOR": b"s=1;i=9", "_TRANSPORT": b"kernel", "MESSAGE": XID}))
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {data}\necho "no more" >&2\nexit 3\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    board, source = journal(tmp_path, command=str(program))
    source._turn()  # starts and reads
    waited: list[float] = []

    def note(seconds: float) -> bool:
        waited.append(seconds)
        return False

    source._worker.wait = note  # type: ignore[method-assign]
    while not waited:
        source._turn()
    assert [gap.reason for gap in source.sample(0).gaps] == ["child_ended:3"]
    assert waited == [1.0]
    source._turn()
    source._end_child()
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith("-n 0")
    assert second.endswith("--after-cursor=s=1;i=9")
    assert board.outlet.codes == ["xid:79"]


def test_no_journalctl_is_a_gap_with_a_pause(tmp_path: Path) -> None:
    _, source = journal(tmp_path, command=str(tmp_path / "none"))
    assert not source._begin()
    assert [gap.reason for gap in source.sample(0).gaps] == ["missing"]
    assert not source._begin()
    assert source._backoff_s == 2.0


def test_it_is_off_by_default(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = board.build(JournalSource)
    before = threading.active_count()
    source.start()
    assert threading.active_count() == before
    assert source.sample(0).gaps == ()
    source.close()
