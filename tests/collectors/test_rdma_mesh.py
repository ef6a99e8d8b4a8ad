"""Pings over RDMA, over a stand-in for libibverbs: ports, the threads of the child, two nodes with a child each, the source."""

from __future__ import annotations

import errno
import json
import select
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectors.nvidia.parent import Process
from collectors.sources.mesh import MeshSource
from collectors.sources.rdma_mesh import LOOK_NS, REST_NS, RdmaMeshSource
from collectors.topology.rotation import RDMA_SHARE_PER_S, probes_per_peer_s
from collectors.verbs import child, wire
from collectors.verbs.addresses import Address, announcement
from collectors.verbs.doubt import DOUBT_NS
from collectors.verbs.library import Verbs
from collectors.verbs.port import SLOT_BYTES, SLOTS, Port, Wanted
from collectors.verbs.probing import Pings
from collectors.verbs.rail import Rail
from tests.collectors.kit import FIXTURES, Bench, bench, devices, values
from tests.collectors.test_verbs import ADDRESS, MAPPED
from tests.collectors.verbs_stub import ACTIVE, COMPILER, DOWN, ETHERNET, HANG, INFINIBAND, Fabric, built, layout
from tests.collectors.waiting import until

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler: the stand-in for libibverbs cannot be built"
)
PATIENCE_S = 30.0


@needs_compiler
def test_the_stand_in_has_the_layout_of_the_header() -> None:
    assert layout() == (FIXTURES / "verbs" / "layout.txt").read_text(encoding="ascii")


# --- ports, over the stand-in -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """A file of its own, and a copy of the library: it maps the file once."""
    made = Fabric()
    monkeypatch.setenv("VERBS_STUB_STATE", str(made.path))
    yield made
    made.close()


def library(fabric: Fabric) -> Verbs:
    own = fabric.path.with_name("libown.so")
    own.write_bytes(built().read_bytes())
    return Verbs(str(own))


def pair(fabric: Fabric, layer: int = INFINIBAND, index: int = 0) -> tuple[Port, Port]:
    for name in ("d0", "d1"):
        fabric.add(name, layer, index)
    verbs = library(fabric)
    return Port(verbs, Wanted("d0", 1, index, 77)), Port(verbs, Wanted("d1", 1, index, 78))


