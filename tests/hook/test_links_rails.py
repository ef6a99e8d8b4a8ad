"""Two real rails in network namespaces, a ring of processes over them, and a rail dies. No torch: it stands in a second."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainwarden_hook.escape import Escape
from trainwarden_hook.rails import read_rails

from benchmarks.training.rail_cluster import RailCluster, wait_for
from benchmarks.training.rail_ring import RailRing
from benchmarks.training.rail_stage import Stage, stage

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@pytest.fixture(scope="module")
def at() -> Iterator[Stage]:
    with stage(3) as made:
        yield made


def events(ring: RailRing, event: str, node: str) -> list[dict[str, Any]]:
    return [told for told in list(ring.collectors.events) if told["event"] == event and told["node"] == node]


def rails_of(ring: RailRing, number: int) -> dict[str, str]:
    return {peer: told["rail"] for peer, told in ring.keepers[number].ask("status")["peers"].items()}


def wait_rails(ring: RailRing, number: int, rail: str) -> None:
    wait_for(f"n{number} on rail {rail}", lambda: set(rails_of(ring, number).values()) == {rail}, 60)


def ip(at: Stage, number: int, *words: str) -> str:
    done = subprocess.run(["ip", "-n", at.space(number), *words], check=True, capture_output=True, text=True)
    return done.stdout


def sent_bytes(at: Stage, number: int, interface: str) -> int:
    path = f"/sys/class/net/{interface}/statistics/tx_bytes"
    return int(subprocess.run(at.enter(number, ["cat", path]), check=True, capture_output=True).stdout)


def test_routes_move_around_a_dead_rail_and_back_and_touch_nothing_else(at: Stage, tmp_path: Path) -> None:
    foreign = "10.78.0.12 via 10.77.1.12 dev eth0 metric 200"
    ip(at, 1, "route", "add", *foreign.split())
    with RailRing(tmp_path, at, calm_s=0.2) as ring:
        at.set_port(1, "a", "down")
        for number in range(3):
            wait_for("the move", lambda number=number: events(ring, "moved", f"n{number}"), 60)
        told = events(ring, "moved", "n1")[0]
        assert (told["cause"], told["rail"], told["to"], told["peers"]) == ("no_carrier", "a", "b", "n0,n2")
        assert events(ring, "moved", "n0")[0]["cause"] == "far_end", "the others are told, they see no fault themselves"
        before = sent_bytes(at, 1, "eth1")
        ring.wait_steps(20)
        assert sent_bytes(at, 1, "eth1") - before > 20 * 65536
        assert rails_of(ring, 0) == {"n1": "b", "n2": "a"}, "only what touches the bad link moves"

        at.set_port(1, "b", "down")
        wait_for("the news that nothing is left", lambda: events(ring, "lost", "n1"), 60)
        assert rails_of(ring, 1) == {"n0": "b", "n2": "b"}, "no rail is better: nothing is done"
        at.set_port(1, "b", "up")
        ring.wait_steps(5)

        os.kill(ring.keepers[1]._process.pid, signal.SIGKILL)
        wait_for("its end", lambda: not ring.keepers[1].alive, 60)
        assert "metric 51" in ip(at, 1, "route", "show", "proto", "116"), "the way round outlives who set it"
        ring.wait_steps(5)
        ring.keepers[1].close()
        ring.keepers[1] = ring.start_keeper(1)
        assert rails_of(ring, 1) == {"n0": "b", "n2": "b"}, "and is taken over"

        at.set_port(1, "a", "up")
        for number in range(3):
            wait_rails(ring, number, "a")
        assert "metric 5" not in ip(at, 1, "route")
        ring.wait_steps(20)
        assert ring.alive()
    assert ip(at, 1, "route", "show", "proto", "116") == "", "all of ours is gone at the end"
    assert foreign in ip(at, 1, "route")
    ip(at, 1, "route", "del", *foreign.split())


def test_what_was_sent_between_the_loss_of_the_carrier_and_the_move_does_not_wait_for_the_repair(
    at: Stage, tmp_path: Path
) -> None:
    """It waits for the peer's address on the dead rail, where nobody answers; TCP repeats nothing that the kernel still holds."""
    path, back = at.links_file(tmp_path / "links.toml"), f"{at.address(0)} via {at.on(0, 'b')} dev eth1"
    told: list[dict[str, Any]] = []
    escape = at.inside(
        0, lambda: Escape(read_rails(str(path), "n0"), b"a secret of the tests, long enough", told.append)
    )
    ip(at, 1, "route", "add", *back.split())
    try:
        listening = at.inside(1, lambda: socket.create_server((at.address(1), 0)))
        client = at.inside(0, lambda: socket.create_connection(listening.getsockname(), 60))
        with listening, client, listening.accept()[0] as server:
            at.set_port(0, "a", "down")
            select.select([escape._watch.fileno()], [], [], 60)
            wait_for("the loss", lambda: "NO-CARRIER" in ip(at, 0, "link", "show", "dev", "eth0"), 60)
            client.sendall(b"between the loss and the move")
            waiting = ip(at, 0, "neigh", "show", at.on(1, "a"), "dev", "eth0")
            assert "INCOMPLETE" in waiting, "nothing waits: this test shows nothing"
            escape._turn({escape._watch.fileno()}, time.monotonic_ns() + 10**12)
            assert [(event["event"], event["cause"], event["to"]) for event in told] == [("moved", "no_carrier", "b")]
            assert ip(at, 0, "neigh", "show", at.on(1, "a"), "dev", "eth0") == "", "what waits there is let go"
            server.settimeout(60)
            assert server.recv(100) == b"between the loss and the move"
    finally:
        at.set_port(0, "a", "up")
        escape.clear()
        escape.close()
        ip(at, 1, "route", "del", *back.split())


