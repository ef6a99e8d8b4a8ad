"""What link escape reads and writes: heartbeats, the links file, netlink, NCCL's log, and the parts of connections to end."""

from __future__ import annotations

import select
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainwarden_hook import nccl
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.beats import SIZE, BadBeat, Beat, Codec
from trainwarden_hook.moving import strict_filters
from trainwarden_hook.netlink import HEADER, LINK, RTM_DELLINK, RTM_NEWLINK, attribute, attributes, messages, parse_link
from trainwarden_hook.rail_sockets import RailSocket
from trainwarden_hook.rails import parse_rails, read_rails
from trainwarden_hook.subflows import Subflow, to_cut

BEAT = Beat(1, 0, 1, 77, 12, 345, 678, 90, 3, 2, 1, 0)


GOLDEN = "54576231616263640001000001000000000000004d000000000000000c000000000000015900000000000002a60000005a0302010022b88ab22234f997"


def test_golden_bytes_of_a_heartbeat() -> None:
    codec = Codec(b"s" * 16, b"abcd")
    assert codec.pack(BEAT).hex() == GOLDEN
    assert codec.unpack(bytes.fromhex(GOLDEN)) == BEAT


@pytest.mark.parametrize(
    ("codec", "data", "reason"),
    [
        (Codec(b"t" * 16, b"abcd"), bytes.fromhex(GOLDEN), "signature"),
        (Codec(b"s" * 16, b"abce"), bytes.fromhex(GOLDEN), "another links file"),
        (Codec(b"s" * 16, b"abcd"), bytes.fromhex(GOLDEN)[:-1], "length"),
        (Codec(b"s" * 16, b"abcd"), b"", "length"),
    ],
)
def test_what_is_no_heartbeat_of_ours_is_refused_with_a_reason(codec: Codec, data: bytes, reason: str) -> None:
    with pytest.raises(BadBeat, match=reason):
        codec.unpack(data)


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_a_heartbeat_changed_anywhere_is_refused(place: int, change: int) -> None:
    data = bytearray.fromhex(GOLDEN)
    data[place] ^= change
    with pytest.raises(BadBeat):
        Codec(b"s" * 16, b"abcd").unpack(bytes(data))


def file_of(**over: Any) -> dict[str, Any]:
    nodes = {f"n{i}": {"address": f"10.0.0.{i + 1}", "a": f"10.0.1.{i + 1}", "b": f"10.0.2.{i + 1}"} for i in range(3)}
    return {"rails": {"a": "eth0", "b": "eth1"}, "nodes": nodes, **over}


def test_the_file_as_one_node_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(
        'mptcp = true\nheartbeat_ms = 5\n[rails]\na = "eth0"\nb = "eth1"\n'
        '[nodes.n1]\naddress = "10.0.0.2"\na = "10.0.1.2"\nb = "10.0.2.2"\ninterfaces = { b = "ens9" }\n'
        '[nodes.n0]\naddress = "10.0.0.1"\na = "10.0.1.1"\nb = "10.0.2.1"\n'
    )
    rails = read_rails(str(path), "n1")
    assert (rails.own.address, rails.interfaces, rails.mptcp, rails.nodes) == (
        "10.0.0.2",
        ("eth0", "ens9"),
        True,
        ("n0", "n1"),
    )
    assert [peer.on for peer in rails.peers] == [("10.0.1.1", "10.0.2.1")]
    assert rails.tuning.heartbeat_ms == 5.0
    assert rails.digest == read_rails(str(path), "n0").digest


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"rails": {"a": "eth0"}}, "there are 1 rails, expected 2 to 8"),
        ({"rails": {"a": "eth0", "b": "eth0"}}, "two rails of node n0 are on one interface"),
        ({"rails": {"a": "eth0", "b": 7}}, "the interface of rail b is 7"),
        ({"rails": None}, r"\[rails\] is None, expected a table"),
        ({"port": "x"}, "port is 'x', expected a port"),
        ({"mptcp": 1}, "mptcp is 1, expected true or false"),
        ({"heartbeat_ms": 0}, "heartbeat_ms is 0, expected a number above 0"),
        ({"silent_beats": True}, "silent_beats is True"),
        ({"hartbeat_ms": 5}, "unknown key 'hartbeat_ms'"),
        ({"nodes": {}}, r"\[nodes\] is {}, expected a table"),
        ({"nodes": {"n1": {}}}, "node 'n0' is not among the nodes n1"),
        ({"nodes": {"n0": {"address": "10.0.0.1", "a": "10.0.1.1"}}}, "nodes.n0.b is None, expected an IPv4 address"),
        ({"nodes": {"n0": {"address": "fe80::1", "a": "10.0.1.1", "b": "10.0.2.1"}}}, "nodes.n0.address is 'fe80::1'"),
        ({"nodes": {"n0": {"adress": "10.0.0.1", "a": "10.0.1.1", "b": "10.0.2.1"}}}, "unknown key 'adress'"),
    ],
)
def test_a_bad_file_gets_one_sentence(over: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_rails(file_of(**over), "n0")


def test_an_address_used_twice_is_refused_and_a_file_that_is_none(tmp_path: Path) -> None:
    body = file_of()
    body["nodes"]["n2"]["a"] = "10.0.1.1"
    with pytest.raises(UsageError, match="belongs to both n0 and n2"):
        parse_rails(body, "n0")
    (tmp_path / "bad").write_bytes(b"[[\xff")
    for name, sentence in (("none", "cannot read the links file"), ("bad", "is no TOML")):
        with pytest.raises(UsageError, match=sentence):
            read_rails(str(tmp_path / name), "n0")


def test_a_rail_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="no rail 'c'; the rails are a, b"):
        parse_rails(file_of(), "n0").rail("c")