def woken(port: Port, milliseconds: int = 10_000) -> bool:
    poll = select.poll()
    poll.register(port.fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def settle(port: Port, own: Pings) -> None:
    assert woken(port)
    port.listen()
    own.serve(port)


@needs_compiler
@pytest.mark.parametrize(("layer", "index"), [(INFINIBAND, 0), (ETHERNET, 3)], ids=["InfiniBand", "RoCE"])
def test_two_ports_ping_each_other(fabric: Fabric, layer: int, index: int) -> None:
    one, two = pair(fabric, layer, index)
    asking, answering = Pings(30.0, 500.0), Pings(30.0, 500.0)
    for turn in range(3 * SLOTS):  # more often than there are slots: they are given back
        asking.ask(one, [("n1/d0/1", two.address)])
        settle(two, answering)
        settle(one, asking)
        if turn == 0:
            assert fabric.made("create_ah", "d0") == fabric.made("create_ah_from_wc", "d1") == 1
    rows, refused = asking.report()
    assert (rows["n1/d0/1"][2:], refused) == ([3 * SLOTS, 0], {})
    assert fabric.made("create_ah", "d0") == fabric.made("create_ah_from_wc", "d1") == 1, (
        "the kernel is asked once for each peer"
    )
    assert fabric.made("post_recv", "d1") == 4 * SLOTS
    one.close()
    two.close()


@needs_compiler
def test_a_peer_to_whom_no_way_leads_does_not_cost_the_port(fabric: Fabric) -> None:
    one, two = pair(fabric, ETHERNET, 3)
    asking, answering = Pings(30.0, 500.0), Pings(30.0, 500.0)
    fabric.code("create_ah", errno.EHOSTUNREACH, "d0")
    asking.ask(one, [("n1/d0/1", two.address)])
    assert fabric.made("post_send", "d0") == 0
    fabric.code("create_ah", 0, "d0")
    fabric.code("create_ah_from_wc", errno.EINVAL, "d1")
    asking.ask(one, [("n1/d0/1", two.address)])
    settle(two, answering)
    assert answering.report()[1] == {"unreachable": 1}
    fabric.code("create_ah_from_wc", 0, "d1")
    asking.ask(one, [("n1/d0/1", two.address)])
    settle(two, answering)
    settle(one, asking)
    assert asking.report()[0]["n1/d0/1"][2:] == [1, 0]
    one.close()
    two.close()


@needs_compiler
def test_a_stranger_without_the_key_is_not_heard(fabric: Fabric) -> None:
    one, two = pair(fabric)
    asking, answering = Pings(30.0, 500.0), Pings(30.0, 500.0)
    asking.ask(one, [("n1/d0/1", two.address._replace(qkey=1)), ("n1/d0/1", two.address._replace(qpn=0xFFFF))])
    asking.ask(one, [("n1/d0/1", two.address)])
    settle(two, answering)
    settle(one, asking)
    assert fabric.made("post_send", "d1") == 1
    one.close()
    two.close()


@needs_compiler
def test_more_datagrams_than_there_is_room_for_are_dropped_and_none_is_cut_or_mixed_up(fabric: Fabric) -> None:
    one, two = pair(fabric)
    for number in range(SLOTS + 9):
        one.send(two.address, bytes([number]) * 64)
    assert woken(two)
    two.listen()
    seen: list[int] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(seen) < SLOTS and time.monotonic() < deadline_s:
        for arrival in two.arrivals():
            assert len(set(arrival.payload)) == 1
            assert len(arrival.payload) == 64
            seen.append(arrival.payload[0])
            if len(seen) > 8:
                two.release(arrival)
    assert seen[:SLOTS] == list(range(SLOTS))
    one.close()
    two.close()


@needs_compiler
def test_what_is_longer_than_any_ping_ends_the_port(fabric: Fabric) -> None:
    """A completion with an error status leaves a queue pair in a state that only a new one mends."""
    one, two = pair(fabric)
    one.send(two.address, b"x" * (SLOT_BYTES - 20))
    assert woken(two)
    with pytest.raises(OSError, match="receiving ended with status"):
        two.arrivals()
    one.close()
    two.close()


@needs_compiler
@pytest.mark.parametrize(
    "call",
    [
        "open_device",
        "query_port",
        "query_gid",
        "alloc_pd",
        "reg_mr",
        "create_comp_channel",
        "create_cq",
        "create_qp",
        "modify_qp",
        "post_recv",
        "req_notify_cq",
    ],
)
def test_a_port_that_cannot_be_opened_says_why_and_leaves_nothing_open(fabric: Fabric, call: str) -> None:
    fabric.add("d0")
    fabric.code(call, errno.EACCES)
    verbs = library(fabric)
    with pytest.raises(PermissionError, match=f"ibv_{call}|Permission"):
        Port(verbs, Wanted("d0", 1, 0, 7))
    opened, closed = fabric.made("open_device"), fabric.made("close_device")
    assert closed == (0 if call == "open_device" else opened)


@needs_compiler
def test_a_port_that_is_down_or_not_there(fabric: Fabric) -> None:
    fabric.add("d0")
    fabric.state("d0", DOWN)
    verbs = library(fabric)
    for name, number in (("d0", errno.ENETDOWN), ("d9", errno.ENODEV)):
        with pytest.raises(OSError, match=name) as caught:
            Port(verbs, Wanted(name, 1, 0, 7))
        assert caught.value.errno == number
    fabric.state("d0", ACTIVE)
    port = Port(verbs, Wanted("d0", 1, 0, 7))
    fabric.lid("d0", 0x99)
    assert port.look().lid == 0x99
    port.close()


@needs_compiler
def test_keys_have_their_top_bit_clear_and_a_gid_has_its_own_order_of_octets(fabric: Fabric) -> None:
    fabric.add("d0")
    port = Port(library(fabric), Wanted("d0", 1, 0, 7))
    assert port.address == Address(bytes.fromhex("fe800000000000000002c90300000001"), 0x10, port.address.qpn, 7, "ib")
    port.close()


# --- the threads of the child -----------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_port_that_hangs_costs_itself_and_is_found_again(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectors.verbs.rail.RETRY_S", 0.05)
    for name in ("d0", "d1"):
        fabric.add(name)
    verbs = library(fabric)
    rails = [Rail(verbs, Wanted(name, 1, 0, 7), Pings(30.0, 500.0), turn, 2) for turn, name in enumerate(("d0", "d1"))]
    for rail in rails:
        rail.period_s = 0.02
        rail.start()
    until(lambda: all(rail.address for rail in rails), "both are open")
    for rail, other in zip(rails, reversed(rails), strict=True):
        assert other.address is not None
        rail.targets = [(f"n/{rail.wanted.name}", other.address)]
    until(lambda: all(rail.pings.report()[0] for rail in rails), "both are answered")
    rails[0].targets = ()
    fabric.code("post_send", HANG, "d1")
    until(lambda: rails[1].state == "hung", "the second one hangs")
    assert rails[0].state == ""
    assert json.loads(child.told(rails))["rails"]["d1/1"][0] == "hung"
    fabric.code("post_send", 0, "d1")
    until(lambda: rails[1].state == "", "it came back")
    fabric.code("poll_cq", errno.EIO, "d1")
    until(lambda: rails[1].state == "eio", "it fails")
    assert rails[1].address is None
    fabric.code("poll_cq", 0, "d1")
    until(lambda: rails[1].state == "" and rails[1].address, "it was opened anew")
    child.part(rails)
    assert not any(rail.is_alive() for rail in rails)
    assert fabric.made("close_device", "d0") == 1


def test_rails_take_turns() -> None:
    rails = [Rail(None, Wanted(f"d{turn}", 1, 0, 7), Pings(1.0, 1.0), turn, 4) for turn in range(4)]  # type: ignore[arg-type]
    at_s = [rail._next_turn_s(1000.0) for rail in rails]
    assert sorted(at_s) == [1001.0, 1002.0, 1003.0, 1004.0]
    assert [rail._next_turn_s(now_s) - now_s for rail, now_s in zip(rails, at_s, strict=True)] == [4.0] * 4


# --- the source -------------------------------------------------------------------------------------------------------------------


def node(tmp_path: Path, ports: dict[str, str], **settings: Any) -> tuple[Bench, RdmaMeshSource]:
    """A node with device nodes and active ports; kinds of network by device."""
    b = bench(tmp_path)
    for number, (name, layer) in enumerate(ports.items()):
        b.write(f"/sys/class/infiniband/{name}/ports/1/state", "4: ACTIVE\n")
        b.write(f"/sys/class/infiniband/{name}/ports/1/link_layer", f"{layer}\n")
        b.write(f"/dev/infiniband/uverbs{number}", "")
    source = b.build(RdmaMeshSource, **settings)
    assert isinstance(source, RdmaMeshSource)
    return b, source


def test_without_device_nodes_nothing_is_started_and_nothing_said(tmp_path: Path) -> None:
    b, source = node(tmp_path, {"mlx5_0": "InfiniBand"})
    (b.root / "dev/infiniband/uverbs0").unlink()
    source.start()
    sample = source.sample(0)
    assert (sample.blocks, sample.gaps, source._keeper) == ((), (), None)
    assert "no device node" in source.explain()
    (tmp_path / "bare").mkdir()
    assert bench(tmp_path / "bare").build(RdmaMeshSource).explain() == ""


def test_a_look_from_outside_starts_no_child(tmp_path: Path) -> None:
    _, source = node(tmp_path, {"mlx5_0": "InfiniBand", "roce0": "Ethernet"})
    assert [gap.reason for gap in source.sample(0).gaps] == ["not_started"]
    assert source._keeper is None
    assert source.explain() == "would ping over mlx5_0/1 (ib, GID 0), roce0/1 (eth, GID 0)"


def test_ports_that_are_down_or_not_wanted_are_left_out(tmp_path: Path) -> None:
    b, source = node(
        tmp_path, {"mlx5_0": "InfiniBand", "mlx5_1": "InfiniBand", "mlx5_bond_0": "Ethernet"}, devices="mlx5_[0-9] x"
    )
    b.write("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    for index, kind in ((0, "IB/RoCE v1"), (3, "RoCE v2")):
        b.write(f"/sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/{index}", kind)
    source.sample(0)
    assert list(source._ports) == ["mlx5_0/1"]
    b.write("/sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE\n")
    b.write("/sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n")
    b.write("/sys/class/infiniband/mlx5_0/ports/1/gids/3", MAPPED)
    b.clock.advance_ns(LOOK_NS)
    source.sample(0)
    assert {name: port.gid_index for name, port in source._ports.items()} == {"mlx5_0/1": 3, "mlx5_1/1": 0}


def test_a_node_without_the_library_says_so_and_looks_again_later(tmp_path: Path) -> None:
    b, source = node(tmp_path, {"mlx5_0": "InfiniBand"}, library="libnowhere.so.7")
    source.start()
    until(lambda: [gap.reason for gap in source.sample(0).gaps] == ["no_library"], "the child told")
    assert source._keeper is None
    b.clock.advance_ns(REST_NS)
    assert [gap.reason for gap in source.sample(0).gaps] == ["starting"]
    assert source._keeper is not None
    source.close()


Nodes = dict[str, tuple[Bench, RdmaMeshSource]]


def two_nodes(tmp_path: Path) -> Nodes:
    """Two sources with a child each, over InfiniBand and RoCE, each told to ask the other."""
    nodes: Nodes = {}
    for name, other in (("n0", "n1"), ("n1", "n0")):
        (tmp_path / name).mkdir()
        ports = {"mlx5_0": "InfiniBand", "roce0": "Ethernet"}
        b, source = node(tmp_path / name, ports, library=str(built()), probes_per_s=20.0, timeout_ms=5000)
        source.context = replace(source.context, node=name)
        source.context.facts.probed = (other,)
        source._period_s = lambda peers: 0.05  # type: ignore[method-assign]
        source.start()
        nodes[name] = b, source
    return nodes


def acquainted(nodes: Nodes) -> None:
    """Each says where it listens, and hears it of the other."""
    facts = {name: source.context.facts for name, (_, source) in nodes.items()}

    def said(name: str) -> bool:
        nodes[name][1].sample(0)
        return len(facts[name].rdma_address.split()) == 2

    for name in nodes:
        until(lambda: said(name), f"addresses of {name}")  # noqa: B023 - waited for here
    assert all(b.outlet.layout_changes and facts[name].rdma_pings for name, (b, _) in nodes.items())
    for name, other in (("n0", "n1"), ("n1", "n0")):
        nodes[name][1].hear(other, facts[other].rdma_address)


def all_rows(nodes: Nodes) -> dict[str, dict[str, float]]:
    """Newest row of each port of each node, once each of them has one in which somebody was asked."""
    rows: dict[str, dict[str, float]] = {}

    def answered() -> bool:
        for name, (_, source) in nodes.items():
            sample = source.sample(0)
            assert not sample.gaps
            ports = devices(sample, "rdma_mesh")
            rows.update({f"{name} {port}": values(source, sample, "rdma_mesh", port) for port in ports})
        return len(rows) == 4 and all(row["asked_peers_count"] for row in rows.values())

    until(answered, "both ports of both nodes")
    return rows


@needs_compiler
def test_two_nodes_learn_each_others_addresses_and_ping(tmp_path: Path, fabric: Fabric) -> None:
    """A port of one that hangs costs that port; both children end with their sources."""
    fabric.add("mlx5_0")
    fabric.add("roce0", ETHERNET, 0)
    nodes = two_nodes(tmp_path)
    acquainted(nodes)
    rows = all_rows(nodes)
    assert sorted(rows) == ["n0 mlx5_0/1", "n0 roce0/1", "n1 mlx5_0/1", "n1 roce0/1"]
    assert all(row["lost_ratio"] == 0 and row["silent_peers_count"] == 0 for row in rows.values())
    assert all(0 < row["rtt_ms"] <= row["rtt_max_ms"] for row in rows.values())
    fabric.code("poll_cq", HANG, "roce0")
    source = nodes["n0"][1]
    until(lambda: [gap.reason for gap in source.sample(0).gaps] == ["hung:roce0/1"], "a port that hangs")
    answers: set[float] = set()

    def goes_on() -> bool:
        answers.add(values(source, source.sample(0), "rdma_mesh", "mlx5_0/1")["rtt_ms"])
        return len(answers) > 2

    until(goes_on, "that the other port goes on")
    fabric.code("poll_cq", 0, "roce0")
    command = Path(f"/proc/{nodes['n1'][1]._keeper.pid}/cmdline")  # type: ignore[union-attr]
    for _, each in nodes.values():
        each.close()
        assert each.context.facts.rdma_address == ""
    until(lambda: not command.exists() or not command.read_bytes(), "the end of the child")


def test_a_child_that_says_nothing_and_one_that_says_nonsense_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    b, source = node(tmp_path, {"mlx5_0": "InfiniBand"})

    class Child:
        silent, restarts, pid = False, 0, 1
        said: tuple[bytes, ...] = (b"nonsense", b"{}")

        def poll(self) -> list[bytes]:
            found, self.said = self.said, ()
            return list(found)

        def send(self, message: bytes) -> bool:
            return bool(message)

        def close(self) -> None: ...

    source.start()
    source._look()
    source._keeper = kept = Child()  # type: ignore[assignment]
    assert [gap.reason for gap in source.sample(0).gaps] == ["starting"]
    assert "is no JSON" in caplog.text
    kept.silent = True
    assert [gap.reason for gap in source.sample(0).gaps] == ["helper_silent"]
    kept.silent, kept.restarts = False, 1
    assert [gap.reason for gap in source.sample(0).gaps] == ["helper_restarting"]
    kept.said = (wire.report({"mlx5_0/1": ("permission", None)}, {}, {"rate": 3}, 5.0),)
    assert [gap.reason for gap in source.sample(0).gaps] == ["permission:mlx5_0/1"]
    assert b.context.metrics.value("tw_probe_refused_total", reason="rdma_rate") == 3
    source.context.facts.probed = ("n1", "n2")
    answered: list[float | None] = [0.1, 0.2, 1, 0]
    lost: list[float | None] = [None, None, 3, 3]
    for row in (answered, lost, lost, answered):
        kept.said = (
            wire.report(
                {"mlx5_0/1": ("", None)}, {"n1/mlx5_0/1": row, "n2/mlx5_0/1": row, "n1/mlx5_1/1": row}, {}, 5.0
            ),
        )
        assert source.sample(0).gaps == ()
        b.clock.advance_ns(DOUBT_NS)
    assert b.outlet.codes == ["rdma_silent", "rdma_answers"]
    (b.root / "dev/infiniband/uverbs0").unlink()
    b.clock.advance_ns(LOOK_NS)
    assert (source.sample(0).gaps, source._keeper) == ((), None), "the adapter is gone, and its gap with it"


def test_addresses_of_others_are_kept_only_where_they_are_of_use(tmp_path: Path) -> None:
    _, source = node(tmp_path, {"mlx5_0": "InfiniBand"})
    text = announcement({"mlx5_0/1": ADDRESS})
    source.hear("n1", text)
    assert source._known == {}
    source._look()
    for name in ("n0", "n1", "n2"):
        source.hear(name, text)
    source.hear("n2", "")
    source.hear("n3", "nonsense")
    assert source._known == {"n1": {"mlx5_0/1": ADDRESS}}
    assert source._news == 3, "what is repeated is no news"
    source.hear("n1", text)
    assert source._news == 3


# --- beside the UDP probes --------------------------------------------------------------------------------------------------------


def test_both_kinds_of_probes_together_stay_below_20_a_second() -> None:
    udp = 8 * probes_per_peer_s(4.0, 8, large=True, rdma=True)
    assert udp + RDMA_SHARE_PER_S < 20
    assert 8 * probes_per_peer_s(4.0, 8, large=True) > udp


def test_the_udp_probes_say_whom_they_ask_and_whose_agent_is_gone(tmp_path: Path) -> None:
    source = bench(tmp_path).build(
        MeshSource, rail_address="127.0.0.1", probe_port=9, peers={"n1": "127.0.0.1:1", "n2": "127.0.0.1:2"}
    )
    assert isinstance(source, MeshSource)
    source._choose()
    source._peers["n1"].absent = 3
    source._peers["n2"].lost = 1
    source.sample(0)
    assert source.context.facts.probed == ("n1", "n2")
    assert source.context.facts.agents_gone == {"n1"}


def test_what_a_child_said_last_is_heard_though_it_left_our_messages_unread(tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text("import socket\nsocket.socket(fileno=0).send(b'last words')\n", encoding="utf-8")
    process = Process({}, program)
    assert process.send(b"never read")
    until(process.reaped, "it ended")
    assert process.messages() == [b"last words"]
    assert process.ended
    process.close()
