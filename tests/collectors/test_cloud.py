"""Notices of clouds: each provider's answers, one event for each notice, tokens, deadlines, and silence on machines of one's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.base import Sample
from collectors.cloud import notices
from collectors.cloud.services import SERVICES, Alibaba, Aws, Azure, Gcp, Reply, Request, detected, http_fetch
from collectors.files import Files
from collectors.sources.cloud import CloudSource
from detectors.rules.codes import meaning_of
from tests.collectors.kit import Bench, bench
from trainwarden.clock import SimulatedClock
from trainwarden.errors import ConfigError
from trainwarden.policy import KINDS
from trainwarden.records import LogEvent
from trainwarden.settings import parse_settings

TOKEN, SCHEDULED = "/latest/api/token", "/latest/meta-data/events/maintenance/scheduled"
SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
REBOOT = {
    "NotBefore": "21 Jan 2019 09:00:43 GMT", "Code": "system-reboot", "Description": "scheduled reboot",
    "EventId": "instance-event-0d59", "NotAfter": "21 Jan 2019 09:17:23 GMT", "State": "active",
}  # fmt: skip
NOTHING = Reply(404, b"")


class Metadata:
    """A metadata service: pages by target, and what it was asked."""

    def __init__(self, pages: dict[str, bytes] | None = None, token: str = "") -> None:
        self.pages = pages or {}
        self.token = token
        self.asked: list[Request] = []
        self.trouble: OSError | None = None

    def __call__(self, request: Request) -> Reply:
        self.asked.append(request)
        if self.trouble is not None:
            raise self.trouble
        if request.target == TOKEN:
            return Reply(200, self.token.encode()) if self.token else Reply(404, b"")
        if self.token and self.token not in request.headers.values():
            return Reply(401, b"")
        body = self.pages.get(request.target.partition("?")[0])
        return NOTHING if body is None else Reply(200, body)


def source_of(board: Bench, fetch: Callable[[Request], Reply], **given: object) -> CloudSource:
    settings = {"provider": "aws", **given}
    return CloudSource(board.context, parse_settings(CloudSource.Settings, settings, "cloud"), fetch)


def later(board: Bench, source: CloudSource, seconds: float = 61.0) -> Sample:
    """A sample whose question has been answered."""
    board.second(source, seconds)
    assert source._question.settle(60.0)
    return board.second(source, 0.0)


def told(board: Bench) -> list[tuple[str, str, bool]]:
    return [(event.code, event.severity, urgent) for event, urgent in board.outlet.logs]


def test_a_notice_is_told_once_with_its_time_and_taken_back_when_it_is_over(tmp_path: Path) -> None:
    board, service = bench(tmp_path), Metadata({SCHEDULED: json.dumps([REBOOT]).encode()}, "t1")
    source = source_of(board, service)
    for _ in range(3):
        assert later(board, source).gaps == ()
    [(event, urgent)] = board.outlet.logs
    assert (event.code, event.severity, urgent) == ("cloud:maintenance", "warning", False)
    assert event.attributes == {
        "cloud": "aws", "notice": "instance-event-0d59", "not_before": "2019-01-21T09:00:43Z", "what": "system-reboot",
    }  # fmt: skip
    assert event.line == (
        "AWS stops or restarts this machine for its own work, not before 2019-01-21T09:00:43Z: system-reboot scheduled reboot"
    )
    service.pages[SCHEDULED] = json.dumps([{**REBOOT, "NotBefore": "22 Jan 2019 09:00:43 GMT"}]).encode()
    later(board, source)
    assert "now not before 2019-01-22T09:00:43Z" in board.outlet.logs[-1][0].line
    service.pages[SCHEDULED] = b"[]"
    later(board, source)
    later(board, source)
    assert told(board)[2:] == [("cloud:maintenance", "info", False)]


def test_what_was_told_is_not_told_again_by_the_next_agent(tmp_path: Path) -> None:
    board, service = bench(tmp_path), Metadata({SPOT: b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'})
    for _ in range(2):
        source = source_of(board, service)
        source.start()
        later(board, source)
    assert told(board) == [("cloud:interruption", "critical", True)]
    del service.pages[SPOT]
    source = source_of(board, service)
    later(board, source)
    assert told(board)[1:] == [("cloud:interruption", "info", False)]
    (board.context.state_directory / "cloud.json").write_text("{")
    service.pages[SPOT] = b'{"action": "stop", "time": "2017-09-18T08:22:00Z"}'
    later(board, source_of(board, service))
    assert told(board)[2:] == [("cloud:interruption", "critical", True)]


def test_a_token_is_asked_for_and_renewed_when_it_is_refused(tmp_path: Path) -> None:
    board, service = bench(tmp_path), Metadata({}, "t1")
    source = source_of(board, service)
    later(board, source)
    assert (service.asked[0].method, service.asked[0].target) == ("PUT", TOKEN)
    assert service.asked[0].headers == {"X-aws-ec2-metadata-token-ttl-seconds": "3600"}
    assert all(r.headers == {"X-aws-ec2-metadata-token": "t1"} for r in service.asked[1:])
    service.token = "t2"
    assert later(board, source).gaps == ()
    assert [r.headers for r in service.asked if r.method == "PUT"][1:] == [
        {"X-aws-ec2-metadata-token-ttl-seconds": "3600"}
    ]


def test_trouble_is_a_gap_with_its_reason_and_takes_nothing_back(tmp_path: Path) -> None:
    board, service = bench(tmp_path), Metadata({SCHEDULED: json.dumps([REBOOT]).encode()})
    source = source_of(board, service)
    later(board, source)
    for trouble, reason in ((TimeoutError(), "timeout"), (ConnectionRefusedError(), "unreachable")):
        service.trouble = trouble
        assert [gap.reason for gap in later(board, source).gaps] == [reason]
    service.trouble = None
    service.pages[SCHEDULED] = b"<html>"
    assert [gap.reason for gap in later(board, source).gaps] == ["malformed"]
    service.pages[SCHEDULED] = json.dumps([REBOOT]).encode()
    assert later(board, source).gaps == ()
    assert len(board.outlet.logs) == 1


def test_a_service_that_never_answers_costs_no_tick(tmp_path: Path) -> None:
    board, let_go = bench(tmp_path), threading.Event()

    def silent(request: Request) -> Reply:
        let_go.wait(60.0)
        return NOTHING

    source = source_of(board, silent)
    for _ in range(5):
        assert board.second(source).gaps == ()
    assert [gap.reason for gap in board.second(source, 200.0).gaps] == ["hung"]
    let_go.set()


@pytest.mark.parametrize(
    ("files", "cloud"),
    [({"sys_vendor": "Amazon EC2"}, "aws"), ({"product_name": "Google Compute Engine"}, "gcp"),
     ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77", "sys_vendor": "Microsoft Corporation"}, "azure"),
     ({"sys_vendor": "Alibaba Cloud", "product_name": "Alibaba Cloud ECS"}, "alibaba"), ({"sys_vendor": "Dell Inc."}, ""),
     ({"sys_vendor": "Microsoft Corporation"}, ""), ({}, "")],
    ids=["aws", "gcp", "azure", "alibaba", "own", "hyper-v", "none"],
)  # fmt: skip
def test_the_firmware_names_the_cloud(tmp_path: Path, files: dict[str, str], cloud: str) -> None:
    board = bench(tmp_path)
    for name, text in files.items():
        board.write(f"/sys/class/dmi/id/{name}", text + "\n")
    assert detected(Files(board.root, SimulatedClock())) == cloud


def test_a_machine_of_ones_own_and_a_captured_one_ask_nobody(tmp_path: Path) -> None:
    board, service = bench(tmp_path), Metadata()
    board.write("/sys/class/dmi/id/sys_vendor", "Amazon EC2")  # a tree under another root is a capture
    for provider in ("auto", "off"):
        source = source_of(board, service, provider=provider)
        assert later(board, source) == Sample() if source._service else board.second(source) == Sample()
        assert "no cloud" in source.explain()
    assert service.asked == []


def test_a_wrong_name_or_address_is_told(tmp_path: Path) -> None:
    board = bench(tmp_path)
    with pytest.raises(ConfigError, match="'ibm' is none of auto, off, alibaba"):
        source_of(board, Metadata(), provider="ibm")
    with pytest.raises(ConfigError, match="no host:port"):
        source_of(board, Metadata(), endpoint="somewhere")


# --- each cloud ------------------------------------------------------------------------------------------------------------------


def test_aws() -> None:
    over = [{**REBOOT, "State": "completed"}, {**REBOOT, "Description": "[Completed] reboot"}]
    retire = {**REBOOT, "EventId": "e2", "Code": "instance-retirement"}
    pages = {
        SCHEDULED: json.dumps([REBOOT, *over, retire, "odd"]).encode(),
        SPOT: b'{"action": "hibernate", "time": "2017-09-18T08:22:00Z"}',
        REBALANCE: b'{"noticeTime": "2020-10-27T08:22:00Z"}',
    }
    service = Aws(Metadata(pages), 1.0)
    assert [(n.notice_id, n.kind) for n in service.planned()] == [
        ("instance-event-0d59", "maintenance"),
        ("e2", "retirement"),
    ]
    assert [(n.kind, n.not_before) for n in service.urgent()] == [
        ("interruption", "2017-09-18T08:22:00Z"),
        ("rebalance", "2020-10-27T08:22:00Z"),
    ]
    assert (Aws(Metadata(), 1.0).urgent(), Aws(Metadata(), 1.0).planned()) == ([], [])


def test_gcp() -> None:
    root, metadata = Gcp.root, Metadata()
    service = Gcp(metadata, 1.0)
    metadata.pages = {f"{root}/maintenance-event": b"NONE", f"{root}/preempted": b"FALSE"}
    assert service.urgent() == []
    assert metadata.asked[0].headers == {"Metadata-Flavor": "Google"}
    metadata.pages |= {f"{root}/maintenance-event": b"TERMINATE_ON_HOST_MAINTENANCE", f"{root}/preempted": b"TRUE"}
    assert [(n.kind, n.not_before) for n in service.urgent()] == [("maintenance", ""), ("interruption", "")]
    metadata.pages[f"{root}/maintenance-event"] = b"MIGRATE_ON_HOST_MAINTENANCE\n"
    assert service.urgent()[0].kind == "freeze"
    for body in ({"window_start_time": "2024-12-01T08:00:00-08:00", "maintenance_status": "PENDING", "type": "SCHEDULED"},
                 {"Upcoming maintenance": {"windowStartTime": "2024-12-01T16:00:00Z", "maintenanceStatus": "PENDING"}}):  # fmt: skip
        metadata.pages[f"{root}/upcoming-maintenance"] = json.dumps(body).encode()
        [notice] = service.planned()
        assert (notice.kind, notice.not_before) == ("maintenance", "2024-12-01T16:00:00Z")
    metadata.pages[f"{root}/upcoming-maintenance"] = b'{"error": "no notifications have been received yet"}'
    assert service.planned() == []
    assert Gcp(lambda _: Reply(503, b""), 1.0).planned() == []


def test_azure_tells_of_this_machine_only_and_may_take_two_minutes_once() -> None:
    event = {
        "EventId": "A1", "EventStatus": "Scheduled", "EventType": "Preempt", "ResourceType": "VirtualMachine",
        "Resources": ["VM-3"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", "Description": "", "EventSource": "Platform",
    }  # fmt: skip
    others = [{**event, "EventId": "B", "Resources": ["vm-4"]}, {**event, "EventId": "C", "EventType": "Freeze"}]
    pages = {
        "/metadata/instance/compute/name": b"vm-3",
        "/metadata/scheduledevents": json.dumps({"DocumentIncarnation": 2, "Events": [event, *others]}).encode(),
    }
    metadata = Metadata(pages)
    service = Azure(metadata, 5.0)
    assert [(n.notice_id, n.kind, n.not_before) for n in service.urgent()] == [
        ("A1", "interruption", "2016-09-19T18:29:47Z"),
        ("C", "freeze", "2016-09-19T18:29:47Z"),
    ]
    service.urgent()
    assert [request.deadline_s for request in metadata.asked] == [130.0, 130.0, 5.0]
    assert {tuple(request.headers.items()) for request in metadata.asked} == {(("Metadata", "true"),)}


def test_alibaba() -> None:
    events = [
        {"EventId": "e-1", "EventType": "SystemMaintenance.Reboot", "EventStatus": "Scheduled", "NotBefore": "2019-04-12T01:01:01Z"},
        {"eventId": "e-2", "eventType": "SystemFailure.Redeploy", "eventStatus": "Inquiring", "notBefore": ""},
        {"eventId": "e-3", "eventType": "SystemMaintenance.Reboot", "eventStatus": "Avoided"},
    ]  # fmt: skip
    pages = {
        "/latest/maintenance/active-system-events": json.dumps(events).encode(),
        "/latest/meta-data/instance/spot/termination-time": b"2018-04-07T17:03:00Z",
    }
    metadata = Metadata(pages, "a")
    service = Alibaba(metadata, 1.0)
    assert [(n.notice_id, n.kind, n.not_before) for n in service.planned()] == [
        ("e-1", "maintenance", "2019-04-12T01:01:01Z"),
        ("e-2", "retirement", ""),
    ]
    assert [(n.kind, n.not_before) for n in service.urgent()] == [("interruption", "2018-04-07T17:03:00Z")]
    assert metadata.asked[0].host == "100.100.100.200"
    pages["/latest/maintenance/active-system-events"] = b""
    assert service.planned() == []


@given(st.binary(max_size=80) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["Events", "EventId", "EventType", "NotBefore", "Resources", "action", "time", "eventId"]), inner, max_size=4),
    max_leaves=8).map(lambda document: json.dumps(document).encode()))  # fmt: skip
def test_odd_answers_are_read_or_refused(body: bytes) -> None:
    readers = (notices.aws_scheduled, notices.aws_spot, notices.aws_rebalance, notices.gcp_event, notices.gcp_upcoming,
               notices.gcp_preempted, notices.alibaba_events, notices.alibaba_spot, lambda b: notices.azure_events(b, "vm"))  # fmt: skip
    for reader in readers:
        try:
            found = reader(body)
        except ValueError:
            continue
        assert all(n.kind in notices.SEVERITY and n.notice_id for n in found)


# --- over the wire, and what the detectors make of it ------------------------------------------------------------------------------


@contextmanager
def served(answer: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def request_to(place: str) -> Request:
    host, _, port = place.partition(":")
    return Request("GET", host, int(port), "/x", {"Metadata-Flavor": "Google"}, 30.0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nNONE", (200, b"NONE")), (b"HTTP/1.1 404 No\r\n\r\n", (404, b"")),
     (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", (302, b"")),
     (b"SSH-2.0\r\n", "does not speak HTTP"), (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000, "more than 262144 bytes")],
    ids=["page", "none", "redirect", "other", "large"],
)  # fmt: skip
def test_answers_over_the_wire(answer: bytes, expected: tuple[int, bytes] | str) -> None:
    with served(answer) as place:
        if isinstance(expected, str):
            with pytest.raises(OSError, match=expected):
                http_fetch(request_to(place))
        else:
            reply = http_fetch(request_to(place))
            assert (reply.status, reply.body) == expected


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("interruption", "fatal_code"), ("retirement", "suspect_code"), ("maintenance", "suspect_code"), ("freeze", "suspect_code"),
     ("rebalance", None)],
)  # fmt: skip
def test_every_kind_has_a_meaning_and_its_end_has_none(kind: str, verdict: str | None) -> None:
    assert kind in notices.MEANING
    meaning = meaning_of(LogEvent(code=f"cloud:{kind}", severity=notices.SEVERITY[kind]))
    assert (meaning.kind if meaning else None) == verdict
    assert meaning is None or (meaning.kind in KINDS and "remedy: " in meaning.clause)
    assert meaning_of(LogEvent(code=f"cloud:{kind}", severity="info")) is None
    assert set(notices.SEVERITY) == set(notices.MEANING)
    assert set(SERVICES) == {"aws", "gcp", "azure", "alibaba"}
