"""Pings over RDMA, what needs no library: numbers of rdma-core's header, addresses, losses in doubt, messages, round trips."""

from __future__ import annotations

import ctypes
import errno
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors import echo
from collectors.sources.rdma_mesh import changed_peers
from collectors.verbs import abi, wire
from collectors.verbs.addresses import (
    PORTS_MAX,
    Address,
    GidEntry,
    address_of,
    announced,
    announcement,
    gid_index,
    opposite,
    sender_of,
)
from collectors.verbs.doubt import DOUBT_NS, Doubt, peer_of
from collectors.verbs.library import LibraryError, NoWayError, Verbs
from collectors.verbs.probing import Pings
from collectors.verbs.silence import Silence
from collectors.verbs.window import Window
from tests.collectors.kit import FIXTURES
from trainwarden.clock import NS_PER_S

ADDRESS = Address(bytes.fromhex("fe80000000000000") + bytes(7) + b"\1", 0x1C, 0x24A, 0x7F3A9C01, "ib")


# --- the interface ----------------------------------------------------------------------------------------------------------------

STRUCTURES = {
    "ibv_sge": abi.Sge, "ibv_recv_wr": abi.RecvWr, "ibv_send_wr": abi.SendWr, "ibv_wc": abi.Wc, "ibv_global_route": abi.GlobalRoute,
    "ibv_ah_attr": abi.AhAttr, "ibv_qp_cap": abi.QpCap, "ibv_qp_init_attr": abi.QpInitAttr, "ibv_qp_attr": abi.QpAttr,
    "ibv_port_attr": abi.PortAttr, "ibv_mr": abi.Mr, "ibv_qp": abi.Qp, "ibv_comp_channel": abi.Channel, "ibv_context": abi.Context,
}  # fmt: skip
HEADER = dict(line.split() for line in (FIXTURES / "verbs" / "layout.txt").read_text(encoding="ascii").splitlines())


def place(kind: Any, path: str) -> int:
    """Offset of a field; of ``wr.ud.ah`` that of the member `ud`, which stands for the union."""
    total = 0
    for name in path.removeprefix("wr.").split("."):
        total += getattr(kind, name).offset
        kind = dict(kind._fields_)[name]
    return total


def test_structures_and_numbers_are_those_of_the_header() -> None:
    seen = 0
    for name, number in HEADER.items():
        struct_name, _, path = name.partition(".")
        if name.startswith("IBV_"):
            assert getattr(abi, name.removeprefix("IBV_")) == int(number), name
        elif struct_name == "ibv_grh":
            continue  # read by hand: below
        elif path:
            assert place(STRUCTURES[struct_name], path) == int(number), name
        else:
            assert ctypes.sizeof(STRUCTURES[struct_name]) == int(number), name
        seen += 1
    assert seen > 80
    assert (abi.GRH_BYTES, HEADER["ibv_grh.sgid"], HEADER["ibv_grh.dgid"]) == (int(HEADER["ibv_grh"]), "8", "24")


def test_every_function_that_is_called_by_name_is_exported_and_the_others_are_not() -> None:
    exported = {
        line.partition("@")[0] for line in (FIXTURES / "verbs" / "symbols.txt").read_text(encoding="ascii").split()
    }
    assert set(abi.SYMBOLS) == exported
    assert not exported & {"ibv_poll_cq", "ibv_req_notify_cq", "ibv_post_send", "ibv_post_recv"}, (
        "inline: by the context's operations"
    )


def test_a_library_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "libnone.so").write_bytes(b"\x7fELF")
    for path in ("libnowhere.so.7", str(tmp_path / "libnone.so"), "libc.so.6"):
        with pytest.raises(LibraryError, match="cannot be used"):
            Verbs(path)


