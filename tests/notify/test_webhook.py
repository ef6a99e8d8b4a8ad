"""The payload, byte for byte; signatures; where a notice may go; and a real HTTP exchange."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from actions.notify.base import Call, Cause, DeliverySettings, Notice
from actions.notify.guard import Refused, check_target, redact
from actions.notify.sender import HttpSender
from actions.notify.service import NotifyService, in_background, make_notifiers
from actions.notify.signing import read_secrets, sign
from actions.notify.webhook import headline, payload, what_was_done
from tests.notify.make_notices import START_NS, Desk, action, incident, plan, until
from trainwarden.bus.memory import MemoryBus
from trainwarden.clock import NS_PER_S, SystemClock
from trainwarden.config import from_table
from trainwarden.errors import ConfigError
from trainwarden.records import ActionStatus, IncidentStatus, encode

GOLDEN = Path(__file__).with_name("alertmanager_v4.json")


def notice(firing: bool = True) -> Notice:
    labels = {"alertname": "rank_frozen", "cluster": "c", "dedup_key": "d0", "job": "llm", "severity": "critical"}
    what = incident(2, IncidentStatus.OPEN if firing else IncidentStatus.RECOVERED)
    ended_ns = 0 if firing else START_NS + 9 * NS_PER_S
    return Notice("msg_1", "oncall", Cause.FIRST if firing else Cause.RESOLVED, firing, what, START_NS, ended_ns, labels, (plan(),),
                  (action(ActionStatus.VERIFIED, reason="steps advance"),))  # fmt: skip


def test_golden_payload() -> None:
    bodies = {
        name: payload(notice(name == "firing"), "http://127.0.0.1:9480", "/run/KILL_SWITCH")
        for name in ("firing", "resolved")
    }
    assert bodies == json.loads(GOLDEN.read_text()), (
        "additive changes only: write the new golden file by hand and say why"
    )


def test_shape_that_every_receiver_of_version_4_parses() -> None:
    body = payload(notice(), "http://page", "")
    assert {"version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels", "commonAnnotations",
            "externalURL", "alerts"} <= set(body)  # fmt: skip
    (alert,) = body["alerts"]
    assert {"status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint"} == set(alert)
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert len(alert["fingerprint"]) == 16
    assert int(alert["fingerprint"], 16)
    assert all(isinstance(value, str) for value in [*alert["labels"].values(), *alert["annotations"].values()])
    json.dumps(body, allow_nan=False)


def test_what_a_phone_shows() -> None:
    assert headline(incident()) == "[critical] llm stands: rank 2 on n2 is frozen - 92% sure"
    assert headline(incident(title="", culprits=())) == "[critical] rank_frozen in job llm (nobody to blame) - 92% sure"
    assert what_was_done(notice()) == "plan: verified, mode auto (steps advance)"


def test_the_standard_s_own_vector() -> None:
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = sign([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_both_secrets_sign_during_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n\nan older secret of ours\n")
    signatures = sign(read_secrets(path), "m", 1, b"{}")["webhook-signature"].split(" ")
    assert len(signatures) == 2
    assert all(signature.startswith("v1,") for signature in signatures)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "empty"), ("whsec_***", "not base64"), ("short", "at least 16"), (None, "cannot be read")],
)
def test_bad_secret_files_say_what_is_wrong(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_secrets(path)


PUBLIC, LOOPBACK = "93.184.216.34", "127.0.0.1"


@pytest.mark.parametrize(
    ("url", "address", "private", "http", "refused"),
    [
        ("https://r.example/x", PUBLIC, False, False, ""),
        ("http://r.example/x", PUBLIC, False, False, "speaks no TLS"),
        ("http://r.example/x", PUBLIC, False, True, ""),
        ("https://r.example/x", "10.1.2.3", False, False, "private"),
        ("https://r.example/x", "10.1.2.3", True, False, ""),
        ("http://r.example/x", LOOPBACK, True, False, ""),
        ("http://r.example/x", LOOPBACK, False, True, "private"),
        ("https://r.example/x", "169.254.169.254", True, True, "no receiver has"),
        ("https://r.example/x", "fe80::1%eth0", True, True, "no receiver has"),
        ("https://r.example/x", "::ffff:169.254.169.254", True, True, "no receiver has"),
        ("https://r.example/x", "::ffff:10.0.0.1", False, False, "private"),
        ("https://r.example/x", "64:ff9b::a00:1", False, False, "private"),
        ("https://r.example/x", "2002:7f00:1::", False, False, "private"),
        ("https://r.example/x", "fd00::1", False, False, "private"),
        ("https://r.example/x", "0.0.0.0", True, True, "no receiver has"),
        ("https://r.example/x", "224.0.0.1", True, True, "no receiver has"),
        ("https://r.example/x", "100.64.0.1", False, False, "private"),
        ("file:///etc/passwd", PUBLIC, True, True, "scheme"),
        ("gopher://r.example/", PUBLIC, True, True, "scheme"),
        ("https://user:pw@r.example/", PUBLIC, True, True, "user or password"),
        ("https://r.example:99999/", PUBLIC, True, True, "port"),
        ("https:///nohost", PUBLIC, True, True, "scheme"),
    ],
)
def test_where_a_notice_may_go(url: str, address: str, private: bool, http: bool, refused: str) -> None:
    def resolve(host: str, port: int) -> list[str]:
        return [address]

    if not refused:
        assert check_target(url, private, http, resolve).address == address
        return
    with pytest.raises(Refused, match=refused) as caught:
        check_target(url, private, http, resolve)
    assert "pw" not in str(caught.value)


def test_a_name_is_resolved_once_and_that_address_is_used() -> None:
    answers = iter([[LOOPBACK], [PUBLIC]])
    with Server() as server:
        url = f"http://rebinding.example:{server.port}/hook"
        reply = HttpSender(lambda host, port: next(answers)).send(
            Call(url, b"{}"), DeliverySettings(allow_private=True)
        )
    assert reply.status == 200
    assert server.seen[0]["host"] == f"rebinding.example:{server.port}"
    assert next(answers) == [PUBLIC], "it was asked once"


def test_redirects_are_not_followed() -> None:
    with Server() as target, Server(status=302, headers={"Location": f"http://127.0.0.1:{target.port}/"}) as server:
        reply = HttpSender().send(Call(f"http://127.0.0.1:{server.port}/", b"{}"), DeliverySettings(allow_private=True))
    assert reply.status == 302
    assert target.seen == []


def test_replies_are_cut() -> None:
    with Server(body=b"x" * 1_000_000) as server:
        reply = HttpSender().send(Call(f"http://127.0.0.1:{server.port}/", b"{}"), DeliverySettings(allow_private=True))
    assert len(reply.body) == 4096


def test_a_url_is_shown_without_its_secrets() -> None:
    assert redact("https://u:p@hooks.slack.com:8443/services/T0/B0/xyz?token=1") == "https://hooks.slack.com:8443/..."


class Server:
    """A receiver on loopback."""

    def __init__(self, status: int = 200, headers: dict[str, str] | None = None, body: bytes = b"ok") -> None:
        self.seen: list[dict[str, Any]] = []
        outer, given = self, headers or {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                outer.seen.append(
                    {**{k.lower(): v for k, v in self.headers.items()}, "body": content, "path": self.path}
                )
                self.send_response(status)
                for name, value in {**given, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_the_whole_way_with_real_threads_and_sockets(tmp_path: Path, receiver: Server) -> None:
    (tmp_path / "secret").write_text("a secret of sufficient length\n")
    oncall = {"type": "webhook", "url": f"http://127.0.0.1:{receiver.port}/hook?a=b", "allow_private": True,
              "secret_file": str(tmp_path / "secret")}  # fmt: skip
    table = {"cluster": "c", "run_dir": str(tmp_path), "notify": {"oncall": oncall}}
    bus, stop = MemoryBus(), threading.Event()
    service = NotifyService(from_table(table), bus, SystemClock())
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    try:
        bus.append("tw.incidents", b"i0", encode(incident(1)))
        until(lambda: len(receiver.seen) == 1, stop.wait)
        bus.append("tw.incidents", b"i0", encode(incident(2, IncidentStatus.RECOVERED)))
        until(lambda: len(receiver.seen) == 2, stop.wait)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    first, second = receiver.seen
    assert first["path"] == "/hook?a=b"
    assert [json.loads(seen["body"])["status"] for seen in (first, second)] == ["firing", "resolved"]
    expected = sign(
        read_secrets(tmp_path / "secret"), first["webhook-id"], int(first["webhook-timestamp"]), first["body"]
    )
    assert first["webhook-signature"] == expected["webhook-signature"]


def test_in_the_background_of_the_action_service(tmp_path: Path, receiver: Server) -> None:
    oncall = {"type": "webhook", "url": f"http://127.0.0.1:{receiver.port}/", "allow_private": True}
    table = {
        "cluster": "c",
        "run_dir": str(tmp_path),
        "kafka": {"url": f"memory://{tmp_path.name}"},
        "notify": {"oncall": oncall},
    }
    MemoryBus.named(tmp_path.name).append("tw.incidents", b"i0", encode(incident(1)))
    with in_background(from_table(table)):
        until(lambda: len(receiver.seen) == 1, threading.Event().wait)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("notify")]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"type": "pigeon"}, "pigeon"),
        ({"type": "webhook", "urll": "x"}, "did you mean 'url'"),
        ({"type": "webhook", "repeat_s": "often"}, "repeat_s"),
    ],
)
def test_wrong_configuration_names_the_key(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_notifiers(from_table({"notify": {"oncall": table}}))


def test_a_receiver_can_be_switched_off() -> None:
    assert make_notifiers(from_table({"notify": {"oncall": {"type": "webhook", "enabled": False}}})) == []


def test_a_receiver_without_url_is_told_apart_from_one_that_is_down(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"url": ""})
    desk.say(incident(1))
    assert desk.deliver() == 0
    assert "neither url nor url_file" in desk.deliveries()[0].reason
