"""Container logs: the runtime's forms, joined pieces, rotation and links, whose log it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.logs.cri import MAX_JOINED_BYTES, Joiner, labels_of, resolved
from collectors.sources.containerlog import ContainerLogSource
from tests.collectors.kit import Bench, bench

XID = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python, x"
POD = "/var/log/pods/train_llm-worker-3_5f0c1f/pytorch"
STAMP = "2026-01-05T10:11:12.345678901Z"


def cri(text: str, stream: str = "stdout", tag: str = "F") -> str:
    return f"{STAMP} {stream} {tag} {text}\n"


def watched(tmp_path: Path, first: str = "", **given: object) -> tuple[Bench, ContainerLogSource, Path]:
    board = bench(tmp_path)
    board.write(f"{POD}/0.log", first)
    source = board.build(ContainerLogSource, **given)
    assert isinstance(source, ContainerLogSource)
    source.poll()
    return board, source, board.root / POD.lstrip("/") / "0.log"


def add(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_pieces_of_a_long_line_are_joined_each_stream_for_itself() -> None:
    joiner = Joiner()
    lines = [cri("NVRM: X", tag="P"), cri("other", "stderr"), cri("id (PCI", tag="P"), cri(" end")]
    got = [joiner(line.rstrip("\n").encode()) for line in lines]
    assert got == [None, ("stderr", b"other"), None, ("stdout", b"NVRM: Xid (PCI end")]
    assert joiner(b"2026-01-05T10:11:12.345678901+08:00 stdout F ") == ("stdout", b"")
    assert joiner(b"2026-01-05T10:11:12.345678901Z stdout F") is None
    assert joiner(b"no runtime at all") == ("", b"no runtime at all")


def test_docker_json_is_read_too_and_what_is_broken_is_taken_as_it_is() -> None:
    joiner = Joiner()
    assert joiner(json.dumps({"log": "part", "stream": "stderr", "time": STAMP}).encode()) is None
    assert joiner(json.dumps({"log": " two\n", "stream": "stderr", "time": STAMP}).encode()) == ("stderr", b"part two")
    assert joiner(b'{"log": broken') == ("", b'{"log": broken')


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=300),
    cuts=st.lists(st.integers(1, 50), max_size=10),
)
def test_any_cutting_gives_the_line_back(text: str, cuts: list[int]) -> None:
    data, joiner, pieces = text.encode(), Joiner(), []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    raws = [f"{STAMP} stdout P ".encode() + piece for piece in pieces] + [f"{STAMP} stdout F ".encode() + data]
    assert [joined for raw in raws if (joined := joiner(raw))] == [("stdout", text.encode())]


@given(raw=st.binary(max_size=200))
def test_no_bytes_raise(raw: bytes) -> None:
    Joiner()(raw)


def test_a_line_of_ten_megabytes_in_pieces_stays_bounded() -> None:
    joiner = Joiner()
    for _ in range(640):
        joiner(f"{STAMP} stdout P ".encode() + b"x" * 16384)
    whole = joiner(f"{STAMP} stdout F end".encode())
    assert whole is not None
    assert len(whole[1]) == MAX_JOINED_BYTES


def test_events_say_whose_log_it_is(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path, first=cri(XID.format(48)))
    add(path, cri("step 1") + cri(XID.format(79)))
    source.poll()
    [(event, urgent)] = board.outlet.logs
    assert (event.code, urgent, event.source) == ("xid:79", True, "train/llm-worker-3/pytorch")
    assert {k: event.attributes[k] for k in ("namespace", "pod", "container")} == {
        "namespace": "train", "pod": "llm-worker-3", "container": "pytorch"}  # fmt: skip
    assert event.line.startswith("NVRM: Xid")


def test_a_known_line_in_pieces_is_seen(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    line = "x" * 20 + XID.format(79)
    add(path, cri(line[:24], tag="P") + cri(line[24:31], tag="P"))
    source.poll()
    add(path, cri(line[31:]))
    source.poll()
    assert board.outlet.codes == ["xid:79"]


def test_rotation_restart_and_a_new_container_lose_and_repeat_nothing(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, cri(XID.format(79)))
    source.poll()
    source._save()
    add(path, cri(XID.format(48)))
    path.rename(path.with_name("0.log.20260105-101112"))
    add(path, cri(XID.format(62)))
    add(path.with_name("1.log"), cri(XID.format(95)))
    again = board.build(ContainerLogSource)
    assert isinstance(again, ContainerLogSource)
    for _ in range(4):
        again.poll()
    assert sorted(board.outlet.codes) == ["xid:48", "xid:62", "xid:79"]
    board.clock.sleep(11)
    add(path.with_name("2.log"), cri(XID.format(46)))
    again.poll()
    again.poll()
    assert board.outlet.codes[-1] == "xid:46"


def test_a_deleted_log_is_read_to_its_end(tmp_path: Path) -> None:
    board, source, path = watched(tmp_path)
    add(path, cri(XID.format(79)))
    path.unlink()
    board.clock.sleep(11)
    source.poll()
    assert board.outlet.codes == ["xid:79"]
    assert source._followed == {}


def test_links_lead_within_the_root_and_are_followed_once(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write(f"{POD}/0.log", "")
    links = board.root / "var/log/containers"
    links.mkdir(parents=True)
    (links / f"llm-worker-3_train_pytorch-{'a' * 64}.log").symlink_to(f"{POD}/0.log")
    source = board.build(ContainerLogSource, globs=["/var/log/pods/*/*/*.log", "/var/log/containers/*.log"])
    assert isinstance(source, ContainerLogSource)
    source.poll()
    add(board.root / POD.lstrip("/") / "0.log", cri(XID.format(79)))
    source.poll()
    assert board.outlet.codes == ["xid:79"]
    circle = links / "circle.log"
    circle.symlink_to("/var/log/containers/circle.log")
    board.clock.sleep(11)
    source.poll()
    assert [gap.reason for gap in source.sample(0).gaps] == ["unreadable"]


def test_too_many_logs_are_a_gap_and_the_newest_are_followed(tmp_path: Path) -> None:
    board = bench(tmp_path)
    for n in range(5):
        board.write(f"{POD}/{n}.log", "")
        os.utime(board.root / POD.lstrip("/") / f"{n}.log", (n, n))
    source = board.build(ContainerLogSource, limit=2)
    assert isinstance(source, ContainerLogSource)
    source.poll()
    assert [Path(name).name for name in sorted(source._followed)] == ["3.log", "4.log"]
    assert [gap.reason for gap in source.sample(0).gaps] == ["over_limit:5"]


def test_our_own_log_is_left_out(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/var/log/pods/monitoring_trainwarden-collector-x_1/agent/0.log", cri(XID.format(79)))
    source = board.build(ContainerLogSource)
    assert isinstance(source, ContainerLogSource)
    source.poll()
    assert source._followed == {}


def test_a_node_without_containers_is_silent(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = board.build(ContainerLogSource)
    source.start()
    assert board.second(source).gaps == ()
    assert not source._running  # type: ignore[attr-defined]
    source.close()


def test_names() -> None:
    assert labels_of(f"/var/log/containers/p-1_ns_c-{'0' * 64}.log") == {
        "namespace": "ns",
        "pod": "p-1",
        "container": "c",
    }
    assert labels_of("/var/log/syslog") == {}
    assert resolved("/nowhere/x", "") == Path("/nowhere/x")