# --- addresses --------------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=16), st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFF), st.integers(0, 2**31 - 1))
def test_what_is_announced_is_what_is_learnt(gid: bytes, lid: int, qpn: int, qkey: int) -> None:
    ports = {"mlx5_0/1": Address(gid, lid, qpn, qkey, "ib"), "rocep1s0.2/2": Address(gid, 0, qpn, qkey, "eth")}
    assert announced(announcement(ports)) == ports


@given(st.text(max_size=300))
def test_any_text_is_some_ports_or_none(text: str) -> None:
    assert len(announced(text)) <= PORTS_MAX
    assert address_of(text) is None or address_of(text).text() == text  # type: ignore[union-attr]


def test_ports_of_the_same_name_stand_opposite_and_never_another_kind_of_network() -> None:
    their = {f"mlx5_{i}/1": ADDRESS for i in range(1, 4)} | {"eth0/1": ADDRESS._replace(layer="eth")}
    assert opposite({"mlx5_0/1": "ib", "mlx5_2/1": "ib", "roce0/1": "eth"}, their) == {
        "mlx5_0/1": "mlx5_1/1", "mlx5_2/1": "mlx5_2/1", "roce0/1": "eth0/1"
    }  # fmt: skip
    assert opposite({"mlx5_0/1": "ib"}, {"eth0/1": ADDRESS._replace(layer="eth")}) == {}
    assert opposite({}, their) == {}


LINK, ROUTED = "fe80:0000:0000:0000:0202:c9ff:fe0a:1b2c", "fd00:0000:0000:0000:0000:0000:0000:0007"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


@pytest.mark.parametrize(
    ("layer", "table", "index"),
    [
        ("ib", [(0, LINK, "IB/RoCE v1")], 0),
        ("eth", [(0, LINK, "IB/RoCE v1"), (1, LINK, "RoCE v2"), (2, MAPPED, "IB/RoCE v1"), (3, MAPPED, "RoCE v2")], 3),
        ("eth", [(1, LINK, "RoCE v2"), (5, ROUTED, "RoCE v2")], 5),
        ("eth", [(0, LINK, "IB/RoCE v1")], 0),
        ("eth", [(1, "0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"), (7, LINK, "RoCE v2")], 7),
        ("eth", [], 0),
    ],
)
def test_which_gid_a_port_speaks_from(layer: str, table: list[tuple[int, str, str]], index: int) -> None:
    assert gid_index(layer, [GidEntry(*entry) for entry in table]) == index


@given(st.binary(max_size=48), st.integers(0, 0xFFFF), st.booleans())
def test_every_header_has_a_sender(header: bytes, slid: int, has_header: bool) -> None:
    assert sender_of(header, slid, has_header)


def test_senders_of_the_three_kinds_of_network() -> None:
    six = bytes([0x60]) + bytes(7) + ADDRESS.gid + bytes(16)
    assert sender_of(six, 28, True) == ADDRESS.gid.hex()
    assert sender_of(six, 28, False) == "lid 28"
    assert sender_of(bytes(20) + bytes([0x45]) + bytes(11) + bytes([10, 1, 2, 3, 10, 9, 9, 9]), 0, True) == "10.1.2.3"


# --- losses in doubt --------------------------------------------------------------------------------------------------------------

GOOD, LOST = (0.01, 0.02, 2.0, 0.0), (None, None, 1.0, 1.0)


def test_one_port_of_a_peer_that_is_silent_is_lost_at_once() -> None:
    assert Doubt().weigh({"n1/a/1": GOOD, "n1/b/1": LOST}, (), 0) == {"n1/a/1": GOOD, "n1/b/1": LOST}


def test_a_peer_that_is_silent_on_all_ports_is_in_doubt_until_it_answers() -> None:
    doubt = Doubt()
    assert doubt.weigh({"n1/a/1": LOST, "n1/b/1": LOST}, (), 0) == {}
    assert doubt.weigh({"n1/a/1": LOST}, (), NS_PER_S) == {}
    told = doubt.weigh({"n1/a/1": GOOD}, (), 2 * NS_PER_S)
    assert told == {"n1/a/1": (0.01, 0.02, 4.0, 2.0), "n1/b/1": (None, None, 1.0, 1.0)}
    assert doubt.weigh({"n1/a/1": GOOD}, (), 3 * NS_PER_S) == {"n1/a/1": GOOD}


