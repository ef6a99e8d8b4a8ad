"""Delivery: retries with jitter, order, giving up, restarts, what is final; and nothing secret in a log."""

from __future__ import annotations

import http.client
import json
import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actions.notify.base import Notice, Reply
from actions.notify.guard import Refused
from actions.notify.webhook import retry_after_s
from tests.notify.make_notices import Desk, incident
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Incident, IncidentStatus, decode, encode

N3 = (Entity(EntityKind.NODE, "n3"),)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.service.couriers[0]._dice = random.Random(1)
    return made


def pass_time(desk: Desk, seconds: float) -> int:
    """Let time pass in steps of 0.1 s, delivering; the number of attempts."""
    attempts = 0
    for _ in range(round(seconds * 10)):
        desk.clock.advance_ns(NS_PER_S // 10)
        attempts += desk.deliver()
    return attempts


def test_delivered_once(desk: Desk) -> None:
    desk.say(incident(1))
    assert desk.deliver() == 1
    assert pass_time(desk, 100) == 0
    (delivery,) = desk.deliveries()
    assert (delivery.receiver, delivery.cause, delivery.attempt, delivery.status) == ("oncall", "first", 1, "sent")
    assert desk.metrics.value("tw_deliveries_total", receiver="oncall", status="sent") == 1


@pytest.mark.parametrize(
    "failure", [Reply(503), Reply(429), Reply(408), ConnectionRefusedError(111, "Connection refused"), TimeoutError()]
)
def test_what_may_pass_is_tried_again_with_the_same_bytes(desk: Desk, failure: Reply | Exception) -> None:
    desk.sender.script = [failure, failure, failure, Reply(204)]
    desk.say(incident(1))
    desk.deliver()
    pass_time(desk, 30)
    assert len(desk.sender.calls) == 4
    assert len({call.body for call in desk.sender.calls}) == 1
    assert len({call.headers["webhook-id"] for call in desk.sender.calls}) == 1
    assert [d.status for d in desk.deliveries()] == ["retry", "retry", "retry", "sent"]


def test_pauses_double_up_to_a_minute_and_jitter(desk: Desk) -> None:
    courier = desk.service.couriers[0]
    ceilings = [1, 2, 4, 8, 16, 32, 60, 60]
    for attempts, ceiling in enumerate(ceilings, start=1):
        pauses = [courier._pause_s(attempts, 0.0) for _ in range(300)]
        assert 0 < min(pauses) < 0.2 * ceiling
        assert 0.8 * ceiling < max(pauses) <= ceiling
    assert courier._pause_s(1, 45.0) == 45.0


def test_retry_after_is_obeyed(desk: Desk) -> None:
    desk.sender.script = [Reply(429, {"retry-after": "120"}), Reply(200)]
    desk.say(incident(1))
    desk.deliver()
    assert pass_time(desk, 119) == 0
    assert pass_time(desk, 2) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "99999999"}, 600.0),
        ({"retry-after": "Sat, 29 Nov 2025 07:08:00 GMT", "date": "Sat, 29 Nov 2025 07:07:00 GMT"}, 60.0),
        ({"retry-after": "Sat, 29 Nov 2025 07:06:00 GMT", "date": "Sat, 29 Nov 2025 07:07:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "²"}, 0.0),
        ({"retry-after": "9" * 5000}, 600.0),
        ({}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    "final", [Reply(400), Reply(401), Reply(404), Reply(410), Reply(301, {"location": "/"}), Refused("no")]
)
def test_what_is_final_is_not_tried_again(desk: Desk, final: Reply | Exception) -> None:
    desk.sender.script = [final]
    desk.say(incident(1))
    assert desk.deliver() == 1
    assert pass_time(desk, 300) == 0
    assert [d.status for d in desk.deliveries()] == ["failed"]


def test_it_gives_up_in_the_end_and_says_so(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {"give_up_s": "2m"})
    desk.sender.script = [Reply(500)]
    desk.say(incident(1))
    desk.deliver()
    attempts = 1 + pass_time(desk, 400)
    last = desk.deliveries()[-1]
    assert (last.status, last.attempt) == ("failed", attempts)
    assert f"given up after {attempts} attempts: HTTP 500" in last.reason
    assert desk.service.outbox.waiting() == (0, 0)


def test_an_end_whose_beginning_never_arrived_is_dropped(desk: Desk) -> None:
    desk.sender.script = [Reply(400)]
    desk.say(incident(1))
    desk.deliver()
    desk.sender.script = [Reply(200)]
    desk.say(incident(2, IncidentStatus.CLOSED))
    assert desk.deliver() == 0
    assert [d.status for d in desk.deliveries()] == ["failed", "dropped"]


def test_order_of_revisions_is_kept_while_one_is_tried_again(desk: Desk) -> None:
    desk.sender.script = [Reply(500), Reply(500), Reply(200)]
    desk.say(
        incident(1),
        incident(2, culprits=N3),
        incident(3, IncidentStatus.CLOSED),
        incident(1, incident_id="i1", dedup_key="d1"),
    )
    desk.deliver()
    pass_time(desk, 60)
    sent = [json.loads(call.body)["trainwarden"] for call in desk.sender.calls]
    assert [(own["incident_id"], own["revision"]) for own in sent if own["incident_id"] == "i0"][-3:] == [
        ("i0", 1),
        ("i0", 2),
        ("i0", 3),
    ]
    assert sum(own["incident_id"] == "i1" for own in sent) >= 1, "another incident does not wait for this one"


def test_a_restart_forgets_and_repeats_nothing(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.sender.script = [Reply(503)]
    before.say(incident(1))
    before.deliver()
    before.service.close()
    after = Desk(tmp_path, bus=before.bus, clock=before.clock)
    pass_time(after, 3)
    assert after.causes() == ["first"]
    assert after.sender.calls[0].body == before.sender.calls[0].body
    after.say(incident(2, culprits=N3))
    after.deliver()
    assert after.causes() == ["first", "changed"]


def test_killed_before_the_commit_tells_nobody_twice(tmp_path: Path) -> None:
    before = Desk(tmp_path)
    before.bus.append("tw.incidents", b"i0", encode(incident(1)))
    before.service.take(before._reader.poll(0))
    before.deliver()
    before.service.close()
    after = Desk(tmp_path, bus=before.bus, clock=before.clock)
    after.hear()
    assert after.deliver() == 0
    assert before.causes() == ["first"]


def test_malformed_records_are_dead_letters(desk: Desk) -> None:
    desk.bus.append("tw.incidents", b"i0", b"\xc1garbage")
    desk.say(incident(1))
    assert desk.deliver() == 1
    assert len(desk.bus.subscriber(["tw.dead"]).poll(0)) == 1
    assert desk.metrics.value("tw_dead_letters_total", topic="tw.incidents") == 1


def test_nothing_secret_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, token = "whsec_" + "c2VjcmV0c2VjcmV0c2VjcmV0", "T0KEN-in-the-path"
    (tmp_path / "secret").write_text(secret + "\n")
    desk = Desk(tmp_path, {"url": f"https://hooks.example/{token}", "secret_file": str(tmp_path / "secret")})
    desk.sender.script = [
        Reply(500, body=b"x" * 5000),
        invalid_url_with(token),
        Reply(403, body=f"bad {chr(10)} body".encode()),
    ]
    with caplog.at_level(logging.DEBUG):
        desk.say(incident(1))
        desk.deliver()
        pass_time(desk, 30)
    told = caplog.text + repr(desk.deliveries())
    assert "HTTP 500" in told
    assert "x" * 201 not in told
    for hidden in (secret, token, "c2VjcmV0"):
        assert hidden not in told


def invalid_url_with(text: str) -> Exception:
    """A transport error whose text holds the url, as some of urllib's do."""
    return http.client.InvalidURL(f"nonnumeric port in https://hooks.example/{text}")


def test_a_second_process_stands_by(tmp_path: Path) -> None:
    first, second = Desk(tmp_path), Desk(tmp_path)
    assert first.service.outbox.take()
    assert not second.service.outbox.take()
    first.service.close()
    assert second.service.outbox.take()
    second.service.close()


def test_what_nobody_thought_of_is_tried_again_later_and_holds_up_no_other_incident(desk: Desk) -> None:
    desk.sender.script = [UnicodeError("label empty or too long"), Reply(200)]
    desk.say(incident(1), incident(1, incident_id="i1", dedup_key="d1"))
    desk.deliver()
    pass_time(desk, 30)
    assert sorted(d.status for d in desk.deliveries()) == ["retry", "sent", "sent"]


def test_a_commit_that_fails_leaves_no_transaction_open(desk: Desk) -> None:
    box = desk.service.outbox
    real = box._db

    class FullAtCommit:
        def execute(self, statement: str, values: Any = ()) -> object:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("database or disk is full")
            return real.execute(statement, values)

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    box._db = FullAtCommit()  # type: ignore[assignment]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        desk.say(incident(1))
    box._db = real
    assert box.incident("i0") is None
    desk.say(incident(1, incident_id="i1", dedup_key="d1"))
    assert desk.deliver() == 1


def running(desk: Desk, work: Callable[[], None]) -> None:
    """Do `work` while the service runs in a thread; it must end when told to."""
    stop = threading.Event()
    thread = threading.Thread(target=desk.service.run, args=(stop,), daemon=True)
    thread.start()
    try:
        work()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def wait_for_calls(desk: Desk, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(desk.sender.calls) < count:
        assert time.monotonic() < deadline, "nobody was told"
        time.sleep(0.02)


def test_a_disk_that_is_full_for_a_while_delays_the_pager_and_does_not_end_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, failed = desk.service.outbox.learn_incident, threading.Event()

    def full_once(news: Incident, now_ns: int) -> bool:
        if not failed.is_set():
            failed.set()
            raise sqlite3.OperationalError("database or disk is full")
        return plain(news, now_ns)

    monkeypatch.setattr(desk.service.outbox, "learn_incident", full_once)
    desk.bus.append("tw.incidents", b"i0", encode(incident(1)))
    running(desk, lambda: wait_for_calls(desk, 1))


def test_an_incident_that_cannot_be_rendered_is_a_dead_letter_and_others_are_told(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = desk.service.notifiers[0]
    plain = notifier.render

    def render(notice: Notice) -> bytes:
        if notice.incident.incident_id == "i0":
            raise ValueError("year 60000 is out of range")
        return plain(notice)

    monkeypatch.setattr(notifier, "render", render)
    for name in ("i0", "i1"):
        desk.bus.append("tw.incidents", b"i0", encode(incident(1, incident_id=name, dedup_key=name)))
    running(desk, lambda: wait_for_calls(desk, 1))
    (letter,) = (decode(message.value) for message in desk.bus.subscriber(["tw.dead"]).poll(0))
    assert "year 60000" in letter.reason
