"""The page: escaped whatever names say, readable without colour, honest about what is missing."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from actions.console.mount import mount_console
from actions.console.page import CELLS, POLICY, render_page
from actions.http import HttpServer, Router
from tests.console.make_console import Sources, ago, evidence, incident, warden

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&lt;"


class Tags(HTMLParser):
    """Counts tags and attributes that can run something, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.dangerous: list[str] = []
        self.stack: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        running = [
            name for name, value in attrs if name.startswith("on") or (value or "").strip().startswith("javascript:")
        ]
        self.dangerous += [f"{tag}.{name}" for name in running]
        if tag in ("img", "iframe", "object", "embed", "form"):
            self.dangerous.append(tag)
        if tag not in ("meta", "link", "rect", "circle", "polyline", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "circle", "polyline"):
            return
        assert self.stack.pop() == tag


def checked(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.stack == []
    return tags


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    made = Sources(tmp_path)
    made.client.nodes = [("n0", ago(0.5), 0.8, 0.5), ("n1", ago(60), 0.1, 0.5)]
    made.client.ranks = [("llm", 2, 0, "n0", 101, ago(0.4), 59.0, 2)]
    made.answers["/v1/incidents"] = [incident(), incident("over", status="closed", title="an old one")]
    return made


@pytest.fixture
def address(sources: Sources) -> Iterator[tuple[str, int]]:
    router = Router("a token of the operator")
    mount_console(router, sources.console)
    server = HttpServer("127.0.0.1:0", router)
    server.start()
    yield server.address
    server.close()


def get(address: tuple[str, int], path: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
    connection.close()
    return found


def test_hostile_names_run_nothing(sources: Sources) -> None:
    sources.client.nodes = [(HOSTILE, ago(1), 0.1, 0.1)]
    sources.client.ranks = [(HOSTILE, 1, 0, HOSTILE, 5, ago(1), 1.0, 1)]
    sources.answers["/v1/health"] = {"state": HOSTILE, "mode": HOSTILE, "kill_switch": HOSTILE}
    sources.answers["/v1/nodes"] = [
        warden(HOSTILE, reason=HOSTILE, excluded=True),
        warden("x" + HOSTILE, state=HOSTILE, job=HOSTILE),
    ]
    evil = dict.fromkeys(("severity", "kind", "job", "title", "report", "close_reason", "status"), HOSTILE)
    bad = incident(HOSTILE, HOSTILE, victims=[HOSTILE], remedy=[HOSTILE], **evil)
    bad["evidence"] = [evidence([1.0, 2.0], name=HOSTILE, unit=HOSTILE, note=HOSTILE)]
    sources.answers["/v1/incidents"] = [bad]
    row = dict.fromkeys(("plan_id", "incident_id", "verb", "target", "status", "mode", "rail", "reason"), HOSTILE)
    sources.answers["/v1/plans"] = [{"rows": [{**row, "at_ns": 1, "seq": 1}]}]
    page = render_page(sources.console.status(), chosen=HOSTILE)
    tags = checked(page)
    assert tags.scripts == 1, "our own"
    assert tags.dangerous == []
    assert "alert(1)" in page, "it is shown, as text"


def test_a_foreign_status_cannot_break_out_of_a_class(sources: Sources) -> None:
    sources.answers["/v1/plans"] = [{"rows": [{"at_ns": 1, "seq": 1, "plan_id": "", "incident_id": "", "verb": "", "target": "", "mode": "",
                                               "rail": "", "reason": "", "status": 'x" onclick="alert(1)'}]}]  # fmt: skip
    assert checked(render_page(sources.console.status())).dangerous == []


def test_states_differ_in_shape_and_word_not_only_in_colour(sources: Sources) -> None:
    sources.answers["/v1/nodes"] = [warden("n2", excluded=True), warden("n3")]
    sources.client.nodes += [("n3", ago(0.2), 0.5, 0.5)]
    sources.answers["/v1/incidents"] = [incident(node="n0")]
    html = render_page(sources.console.status())
    marks = re.findall(r'<div class="node (\w+)"><span class="mark" aria-hidden="true">(.)</span><b>(\w+)</b>', html)
    assert marks == [("suspect", "◆", "n0"), ("silent", "?", "n1"), ("excluded", "▢", "n2"), ("ok", "●", "n3")]
    for word in ("rank_frozen", "no telemetry for 60 s", "excluded from the job", "running"):
        assert word in html


def test_mode_and_kill_switch_are_always_shown(sources: Sources) -> None:
    html = render_page(sources.console.status())
    assert "mode auto" in html
    assert "kill switch off" in html
    sources.answers["/v1/health"] = {
        "state": "standby: another leads",
        "mode": "recommend",
        "kill_switch": "ops: maintenance",
    }
    sources.clock.advance_ns(2 * 10**9)
    html = render_page(sources.console.status())
    assert "KILL SWITCH ON" in html
    assert "ops: maintenance" in html
    assert "standby: another leads" in html


def test_the_chosen_incident_is_open_on_the_page(sources: Sources) -> None:
    status = sources.console.status()
    assert 'id="i-over">' in render_page(status)
    assert 'id="i-over" open>' in render_page(status, "over")
    assert 'id="i-i0" open>' in render_page(status)


def test_absent_values_are_gaps_in_a_plot(sources: Sources) -> None:
    bad = incident()
    bad["evidence"] = [evidence([1.0, 1.1, float("nan"), 0.2, 0.1])]
    sources.answers["/v1/incidents"] = [bad]
    html = render_page(sources.console.status())
    assert html.count("<polyline") == 2
    assert "nan" not in html.lower().replace("maintenance", "")


def test_thousands_of_nodes_are_cells(sources: Sources) -> None:
    sources.client.nodes = [(f"n{i}", ago(1), 0.1, 0.1) for i in range(CELLS + 1)]
    html = render_page(sources.console.status())
    assert html.count("<i class=") == CELLS + 1
    assert '<div class="node' not in html
    checked(html)


def test_over_http(address: tuple[str, int]) -> None:
    code, headers, html = get(address, "/")
    assert (code, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert "n0" in html
    code, headers, body = get(address, "/v1/status.json?incident=over")
    status = json.loads(body)
    assert (code, headers["content-type"], status["schema"], status["cluster"]) == (200, "application/json", 1, "c")
    assert status["title"] == "(1) c - Trainwarden"
    assert 'id="i-over" open>' in status["html"]
    assert status["nodes"][0]["node"] == "n0"
    code, _, text = get(address, "/v1/status.txt")
    assert code == 200
    assert text.startswith("cluster c")


def test_script_and_style_are_the_ones_the_policy_names(sources: Sources) -> None:
    html = render_page(sources.console.status())
    for tag in ("script", "style"):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in POLICY