def test_a_peer_that_stays_silent_is_lost_after_a_while() -> None:
    doubt = Doubt()
    doubt.weigh({"n1/a/1": LOST}, (), 0)
    assert doubt.weigh({"n1/a/1": LOST}, (), DOUBT_NS) == {"n1/a/1": (None, None, 2.0, 2.0)}
    assert doubt.weigh({"n1/a/1": LOST}, (), DOUBT_NS + 1) == {"n1/a/1": LOST}


def test_what_was_lost_to_an_agent_that_is_gone_or_begins_anew_is_forgotten() -> None:
    doubt = Doubt()
    doubt.weigh({"n1/a/1": LOST, "n2/a/1": LOST, "n3/a/1": LOST}, (), 0)
    doubt.forget("n1")
    assert doubt.weigh({"n2/a/1": LOST}, {"n2"}, 1) == {}
    doubt.keep(["n1", "n2"])
    every = {f"n{i}/a/1": GOOD for i in (1, 2, 3)}
    assert doubt.weigh(every, (), 2) == every


def test_a_row_is_a_port_and_says_of_all_peers_of_its_last_turn() -> None:
    window = Window()
    window.add({"n9/a/1": LOST}, 0)
    window.add({"n1/a/1": (0.1, 0.4, 2.0, 0.0), "n2/a/1": (0.3, 0.3, 2.0, 1.0), "n1/b/1": LOST}, 10)
    window.add({"n3/a/1": (None, None, 2.0, 2.0)}, 12)
    rows = window.rows(5)
    assert rows["a/1"] == {
        "rtt_ms": pytest.approx(0.2), "rtt_max_ms": 0.4, "lost_ratio": 0.5, "asked_peers_count": 3.0, "silent_peers_count": 1.0
    }  # fmt: skip
    assert math.isnan(rows["b/1"]["rtt_ms"])
    assert (rows["b/1"]["lost_ratio"], rows["b/1"]["silent_peers_count"]) == (1.0, 1.0)
    assert list(window.rows(11)) == ["a/1"]
    assert window.rows(13) == {}
    assert window._pings == {}


def silent(port: str, *peers: str) -> dict[str, tuple[float | None, float | None, float, float]]:
    return {f"{peer}/{port}": LOST for peer in peers}


def test_a_port_that_nobody_answers_any_more_is_told_once_and_so_is_its_return() -> None:
    silence, peers = Silence(), ("n1", "n2", "n3")
    assert silence.note({f"{peer}/{port}": GOOD for peer in peers for port in ("a/1", "b/1")}, peers) == []
    told = [silence.note(silent("a/1", *peers) | {"n1/b/1": GOOD}, peers) for _ in range(5)]
    assert told == [[], [("a/1", peers)], [], [], []]
    assert silence.note({"n2/a/1": GOOD}, peers) == [("a/1", ())]
    assert silence.note({"n2/a/1": GOOD}, peers) == []


def test_a_port_is_not_silent_while_one_peer_answers_or_only_one_ever_did() -> None:
    silence, peers = Silence(), ("n1", "n2", "n3")
    silence.note({"n1/a/1": GOOD, "n2/a/1": GOOD, "n1/b/1": GOOD}, peers)
    for _ in range(9):
        assert silence.note(silent("a/1", "n1", "n3") | {"n2/a/1": GOOD} | silent("b/1", "n1", "n2", "n3"), peers) == []
    assert silence.note(silent("a/1", "n1", "n2"), peers) == [("a/1", ("n1", "n2"))]


