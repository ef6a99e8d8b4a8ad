"""The status: what is known, how old it is, and what cannot be known just now."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actions.console.status import as_table, merge_incidents, natural, status
from actions.console.store_view import StoreView
from actions.console.text import age, render_text, safe
from tests.console.make_console import NOW_S, Sources, ago, incident, warden
from trainwarden.clock import NS_PER_S, SystemClock
from trainwarden.config import from_table
from trainwarden.embedded.ports import free_port


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    made = Sources(tmp_path)
    made.client.nodes = [
        ("n0", ago(0.5), 0.8, 0.5),
        ("n1", ago(0.7), 0.1, 0.5),
        ("n10", ago(42), None, None),
        ("n2", ago(1), 0.5, 0.5),
    ]
    made.client.ranks = [("llm", 1, 0, "n0", 90, ago(100), 70.0, 2), ("llm", 2, 0, "n0", 101, ago(0.4), 59.0, 2),
                         ("llm", 2, 1, "n1", 100, ago(0.5), 61.0, 2)]  # fmt: skip
    excluded = warden("n2", excluded=True, reason="operator: DIMM")
    made.answers["/v1/nodes"] = [warden("n0"), warden("n1"), excluded, warden("n3", reachable=False)]
    made.answers["/v1/incidents"] = [incident()]
    return made


def test_every_node_has_a_state_and_a_reason(sources: Sources) -> None:
    states = {node.node: (node.state, node.why) for node in sources.console.status().nodes}
    assert list(states) == ["n0", "n1", "n2", "n3", "n10"]
    assert states == {
        "n0": ("ok", "running"),
        "n1": ("suspect", "rank_frozen, 90% sure"),
        "n2": ("excluded", "excluded: operator: DIMM"),
        "n3": ("silent", "no telemetry; its warden does not answer"),
        "n10": ("silent", "no telemetry for 42 s"),
    }


def test_a_job_is_its_newest_attempt(sources: Sources) -> None:
    (job,) = sources.console.status().jobs
    assert (job.attempt, job.ranks, job.world, job.last_step, job.step_age_s) == (2, 2, 2, 100, 0.4)


def test_the_age_of_the_newest_tick_is_told(sources: Sources) -> None:
    assert sources.console.status().telemetry_age_s == 0.5
    sources.clock.advance_ns(30 * NS_PER_S)
    later = sources.console.status()
    assert later.telemetry_age_s == 30.5
    assert {node.state for node in later.nodes} == {"silent", "suspect", "excluded"}


def test_sources_are_asked_once_a_second(sources: Sources) -> None:
    for _ in range(10):
        sources.console.status()
    asked = sources.client.asked
    sources.clock.advance_ns(NS_PER_S)
    sources.console.status()
    assert sources.client.asked == 2 * asked


def test_without_the_store_nobody_is_called_well(sources: Sources) -> None:
    sources.store_error = ConnectionRefusedError("Connection refused")
    made = sources.console.status()
    states = {node.node: node.state for node in made.nodes}
    assert states == {"n0": "unknown", "n1": "suspect", "n2": "excluded", "n3": "unknown"}
    assert made.telemetry_age_s is None
    assert "store is away: nobody listens at the store's address" in render_text(made)


def test_a_store_that_is_away_is_not_asked_again_at_once_and_comes_back(sources: Sources) -> None:
    sources.store_error = ConnectionRefusedError("Connection refused")
    sources.console.status()
    sources.store_error = None
    sources.clock.advance_ns(2 * NS_PER_S)
    assert not sources.console.status().parts[2].ok
    sources.clock.advance_ns(6 * NS_PER_S)
    assert sources.console.status().parts[2].ok


def test_without_the_action_service_the_store_still_tells(sources: Sources, tmp_path: Path) -> None:
    sources.service_error = "nobody answers"
    (tmp_path / "KILL_SWITCH").touch()
    made = sources.console.status()
    assert [part.ok for part in made.parts] == [False, True, True, True]
    assert "KILL_SWITCH exists" in made.kill_switch
    assert {node.node for node in made.nodes} == {"n0", "n1", "n2", "n10"}
    assert "actions is away: nobody answers" in render_text(made)


def test_without_the_broker_it_says_so(sources: Sources) -> None:
    sources.broker_error = "127.0.0.1:9092: Connection refused"
    assert "kafka is away: 127.0.0.1:9092: Connection refused" in render_text(sources.console.status())


def test_the_newest_revision_wins_and_open_ones_come_first(sources: Sources) -> None:
    sources.answers["/v1/incidents"] = [
        incident("old", status="closed"),
        incident("new", revision=3),
        incident("gone", status="closed"),
    ]
    made = sources.console.status()
    older = merge_incidents(made.incidents, [line for line in made.incidents if line.incident_id == "new"])
    assert older[0].incident_id == "new"
    assert len(older) == 3
    assert [line.incident_id for line in made.open_incidents] == ["new"]


def test_text_is_complete_and_aligned(sources: Sources) -> None:
    row = {"at_ns": NOW_S * NS_PER_S, "seq": 1, "plan_id": "p", "incident_id": "i0", "verb": "restart", "target": "job:llm",
           "status": "denied", "mode": "auto", "rail": "breaker", "reason": "half are out"}  # fmt: skip
    sources.answers["/v1/plans"] = [{"rows": [row]}]
    text = render_text(sources.console.status())
    for part in (
        "cluster c",
        "mode auto",
        "llm",
        "SUSPECT",
        "NO DATA",
        "n10",
        "node:n1",
        "90%",
        "It stopped.",
        "breaker; half are out",
    ):
        assert part in text
    heads = [line for line in text.splitlines() if line.startswith("NODE ")]
    assert len(heads) == 1
    column = heads[0].index("STATE")
    assert all(line[column - 1] == " " for line in text.splitlines() if line.startswith(("n0", "n1")))


def test_hostile_names_cannot_move_the_cursor(sources: Sources) -> None:
    sources.client.nodes = [("\x1b[2Jn0\r\n\u202eevil", ago(1), 0.1, 0.1)]
    text = render_text(sources.console.status())
    assert "\x1b" not in text
    assert "\r" not in text
    assert "\u202e" not in text
    assert safe("a\x1bb") == "a\\x1bb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-3.0, "0.0s"), (9.99, "10.0s"), (65.0, "65s"), (190.0, "3m10s"), (7300.0, "2h01m")],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_natural_order() -> None:
    assert sorted(["n10", "n2", "a", "n", "n2b"], key=natural) == ["a", "n", "n2", "n2b", "n10"]


def test_a_terminal_gets_a_status_when_everything_is_away(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "run_dir": str(tmp_path), "kafka": {"url": f"kafka://127.0.0.1:{free_port()}"},
        "store": {"url": f"clickhouse://127.0.0.1:{free_port()}/tw"}, "actions": {"listen": f"127.0.0.1:{free_port()}"},
        "streams": {"web_listen": f"127.0.0.1:{free_port()}"},
    }  # fmt: skip
    made = status(from_table(table))
    assert [part.ok for part in made.parts] == [False, False, False, False]
    text = render_text(made)
    assert text.count("is away") == 4
    assert as_table(made)["schema"] == 1


def test_the_real_store_answers(story_url: str) -> None:
    view = StoreView(story_url, SystemClock())
    data = view.look()
    view.close()
    assert {node.node for node in data.nodes} == {"n0", "n1", "n2", "n3"}
    assert {(rank.attempt, rank.rank) for rank in data.ranks} == {
        (attempt, rank) for attempt in (1, 2) for rank in range(4)
    }
    (found,) = data.incidents
    assert (found.kind, found.culprit, found.status) == ("rank_frozen", "node:n2", "closed")
    assert [name for name, _ in found.timeline] == [
        "fault",
        "first signal",
        "verdict",
        "decided",
        "acted",
        "recovered",
        "closed",
    ]
    assert [line.status for line in data.actions] == ["verified", "done", "started", "planned"]
    assert [line.cause for line in data.deliveries] == ["resolved", "first"]
    assert found.evidence[0].name == "step_age_s"


@pytest.mark.parametrize("body", [b"<html>somebody else</html>", b"[]", b'{"state": 1}', b""])
def test_somebody_else_at_the_service_s_address_is_one_sentence(tmp_path: Path, body: bytes) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        listen = f"127.0.0.1:{server.server_address[1]}"
        store = f"clickhouse://127.0.0.1:{free_port()}/x"
        made = status(from_table({"run_dir": str(tmp_path), "actions": {"listen": listen}, "store": {"url": store}}))
        server.shutdown()
    part = next(part for part in made.parts if part.name == "actions")
    assert not part.ok
    assert "no action service" in part.detail