def link_message(flags: int, name: bytes = b"eth0\0", family: int = socket.AF_UNSPEC) -> bytes:
    return LINK.pack(family, 1, 7, flags, 0) + attribute(3, name)


@pytest.mark.parametrize(("flags", "usable"), [(0x10001, True), (0x1, False), (0x10000, False), (0, False)])
def test_a_link_is_usable_when_it_is_on_and_has_carrier(flags: int, usable: bool) -> None:
    told = parse_link(RTM_NEWLINK, link_message(flags))
    assert told is not None
    assert (told.index, told.name, told.usable) == (7, "eth0", usable)


def test_a_link_removed_is_not_usable_and_messages_of_bridges_are_not_ours() -> None:
    gone = parse_link(RTM_DELLINK, link_message(0x10001))
    assert gone is not None
    assert not gone.usable
    assert (
        parse_link(RTM_NEWLINK, link_message(0x10001, family=socket.AF_BRIDGE if hasattr(socket, "AF_BRIDGE") else 7))
        is None
    )
    assert parse_link(RTM_NEWLINK, b"short") is None


@given(st.binary(max_size=200))
def test_garbage_from_netlink_ends_in_nothing(data: bytes) -> None:
    for _, _, payload in messages(data):
        attributes(payload)
        parse_link(RTM_NEWLINK, payload)
    attributes(data)


def test_messages_one_after_the_other_with_padding() -> None:
    one = HEADER.pack(HEADER.size + 3, 16, 0, 1, 0) + b"abc\0"
    two = HEADER.pack(HEADER.size, 3, 0, 2, 0)
    assert list(messages(one + two)) == [(16, 1, b"abc"), (3, 2, b"")]
    assert attributes(attribute(1, b"abc") + attribute(0x8002, struct.pack("=I", 5))) == {
        1: b"abc",
        2: struct.pack("=I", 5),
    }


def test_only_parts_whose_connection_can_go_on_are_ended() -> None:
    def part(local: str, remote: str, token: int) -> Subflow:
        return Subflow(socket.AF_INET, local, remote, token, b"")

    first, standby = part("n0", "n1", 1), part("b0", "b1", 1)
    alone, other = part("n0", "n1", 2), part("a0", "a2", 3)
    twice = [part("n0", "n1", 4), part("a0", "a1", 4)]
    pairs = {("n0", "n1"), ("a0", "a1")}
    assert to_cut([first, standby, alone, other, *twice], pairs) == [first]