def test_peers_that_are_asked_no_more_do_not_count() -> None:
    silence = Silence()
    silence.note({f"n{i}/a/1": GOOD for i in range(100)}, [f"n{i}" for i in range(100)])
    for _ in range(9):
        assert silence.note(silent("a/1", "n1"), ["n1", "n100"]) == []


@pytest.mark.parametrize(("path", "peer"), [("n1/mlx5_0/1", "n1"), ("a/b/mlx5_0/1", "a/b")])
def test_the_peer_of_a_path(path: str, peer: str) -> None:
    assert peer_of(path) == peer


# --- messages ---------------------------------------------------------------------------------------------------------------------


def test_reports_and_orders_survive_the_way() -> None:
    rows: dict[str, list[float | None]] = {"n1/a/1": [0.1, 0.2, 3, 1], "n1/b/1": [None, None, 1, 1]}
    report = wire.report_of(wire.report({"a/1": ("", ADDRESS), "b/1": ("hung", None)}, rows, {"rate": 2}, 12.5))
    assert report.rails == {"a/1": ("", ADDRESS), "b/1": ("hung", None)}
    assert (report.rows["n1/b/1"], report.refused, report.problem) == ((None, None, 1.0, 1.0), {"rate": 2}, "")
    targets = {"a/1": [("n1/a/1", ADDRESS)]}
    assert wire.orders_of(wire.orders(1.5, targets)) == (1.5, targets)


def test_peers_that_are_asked_elsewhere() -> None:
    before = wire.orders(1.0, {"a/1": [("n1/a/1", ADDRESS), ("n2/a/1", ADDRESS)]})
    after = {"a/1": [("n1/a/1", ADDRESS._replace(qpn=7)), ("n2/a/1", ADDRESS), ("n3/a/1", ADDRESS)]}
    assert changed_peers(before, after) == {"n1"}
    assert changed_peers(b"", after) == set()


# --- pings, without a library -----------------------------------------------------------------------------------------------------


class Cable:
    """A port whose datagrams a test carries."""

    def __init__(self, qkey: int = 5) -> None:
        self.address = ADDRESS._replace(qkey=qkey)
        self.sent: list[bytes] = []
        self.answered: list[tuple[int, bytes]] = []
        self.waiting: list[Any] = []
        self.released = 0
        self.refuses = False

    def come(self, payload: bytes, sender: str = "x") -> None:
        self.waiting.append(type("Came", (), {"payload": payload, "sender": sender})())

    def arrivals(self) -> list[Any]:
        found, self.waiting = self.waiting, []
        return found

    def release(self, arrival: Any) -> None:
        del arrival
        self.released += 1

    def send(self, to: Address, payload: bytes) -> None:
        del to
        if self.refuses:
            raise OSError(errno.ENOBUFS, "full")
        self.sent.append(payload)

    def answer(self, arrival: Any, qkey: int, payload: bytes) -> None:
        del arrival
        self.answered.append((qkey, payload))


class Hand:
    """A clock that a test moves."""

    ns = 10**12

    def __call__(self) -> int:
        return self.ns


def pings(**settings: Any) -> tuple[Pings, Cable, Hand]:
    hand = Hand()
    return Pings(**{"timeout_s": 0.2, "answers_per_s": 50.0, **settings}, clock_ns=hand), Cable(), hand


def test_a_round_trip_is_less_what_the_peer_kept() -> None:
    own, cable, hand = pings()
    own.ask(cable, [("n1/a/1", ADDRESS)])
    asked = echo.parse(cable.sent[0])
    assert asked is not None
    assert asked.came_ns == cable.address.qkey
    cable.come(echo.reply(asked.nonce, 5_000, 5_000 + 40_000_000))
    hand.ns += 41_000_000
    own.serve(cable)
    assert own.report() == ({"n1/a/1": [1.0, 1.0, 1, 0]}, {})
    assert own.report() == ({}, {})


