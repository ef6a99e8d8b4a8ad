from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from actions.backends.base import Order, job_state
from actions.backends.client import Command, Unreachable, WardenClient, address_of, canonical, sign
from actions.backends.warden import WardenBackend, WardenSettings, parse_status, save_step
from tests.actions.builders import NODES
from tests.actions.fake_warden import SECRET, FakeWarden, serve
from trainwarden.clock import SystemClock
from trainwarden.errors import ConfigError, UnavailableError, UsageError
from trainwarden.records import Verb

CLOCK = SystemClock()
ORDER = Order("i1.1.x", "demo", 5, "because")


@contextmanager
def cluster(tmp_path: Path, **gone: str) -> Iterator[tuple[WardenBackend, dict[str, FakeWarden]]]:
    """Four wardens; those in `gone` get this address instead of their own."""
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    with ExitStack() as stack:
        wardens = {name: FakeWarden(name, members=list(NODES)) for name in NODES}
        urls = {name: stack.enter_context(serve(warden)) for name, warden in wardens.items()} | gone
        settings = WardenSettings(
            urls, "", secret, connect_timeout_ms=200, status_timeout_ms=300, answer_timeout_ms=300
        )
        backend = WardenBackend(settings, CLOCK)
        backend.cluster()
        yield backend, wardens
        backend.close()


NOBODY = "http://127.0.0.1:9"


def test_golden_bytes_of_a_command() -> None:
    body = canonical({"verb": "stop", "id": "a", "args": {"z": 1, "a": [1, 2]}, "node": "n0"})
    assert body == b'{"args":{"a":[1,2],"z":1},"id":"a","node":"n0","verb":"stop"}'
    assert sign(b"k" * 16, body) == "b3847d2dc83ff3334559e57916ec9b211c621c9223c2cc8a678dd47101c16b10"