def test_strict_filters_are_found_in_all_and_in_one(tmp_path: Path) -> None:
    for name, value in (("all", "0"), ("eth0", "1"), ("eth1", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rp_filter").write_text(value)
    assert strict_filters(["eth0", "eth1", "eth9"], str(tmp_path)) == ["eth0"]
    (tmp_path / "all" / "rp_filter").write_text("1")
    assert strict_filters(["eth1", "eth9"], str(tmp_path)) == ["eth9"], "the higher of the two counts, and 2 is loose"


NCCL_LINES = [
    ("n0:71:90 [0] net.cc:1 NCCL WARN NET/IB : mlx5_1:1 Got async event : port error", "port_down", "mlx5_1"),
    ("n0:71:90 [0] NCCL WARN NET/IB : Got async event : port active", "port_up", ""),
    (
        "n0:71:88 [0] NCCL WARN NET/IB: ncclIbResiliencyX: Device 1 (devIndex=1) marked as failed. Initiating recovery",
        "moved",
        "1",
    ),
    ("n0:71:88 [0] NCCL INFO NET/IB: f: Replacing QP: qpIndex=0 (qp_num=9, devIndex=0) to qpIndex=1", "moved", "0"),
    ("n0:71:88 [0] NCCL INFO NET/IB: f: Port recovery succeeded for device 1", "returned", "1"),
    ("n0:71:88 [0] NCCL WARN NET/IB: f: Port recovery failed for device 1", "failed", "1"),
    ("n0:71:88 [0] NCCL WARN NET/IB: f: The error is fatal (No functional devices left). Cannot continue.", "lost", ""),
    ("n0:71:88 [0] NCCL WARN NET/IB: with a single device. There is no other device to fail over to.", "alone", ""),
]


@pytest.mark.parametrize(("line", "kind", "device"), NCCL_LINES)
def test_lines_of_nccl_about_ports(line: str, kind: str, device: str) -> None:
    event = nccl.parse_line(line)
    assert event is not None
    assert (event.kind, event.device) == (kind, device)


def test_other_lines_of_nccl_mean_nothing_and_settings_of_the_operator_stay() -> None:
    assert nccl.parse_line("n0:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE") is None
    assert nccl.parse_line("Port recovery succeeded, says somebody else") is None
    added = nccl.environment({"NCCL_DEBUG": "TRACE", "NCCL_IB_RESILIENCY_PORT_FAILOVER": "0"})
    assert added == {"NCCL_IB_RESILIENCY_PORT_RECOVERY": "1"}


def test_the_log_is_read_on_and_not_again(tmp_path: Path) -> None:
    old, new = tmp_path / "rank-0.err", tmp_path / "rank-1.err"
    old.write_text(NCCL_LINES[0][0] + "\n")
    tail = nccl.LogTail(str(tmp_path / "rank-*.err"))
    assert tail.read() == [], "what stood there before is another job's"
    with old.open("a") as file:
        file.write("step 1\n" + NCCL_LINES[2][0][:40])
    new.write_text(NCCL_LINES[4][0] + "\n")
    assert [event.kind for event in tail.read()] == ["returned"]
    with old.open("a") as file:
        file.write(NCCL_LINES[2][0][40:] + "\n")
    assert [event.kind for event in tail.read()] == ["moved"]
    old.write_text(NCCL_LINES[0][0] + "\n")
    assert [event.kind for event in tail.read()] == ["port_down"], "a file made anew is read from its beginning"
    old.unlink()
    assert tail.read() == []


@pytest.mark.parametrize("news", [False, True])
def test_news_wakes_the_watch_and_all_else_waits_for_its_turn(news: bool) -> None:
    rail, poll = RailSocket("127.0.0.1", 0, "lo"), select.epoll()
    codec = Codec(b"s" * 16, b"abcd")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        rail._port = free.getsockname()[1]
    assert rail.open(poll)
    assert rail.send(codec.pack(BEAT, news), "127.0.0.1")
    assert rail.send(codec.pack(BEAT, news), "127.0.0.1")
    woken = [number for number, _ in poll.poll(0)]
    assert woken == ([rail.number] if news else [])
    read = rail.read(news)
    assert [codec.unpack(data) for data, _ in read] == [BEAT, BEAT]
    assert all(0 <= waited_ns < 60_000_000_000 for _, waited_ns in read)
    assert rail.read(True) == []
    rail.close()
    poll.close()