def test_late_and_missing_answers_are_lost_and_forged_ones_ignored() -> None:
    own, cable, hand = pings()
    own.ask(cable, [("n1/a/1", ADDRESS), ("n2/a/1", ADDRESS), ("n3/a/1", ADDRESS)])
    late = echo.parse(cable.sent[0])
    assert late is not None
    cable.come(echo.reply(b"f" * 16, 1, 2))
    hand.ns += 199_000_000
    own.serve(cable)
    assert own.report()[0] == {}
    hand.ns += 2_000_000
    cable.come(echo.reply(late.nonce, 1, 2))
    own.serve(cable)
    assert own.report()[0] == {path: [None, None, 1, 1] for path in ("n1/a/1", "n2/a/1", "n3/a/1")}


def test_a_ping_that_could_not_be_sent_is_neither_sent_nor_lost() -> None:
    own, cable, hand = pings()
    cable.refuses = True
    with pytest.raises(OSError, match="full"):
        own.ask(cable, [("n1/a/1", ADDRESS)])
    hand.ns += 10**10
    assert own.report()[0] == {}


def test_where_no_way_leads_to_is_lost_and_the_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    own, cable, hand = pings()
    there, nowhere = ADDRESS, ADDRESS._replace(lid=7)

    def send(to: Address, payload: bytes) -> None:
        if to == nowhere:
            raise NoWayError(errno.EHOSTUNREACH, "no route")
        cable.sent.append(payload)

    monkeypatch.setattr(cable, "send", send)
    own.ask(cable, [("n1/a/1", nowhere), ("n2/a/1", there)])
    assert len(cable.sent) == 1
    hand.ns += 10**10
    assert own.report()[0] == {path: [None, None, 1, 1] for path in ("n1/a/1", "n2/a/1")}


def test_a_request_from_where_no_way_leads_back_is_counted_and_the_next_one_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, cable, _ = pings()
    answer = cable.answer

    def only_known(arrival: Any, qkey: int, payload: bytes) -> None:
        if arrival.sender == "x":
            raise NoWayError(errno.EINVAL, "no such GID")
        answer(arrival, qkey, payload)

    monkeypatch.setattr(cable, "answer", only_known)
    cable.come(request(), "x")
    cable.come(request(), "y")
    own.serve(cable)
    assert (len(cable.answered), own.report()[1], cable.released) == (1, {"unreachable": 1}, 2)


def request(qkey: int = 9) -> bytes:
    return echo.FRAME.pack(echo.MAGIC, echo.REQUEST, b"n" * 16, qkey, 0)


def test_an_answer_is_as_long_as_its_request_and_goes_to_the_key_that_it_names() -> None:
    own, cable, _ = pings()
    cable.come(request(0x1234))
    own.serve(cable)
    [(qkey, payload)] = cable.answered
    assert (qkey, len(payload), cable.released) == (0x1234, len(request()), 1)
    answered = echo.parse(payload)
    assert answered is not None
    assert (answered.kind, answered.nonce) == (echo.REPLY, b"n" * 16)


ODD = (b"", b"\0" * 64, request()[:-1], request() + b"x", echo.request(b"n" * 16), request(1 << 40), request(-1))


@pytest.mark.parametrize("payload", ODD)
def test_nothing_else_is_answered(payload: bytes) -> None:
    own, cable, _ = pings()
    cable.come(payload)
    own.serve(cable)
    assert (cable.answered, own.report()[1], cable.released) == ([], {"malformed": 1}, 1)


def test_each_source_is_answered_so_often_and_no_more() -> None:
    own, cable, hand = pings(answers_per_s=5.0)
    for _ in range(20):
        cable.come(request(), "flood")
    cable.come(request(), "other")
    own.serve(cable)
    assert (len(cable.answered), own.report()[1]) == (6, {"rate": 15})
    hand.ns += 10**9
    cable.come(request(), "flood")
    own.serve(cable)
    assert len(cable.answered) == 7