def test_status_of_all(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        wardens["n1"].excluded = "by hand"
        states = backend.cluster()
        assert (states["n0"].state, states["n0"].generation, states["n0"].members) == ("running", 1, NODES)
        assert states["n1"].excluded
        assert states["n0"].last_steps[0] >= 100
        assert job_state("demo", states, 0).generation == 1


def test_a_silent_node_keeps_what_it_said_last(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        wardens["n2"].mute = True
        state = backend.cluster()["n2"]
        assert (state.reachable, state.job, state.generation, state.members) == (False, "demo", 1, NODES)
        assert "n2" in state.reason


def test_save_names_one_step_for_all(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        wardens["n3"].step = 140
        outcome = backend.save(ORDER, 3000)
        assert outcome.status == "done"
        commits = {
            args["step"] for warden in wardens.values() for verb, _, args in warden.effects if args["phase"] == "commit"
        }
        assert len(commits) == 1
        assert int(outcome.detail["step"]) in commits
        assert commits.pop() >= 140 + 2 + 15, "150 ms of steps of 10 ms, and two"


@pytest.mark.parametrize(("late", "status", "asked"), [(1, "done", 4), (2, "done", 6), (3, "failed", 6)])
def test_a_rank_that_was_late_gets_two_more_chances_each_further_ahead(
    tmp_path: Path, late: int, status: str, asked: int
) -> None:
    with cluster(tmp_path) as (backend, wardens):
        wardens["n2"].late_commits = late
        outcome = backend.save(ORDER, 3000)
        assert outcome.status == status
        assert wardens["n0"].did("save") == asked
        assert len({key for _, key, _ in wardens["n0"].effects}) == asked
        steps = [args["step"] for _, _, args in wardens["n0"].effects if args["phase"] == "commit"]
        assert all(after > before + 40 for before, after in pairwise(steps)), "four times 150 ms of steps of 10 ms"


def test_save_that_one_rank_cannot_do_commits_nowhere(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        wardens["n1"].accepts_saves = False
        outcome = backend.save(ORDER, 3000)
        assert (outcome.status, "n1" in outcome.reason) == ("failed", True)
        assert all(args["phase"] == "arm" for warden in wardens.values() for _, _, args in warden.effects)


@pytest.mark.parametrize(
    ("answers", "step"),
    [
        ([], None),
        ([{"steps": {}}], None),
        ([{"steps": {"0": 10}}], 12),
        ([{"steps": {"0": 10}, "step_ms": 50}, {"steps": {"1": 12}, "step_ms": 60}], 12 + 2 + 2),
        ([{"steps": {"0": 10}, "step_ms": 0.001}], 210),
    ],
)
def test_margin_of_a_save(answers: list[dict[str, Any]], step: int | None) -> None:
    assert save_step(answers) == step


def test_restart_tells_everybody_and_does_not_wait_for_the_excluded(tmp_path: Path) -> None:
    with cluster(tmp_path, n2=NOBODY) as (backend, wardens):
        outcome = backend.restart(ORDER, ("n0", "n1", "n3"), 2, job_state("demo", backend.cluster(), 0))
        assert outcome.status == "done"
        assert [wardens[name].generation for name in NODES] == [2, 2, 1, 2]
        args = wardens["n0"].effects[0][2]
        assert (args["rendezvous_id"], args["min"], args["max"]) == ("demo.2", 3, 3)


def test_restart_with_a_silent_member_says_which(tmp_path: Path) -> None:
    with cluster(tmp_path, n1=NOBODY) as (backend, _):
        outcome = backend.restart(ORDER, NODES, 2, job_state("demo", backend.cluster(), 0))
        assert (outcome.status, outcome.silent) == ("failed", ("n1",))


def test_isolate_done_pending_and_unknown(tmp_path: Path) -> None:
    with cluster(tmp_path, n2=NOBODY) as (backend, wardens):
        assert backend.isolate(ORDER, "n1").status == "done"
        assert wardens["n1"].excluded == "because"
        pending = backend.isolate(ORDER, "n2")
        assert (pending.status, pending.silent) == ("pending", ("n2",))
        with pytest.raises(UnavailableError, match=r"n9 has no warden: add it to backends\.warden\.nodes"):
            backend.isolate(ORDER, "n9")
        assert backend.return_node(ORDER.part("back"), "n1").status == "done"
        assert wardens["n1"].excluded == ""


def test_the_same_order_twice_is_one_effect(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        assert backend.isolate(ORDER, "n1") == backend.isolate(ORDER, "n1")
        assert wardens["n1"].did("stop") == 1


def test_an_older_leader_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        assert backend.announce(Order("lead.9", "", 9)) == dict.fromkeys(NODES, 9)
        refused = backend.isolate(ORDER, "n1")
        assert (refused.status, "fence 5 is lower than 9" in refused.reason) == ("refused", True)
        assert backend.restart(ORDER, NODES, 2, job_state("demo", backend.cluster(), 0)).status == "refused"
        assert backend.save(ORDER, 500).status == "refused"
        assert all(not warden.effects for warden in wardens.values())


def test_a_wrong_secret_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, _):
        backend._clients["n0"] = WardenClient("n0", backend._clients["n0"].url, b"another secret 1", CLOCK, 0.2)
        outcome = backend.isolate(ORDER, "n0")
        assert (outcome.status, outcome.reason) == ("refused", "n0: HTTP 401: the signature does not fit")


def test_an_answer_that_got_lost_is_asked_for_again(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):

        def lose_first(warden: FakeWarden, verb: str) -> None:
            warden.mute = warden.did(verb) == 1 and not warden.mute
            warden.on_effect = None
            original = warden.handle

            def handle(body: bytes, signature: str) -> tuple[int, dict[str, Any]]:
                warden.mute = False
                return original(body, signature)

            warden.handle = handle  # type: ignore[method-assign]

        wardens["n1"].on_effect = lose_first
        assert backend.isolate(ORDER, "n1").status == "done"
        assert wardens["n1"].did("stop") == 1


def test_what_this_backend_cannot_do() -> None:
    backend = WardenBackend.__new__(WardenBackend)
    for verb in (Verb.SAVE, Verb.ISOLATE, Verb.RESTART, Verb.RETURN_NODE, Verb.REBALANCE, Verb.REROUTE):
        assert backend.can(verb) == ""


def test_traffic_is_moved_by_the_node_and_a_dry_run_says_where(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, wardens):
        dry = backend.reroute(ORDER.part("dry"), "n1", dry_run=True)
        assert (dry.status, dry.detail["rail"], dry.detail["moves"]) == ("done", "a", "n0:a>b")
        done = backend.reroute(ORDER, "n1")
        assert backend.reroute(ORDER, "n1") == done, "the same order again is answered from memory"
        backend.reroute(ORDER.part("undo"), "n1", rail="a", undo=True)
        assert [(args["dry_run"], args["undo"]) for verb, _, args in wardens["n1"].effects if verb == "reroute"] == [
            (True, False), (False, False), (False, True),
        ]  # fmt: skip
        wardens["n2"].has_links = False
        refused = backend.reroute(ORDER, "n2")
        assert (refused.status, refused.reason) == ("refused", "n2: no links file")
        wardens["n3"].mute = True
        assert backend.reroute(ORDER, "n3").status == "failed"


def test_nodes_of_the_topology_get_the_template(tmp_path: Path) -> None:
    with cluster(tmp_path) as (backend, _):
        backend.learn(("n7",))
        assert "n7" not in backend.cluster(), "without a template a node has no address"
    secret = tmp_path / "secret"
    templated = WardenBackend(WardenSettings({}, "http://127.0.0.1:9/", secret, connect_timeout_ms=50), CLOCK)
    templated.learn(("n7", "n7"))
    assert not templated.cluster()["n7"].reachable
    templated.close()


@pytest.mark.parametrize("url", ["127.0.0.1:9470", "https://h:1", "http://h", "http://:1", "http://h:port", ""])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        address_of("n0", url)


def test_the_secret_must_be_there_and_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret_file is missing"):
        WardenBackend(WardenSettings(), CLOCK)
    with pytest.raises(UnavailableError, match="No such file"):
        WardenBackend(WardenSettings(secret_file=tmp_path / "none"), CLOCK)
    (tmp_path / "short").write_text("short")
    with pytest.raises(ConfigError, match="5 bytes, expected at least 16"):
        WardenBackend(WardenSettings(secret_file=tmp_path / "short"), CLOCK)


@pytest.mark.parametrize(
    "value",
    [{"ranks": [1]}, {"ranks": [{"rank": "x", "last_step": 1}]}, {"generation": "many"}, {"ranks": 7}, {"members": 3}],
)
def test_a_status_that_cannot_be_read_is_a_silent_node(value: dict[str, Any]) -> None:
    with pytest.raises(Unreachable, match="n0: its status cannot be read"):
        parse_status("n0", {"node": "n0", **value})


def test_garbage_for_an_answer_is_never_success(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, wardens):
        warden = wardens["n0"]
        for answer in (
            {"id": "other", "status": "done", "fence": 1},
            {"id": "a", "status": "great", "fence": 1},
            {"id": "a", "status": "done", "fence": "x"},
            {},
        ):
            warden.handle = lambda body, signature, answer=answer: (200, answer)  # type: ignore[method-assign, misc]
            with serve(warden) as url, pytest.raises(Unreachable):
                WardenClient("n0", url, SECRET, CLOCK, 0.2).command(Command("a", "stop", "n0", "demo", 1), 0.3)


def test_every_sending_has_its_own_nonce_and_expiry() -> None:
    client = WardenClient("n0", "http://127.0.0.1:9", SECRET, CLOCK, 0.2)
    one, two = (json.loads(client.body(Command("a", "stop", "n0", "demo", 1))) for _ in range(2))
    assert one["nonce"] != two["nonce"]
    assert one["id"] == two["id"]
    assert one["expires_at_ns"] - one["issued_at_ns"] == 15_000_000_000


def test_a_warden_that_accepts_and_never_answers_costs_the_time_given_once(tmp_path: Path) -> None:
    stuck = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{stuck.getsockname()[1]}"
    with stuck, cluster(tmp_path, n1=address) as (backend, _):
        stuck.setblocking(False)
        drain(stuck)
        assert backend.isolate(ORDER, "n1").status == "pending"
        assert drain(stuck) == 1, "answer_timeout_ms is for the whole answer, not for each attempt"


def drain(server: socket.socket) -> int:
    """Connections that wait."""
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.mark.parametrize("name", ["a/b", "me@host", "h:22#", "a b", "", "?x", "[::1]"])
def test_a_name_that_would_change_the_address_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    backend = WardenBackend(WardenSettings({}, "http://{node}:9470", tmp_path / "secret"), CLOCK)
    with pytest.raises(UsageError, match="is no host name"):
        backend.learn((name,))
    assert backend.cluster() == {}
    backend.close()


def test_only_a_launcher_that_runs_heals_by_itself() -> None:
    said = {"state": "running", "generation": 1, "members": ["n0"], "heals_s": 20.0}
    assert parse_status("n0", said).heals_s == 20.0
    assert parse_status("n0", {**said, "state": "failed"}).heals_s == 0.0
    assert parse_status("n0", {"state": "running"}).heals_s == 0.0
    with pytest.raises(Unreachable):
        parse_status("n0", {**said, "heals_s": "soon"})
