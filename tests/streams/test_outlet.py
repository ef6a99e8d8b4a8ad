"""What the worker publishes: waits for the broker, but for no message that it will never take; and how a leader begins."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, MessageSizeTooLargeError

from streams import app
from streams.stage import CorrelatorStage, Output
from trainwarden.bus import Message
from trainwarden.clock import SystemClock
from trainwarden.config import Config, from_table
from trainwarden.records import DeadLetter, decode
from trainwarden.selfmetrics import Metrics
from trainwarden.topics import DEAD, VERDICTS

LARGE = b"x" * 2_000_000
LIMIT_BYTES = 1_000_000


class Sent:
    def __init__(self, offset: int) -> None:
        self.offset = offset


class Broker:
    """Refuses too large messages, as a client (when it is asked to send) or as a broker (when it answers)."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.topics: dict[str, list[bytes]] = {}
        self.away = 1

    async def send(self, topic: str, value: bytes, key: bytes) -> asyncio.Future[Sent]:
        answer: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()
        if self.away:
            self.away -= 1
            raise KafkaConnectionError("away")
        if len(value) > LIMIT_BYTES:
            if self.at_once:
                raise MessageSizeTooLargeError("too large")
            answer.set_exception(MessageSizeTooLargeError("too large"))
        else:
            kept = self.topics.setdefault(topic, [])
            kept.append(value)
            answer.set_result(Sent(len(kept) - 1))
        return answer


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return from_table({"cluster": "c", "run_dir": str(tmp_path), "kafka": {"url": "kafka://127.0.0.1:9"}})


class NoBus:
    def wait_ready(self, timeout_s: float) -> None:
        pass

    def ensure_topics(self, topics: Any) -> None:
        pass


@pytest.mark.parametrize("at_once", [True, False])
def test_a_message_that_no_broker_takes_is_a_dead_letter_and_the_others_go_out(
    at_once: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(at_once)
    monkeypatch.setattr(app, "AIOKafkaProducer", lambda **_: broker)
    monkeypatch.setattr(app, "connect", lambda url: NoBus())
    monkeypatch.setattr(app, "RETRY_S", 0.01)

    async def deliver() -> dict[str, int]:
        outlet = app.Outlet(config, SystemClock())
        outputs = [Output("a", b"1", b"one"), Output("a", b"2", LARGE), Output("b", b"3", b"three")]
        return await asyncio.wait_for(outlet.deliver(outputs), 20)

    offsets = asyncio.run(deliver())
    assert broker.topics["b"][-1] == b"three"
    assert set(broker.topics["a"]) == {b"one"}
    assert offsets["b"] == len(broker.topics["b"]) - 1
    letter = decode(broker.topics["tw.dead"][0])
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.key, letter.offset) == ("a", b"2", -1)
    assert "no broker takes it" in letter.reason
    assert len(broker.topics["tw.dead"]) == 1


def test_a_verdict_that_breaks_the_correlator_does_not_keep_the_next_leader_from_leading(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    led, seen = [], []

    async def read_all(config: Config, topic: str, start: int = 0, since_ms: int | None = None) -> list[Message]:
        found = [Message(topic, 0, offset, b"k", value, 0) for offset, value in enumerate((b"poison", b"good"))]
        return found if topic == VERDICTS.name else []

    def take(stage: CorrelatorStage, message: Message) -> None:
        seen.append(message.value)
        if message.value == b"poison":
            raise ZeroDivisionError

    async def run(service: app.RawService) -> None:
        led.append(service)

    monkeypatch.setattr(app, "AIOKafkaProducer", lambda **_: Broker(at_once=True))
    monkeypatch.setattr(app, "connect", lambda url: NoBus())
    monkeypatch.setattr(app, "read_all", read_all)
    monkeypatch.setattr(CorrelatorStage, "take", take)
    monkeypatch.setattr(app.RawService, "run", run)

    async def lead() -> list[Output]:
        application = app.Application(config, Metrics("worker"), SystemClock())
        await application._lead_once()
        return application._correlator.tick()

    outputs = asyncio.run(lead())
    assert seen == [b"poison", b"good"]
    assert len(led) == 1
    assert [output.topic for output in outputs] == [DEAD.name]