def test_mptcp_goes_on_with_the_standby_and_an_order_moves_as_a_fault_does(at: Stage, tmp_path: Path) -> None:
    with RailRing(tmp_path, at, mptcp=True, calm_s=0.2) as ring:
        at.set_link(2, "a", "down")  # the kernel drops the node's routes, too
        wait_for("the move", lambda: events(ring, "moved", "n2"), 60)
        ring.wait_steps(20)
        cut = sum(keeper.ask("status")["counters"].get("cut", 0) for keeper in ring.keepers)
        assert cut >= 2, "both connections of n2 left the rail; whichever side is first, the other may find it done"
        at.set_link(2, "a", "up")
        for number in range(3):
            wait_rails(ring, number, "a")
        before = sent_bytes(at, 2, "eth0")
        wait_for("data on the first rail again", lambda: sent_bytes(at, 2, "eth0") - before > 10 * 65536, 60)

        keeper = ring.keepers[0]
        order = {"rail": "a", "peers": [], "undo": False}
        dry = keeper.ask("order", **order, dry_run=True)
        assert [(move["peer"], move["from"], move["to"]) for move in dry["moves"]] == [
            ("n1", "a", "b"),
            ("n2", "a", "b"),
        ]
        assert set(rails_of(ring, 0).values()) == {"a"}, "a dry run moves nothing"
        keeper.ask("order", **order, dry_run=False)
        wait_rails(ring, 0, "b")
        wait_for("the others to follow", lambda: rails_of(ring, 1) == {"n0": "b", "n2": "a"}, 60)
        assert keeper.ask("order", **order, dry_run=False)["moves"] == [], "twice is the same as once"
        keeper.ask("order", rail="a", peers=[], undo=True, dry_run=False)
        wait_rails(ring, 0, "a")
        ring.wait_steps(20)
        assert ring.alive()


def served(cluster: RailCluster, number: int) -> bool:
    return "serves on" in (cluster.root / f"n{number}" / "warden.log").read_text()


def keeper_of(warden: int) -> int:
    children = Path(f"/proc/{warden}/task/{warden}/children").read_text().split()
    (found,) = [pid for pid in children if b"link_keeper" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(found)


def test_wardens_take_the_order_signed_and_once_and_keep_the_watch_alive(at: Stage, tmp_path: Path) -> None:
    with RailCluster(tmp_path, at, {}, program=("sleep", "1000")) as cluster:
        for number in range(3):
            wait_for("the warden", lambda number=number: served(cluster, number), 120)

        def rails(number: int) -> set[str]:
            return {told["rail"] for told in cluster.status(number)["links"].get("peers", {}).values()}

        code, dry = cluster.command(1, "reroute", {"dry_run": True})
        assert (code, dry["status"], len(dry["result"]["moves"])) == (200, "done", 2)
        code, done = cluster.command(1, "reroute", {"rail": "a"}, id="once")
        assert (code, done["status"]) == (200, "done")
        wait_for("n1 on rail b", lambda: rails(1) == {"b"}, 60)
        assert cluster.command(1, "reroute", {"rail": "a"}, id="once")[1] == done
        assert cluster.command(1, "reroute", {"rail": "c"})[0] == 409
        assert cluster.command(1, "reroute", {"rail": "a", "undo": True}, fence=0)[0] == 409, "an older leader"

        os.kill(keeper_of(cluster.wardens[1].pid), signal.SIGKILL)
        wait_for("the order known to a new keeper", lambda: cluster.status(1)["links"].get("avoided"), 60)
        assert rails(1) == {"b"}
        assert cluster.command(1, "reroute", {"rail": "a", "undo": True})[1]["status"] == "done"
        wait_for("n1 on rail a", lambda: rails(1) == {"a"}, 60)
    assert ip(at, 1, "route", "show", "proto", "116") == "", "a warden that ends takes its routes along"
