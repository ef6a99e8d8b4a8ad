"""Probes: round trips and losses, no amplification, rate limit, peers that are absent or many."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors import echo
from collectors.sources.mesh import MeshSource, Peer, neighbours
from collectors.topology.rotation import Place, Rotation, probes_per_peer_s
from tests.collectors.kit import bench, values
from trainwarden.errors import ConfigError

HOST = "127.0.0.1"


def udp() -> socket.socket:
    return echo.stamped_socket((HOST, 0))


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def probing(tmp_path: Path, peers: dict[str, int], **settings: object) -> MeshSource:
    source = bench(tmp_path).build(
        MeshSource, rail_address=HOST, probe_port=9, peers={n: f"{HOST}:{p}" for n, p in peers.items()}, **settings
    )
    assert isinstance(source, MeshSource)
    return source


def answer(responder: echo.Responder, sock: socket.socket, count: int) -> None:
    """Serve until `count` requests were looked at."""
    for _ in range(count):
        sock.setblocking(True)
        sock.recv(1, socket.MSG_PEEK)
        sock.setblocking(False)
        responder.serve(sock, 0.0)


def test_an_answered_probe_has_a_round_trip_less_the_peers_own_delay(tmp_path: Path) -> None:
    with udp() as peer:
        source = probing(tmp_path, {"n1": port_of(peer)})
        source._send_round(0.0)
        payload, sender, came_ns = wait_for(peer)
        request = echo.parse(payload)
        assert request is not None
        left_ns = came_ns + 150_000_000  # the peer says that it kept the probe for 150 ms
        peer.sendto(echo.reply(request.nonce, came_ns, left_ns), sender)
        own = source._peers["n1"].socket
        assert own is not None
        own.setblocking(True)
        own.recv(1, socket.MSG_PEEK)
        own.setblocking(False)
        source._collect(source._peers["n1"])
        row = values(source, source.sample(0), "mesh", "n1")
        assert (row["sent_count"], row["lost_count"]) == (1, 0)
        assert 0 <= row["rtt_ms"] <= row["rtt_max_ms"] < 200
        source.close()


def wait_for(sock: socket.socket) -> tuple[bytes, tuple[str, int], int]:
    sock.setblocking(True)
    sock.recv(1, socket.MSG_PEEK)
    sock.setblocking(False)
    found = echo.receive(sock)
    assert found is not None
    return found


def test_clock_offset_is_this_nodes_clock_less_its_peers(tmp_path: Path) -> None:
    source = probing(tmp_path, {"n1": 9})
    peer = source_peer(source)
    peer.pending[b"n" * 16] = (1_000_000_000, 0.0)
    # the way takes 10 ms each way, the peer's clock is 500 ms ahead and it keeps the probe for 1 ms
    source._answered(peer, echo.Echo(echo.REPLY, b"n" * 16, 1_510_000_000, 1_511_000_000), 1_021_000_000)
    row = values(source, source.sample(0), "mesh", "n1")
    assert row["rtt_ms"] == pytest.approx(20.0)
    assert source.context.facts.clock_offset_ms == pytest.approx(-500.0)


def source_peer(source: MeshSource) -> Peer:
    source._choose()
    return source._peers["n1"]


def test_a_silent_peer_is_lost_after_the_timeout(tmp_path: Path) -> None:
    with udp() as peer:
        source = probing(tmp_path, {"n1": port_of(peer)}, timeout_ms=200)
        source._send_round(10.0)
        source._expire(10.1)
        assert values(source, source.sample(0), "mesh", "n1") == {"sent_count": 0, "lost_count": 0}
        source._expire(10.25)
        assert values(source, source.sample(0), "mesh", "n1") == {"sent_count": 1, "lost_count": 1}
        source.close()


def test_an_answer_after_the_timeout_is_a_loss(tmp_path: Path) -> None:
    source = probing(tmp_path, {"n1": 9}, timeout_ms=200)
    peer = source_peer(source)
    peer.pending[b"n" * 16] = (0, 0.0)
    source._answered(peer, echo.Echo(echo.REPLY, b"n" * 16, 1000, 1000), 250_000_000)
    assert values(source, source.sample(0), "mesh", "n1") == {"sent_count": 1, "lost_count": 1}


def test_a_peer_without_collector_is_neither_sent_nor_lost(tmp_path: Path) -> None:
    with udp() as gone:
        port = port_of(gone)
    source = probing(tmp_path, {"n1": port})
    deadline = time.monotonic() + 10
    source._send_round(0.0)
    while not source._peers["n1"].absent and time.monotonic() < deadline:
        source._collect(source._peers["n1"])
    source._expire(100.0)
    assert values(source, source.sample(0), "mesh", "n1") == {"sent_count": 0, "lost_count": 0}
    source.close()


def test_a_forged_answer_is_ignored(tmp_path: Path) -> None:
    source = probing(tmp_path, {"n1": 9})
    peer = source_peer(source)
    peer.pending[b"n" * 16] = (0, 0.0)
    source._answered(peer, echo.Echo(echo.REPLY, b"x" * 16, 0, 0), 1000)
    assert list(peer.pending) == [b"n" * 16]


def test_two_sources_measure_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with udp() as one, udp() as two:
        ports = (port_of(one), port_of(two))
    sources = []
    for name, folder in enumerate(("a", "b")):
        board = bench(tmp_path / folder)
        source = board.build(MeshSource, rail_address=HOST, probe_port=ports[name], peers={"peer": f"{HOST}:{ports[1 - name]}"},
                             probes_per_s=50.0)  # fmt: skip
        assert isinstance(source, MeshSource)
        sources.append(source)
        source.start()
    deadline, answered = time.monotonic() + 20, [0.0, 0.0]
    while min(answered) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        for i, source in enumerate(sources):
            if (sample := source.sample(0)).blocks:
                row = values(source, sample, "mesh", "peer")
                answered[i] += row["sent_count"] - row["lost_count"]
    assert min(answered) >= 3
    for source in sources:
        source.close()


def test_the_responder_amplifies_nothing() -> None:
    responder = echo.Responder(100.0)
    with udp() as server, udp() as client:
        client.connect((HOST, port_of(server)))
        client.send(echo.request(b"n" * 16))
        answer(responder, server, 1)
        payload, _, _ = wait_for(client)
        assert len(payload) == len(echo.request(b"n" * 16)) == echo.SIZE_BYTES
        parsed = echo.parse(payload)
        assert parsed is not None
        assert (parsed.kind, parsed.nonce) == (echo.REPLY, b"n" * 16)
        assert parsed.left_ns >= parsed.came_ns > 0


ASKED = echo.request(b"n" * 16)


@pytest.mark.parametrize(
    "payload", [b"", b"x", b"\0" * echo.SIZE_BYTES, ASKED[:-1], ASKED + b"x", echo.reply(b"n" * 16, 1, 2)]
)
def test_the_responder_is_silent_to_anything_else(payload: bytes) -> None:
    responder = echo.Responder(100.0)
    with udp() as server, udp() as client:
        client.connect((HOST, port_of(server)))
        client.send(payload)
        while not responder.refused:
            responder.serve(server, 0.0)
        assert responder.refused == {"malformed": 1}
        assert echo.receive(client) is None


def test_the_responder_limits_each_source() -> None:
    responder = echo.Responder(5.0)
    with udp() as server, udp() as client:
        client.connect((HOST, port_of(server)))
        for _ in range(20):
            client.send(echo.request(b"n" * 16))
        while sum(responder.refused.values()) < 15:
            responder.serve(server, 0.0)
        assert responder.refused == {"rate": 15}
        client.send(echo.request(b"m" * 16))
        answer(responder, server, 0)
        while (found := echo.receive(server)) is None:
            pass
        assert found[0] == echo.request(b"m" * 16)
        assert responder.admission.admit(HOST, 1.0)  # a second later there is room again


def test_memory_of_sources_is_bounded() -> None:
    responder = echo.Responder(5.0)
    for n in range(3 * echo.MAX_SOURCES):
        responder.admission.admit(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 0.0)
    assert len(responder.admission) <= echo.MAX_SOURCES


def test_whom_to_probe_on_a_large_network() -> None:
    names = [f"n{i:04d}" for i in range(1000)]
    chosen = neighbours("n0500", names, 8)
    assert len(chosen) == 8
    assert {"n0499", "n0501"} <= set(chosen)
    assert chosen == neighbours("n0500", list(reversed(names)), 8)
    assert neighbours("n0000", names, 8) != neighbours("n0001", names, 8)
    assert neighbours("n0", [], 8) == []


def test_learnt_peers_do_not_override_given_ones(tmp_path: Path) -> None:
    source = probing(tmp_path, {"n1": 1001})
    source.learn({"n1": f"{HOST}:2002", "n2": f"{HOST}:2003", "n0": f"{HOST}:2004"})
    source._choose()
    assert {name: peer.address[1] for name, peer in source._peers.items()} == {"n1": 1001, "n2": 2003}


def test_an_address_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collector\.peers\.n1: 'nonsense' is no address, expected ip:port"):
        bench(tmp_path).build(MeshSource, peers={"n1": "nonsense"})


def test_a_missing_rail_address_is_waited_for(tmp_path: Path) -> None:
    source = bench(tmp_path).build(MeshSource, rail_address="192.0.2.77", probe_port=9471)
    assert isinstance(source, MeshSource)
    source._listen(0.0)
    assert [g.reason for g in source.sample(0).gaps] == ["no_rail_address"]
    assert source._listening is None
    source.close()


def test_threads_end(tmp_path: Path) -> None:
    source = probing(tmp_path, {})
    source.start()
    source.close()
    assert not any(t.name == "tw-mesh" for t in threading.enumerate())


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_no_more_peers_than_allowed_however_few(limit: int) -> None:
    chosen = neighbours("n5", [f"n{i}" for i in range(20)], limit)
    assert len(chosen) == limit
    assert "n5" not in chosen


def test_a_fault_that_is_over_is_no_longer_told(tmp_path: Path) -> None:
    source = probing(tmp_path, {})
    with udp() as free:
        source.settings = replace(source.settings, probe_port=port_of(free))
    source.turn()
    assert source.sample(0).gaps == ()
    source._failed(RuntimeError("once"))
    assert [gap.reason for gap in source.sample(0).gaps] == ["error"]
    source.turn()
    assert source.sample(0).gaps == ()
    source.close()


# --- large networks ----------------------------------------------------------------------------------------------------------


def network(nodes: int, per_leaf: int, known: bool = True) -> dict[str, Place]:
    """Nodes below leaves of `per_leaf`; the last leaf has what is left."""
    return {f"n{i:04d}": Place(f"leaf{i // per_leaf:03d}" if known else "") for i in range(nodes)}


@pytest.mark.parametrize(
    ("per_leaf", "begin_s", "rails"),
    [(32, 7, 0), (5, 1, 0), (32, 3, 8)],
    ids=["32 below", "5 below", "rails and racks"],
)
def test_1250_nodes_see_every_pair_of_leaves_within_any_minute_at_less_than_20_probes_a_second(
    per_leaf: int, begin_s: int, rails: int
) -> None:
    places = network(1250, per_leaf)
    if rails:  # racks of four: a rack's nodes hang at as many leaves, each on a rail of its own
        places = {
            f"n{i:04d}": Place(f"leaf{i // (per_leaf * rails):02d}.{i % rails}", str(i % rails)) for i in range(1250)
        }
    leaves = sorted({place.leaf for place in places.values()})
    seen: set[tuple[str, str]] = set()
    asked: Counter[str] = Counter()
    for node, place in places.items():
        rotation = Rotation(node, places, 8)
        first, last = (rotation.epoch_at((begin_s + s) * 10**9) for s in (0, 60))
        # an epoch that the minute only touches is not counted on
        for epoch in range(first + (begin_s % rotation.epoch_s > 0), last):
            peers = rotation.peers(epoch)
            assert len(peers) <= 8
            assert node not in peers
            assert len(peers) * probes_per_peer_s(4.0, len(peers), large=True) < 20
            asked.update(peers)
            seen |= {(place.leaf, places[peer].leaf) for peer in peers}
    missing = {(a, b) for a in leaves for b in leaves} - seen
    assert not {pair for pair in missing if pair[0] != pair[1]}
    usual = sum(asked.values()) / len(asked)
    assert max(asked.values()) < 8 * usual, "the two nodes of the last leaf are not asked by everybody"


def test_ring_neighbours_and_one_of_the_own_rail_stay() -> None:
    places = {name: Place(place.leaf, str(int(name[1:]) % 2)) for name, place in network(300, 30).items()}
    rotation = Rotation("n0100", places, 8)
    always = set.intersection(*(set(rotation.peers(epoch)) for epoch in range(50)))
    assert {"n0099", "n0101"} < always
    assert len(always) == 3
    [far] = always - {"n0099", "n0101"}
    assert (places[far].rail, places[far].leaf != places["n0100"].leaf) == ("0", True)
    turns = [set(rotation.peers(epoch)) - always for epoch in range(50)]
    assert sum(places[peer].rail == "0" for turn in turns for peer in turn) > sum(map(len, turns)) / 2


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 80), st.integers(1, 30), st.integers(4, 12), st.integers(0, 10**9), st.booleans())
def test_any_network_has_peers_that_exist_and_no_more_than_allowed(
    nodes: int, per_leaf: int, limit: int, epoch: int, known: bool
) -> None:
    places = network(nodes, per_leaf, known)
    for node in ("n0000", "stranger"):
        peers = Rotation(node, places, limit).peers(epoch)
        assert 0 < len(peers) <= limit
        assert node not in peers
        assert set(peers) <= set(places)


def test_over_an_hour_a_node_probes_many_others() -> None:
    places = network(1250, 32, known=False)
    rotation = Rotation("n0007", places, 8)
    assert rotation.epoch_s == 10
    assert len({peer for epoch in range(360) for peer in rotation.peers(epoch)}) > 500


def test_the_source_rotates_where_there_are_many_and_tells_what_those_that_go_have_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = probing(tmp_path, {})
    now_ns = 10**18
    monkeypatch.setattr("collectors.sources.mesh.time.time_ns", lambda: now_ns)
    source.learn_places({f"n{i}": Place(f"leaf{i // 5}") for i in range(1, 60)})
    source.learn({f"n{i}": f"{HOST}:{2000 + i}" for i in range(1, 60)})
    source._choose()
    before = dict(source._peers)
    assert len(before) == 8
    assert source._period_s * 19 == pytest.approx(8)
    for peer in before.values():
        peer.round_trips_ms.append(1.0)
    assert source._rotation is not None
    now_ns += source._rotation.epoch_s * 10**9
    source._choose()
    gone = set(before) - set(source._peers)
    assert gone
    sample = source.sample(0)
    for name in gone:
        assert values(source, sample, "mesh", name)["sent_count"] == 1
    assert gone.isdisjoint(source.sample(0).blocks[0].devices)
    source.learn({"n1": f"{HOST}:2001"})
    source._choose()
    assert (list(source._peers), source._rotation is None, source._period_s) == (["n1"], True, 0.25)


def test_one_configuration_serves_many_nodes_by_the_name_of_the_interface(tmp_path: Path) -> None:
    source = bench(tmp_path).build(MeshSource, rail_address="", rail_interface="lo")
    assert (source.settings.rail_address, source.context.facts.probe_address) == ("127.0.0.1", "127.0.0.1:9471")
    (tmp_path / "b").mkdir()
    absent = bench(tmp_path / "b").build(MeshSource, rail_interface="nosuch0")
    absent.start()
    assert [gap.reason for gap in absent.sample(0).gaps] == ["no_rail_address"]
    absent.close()
