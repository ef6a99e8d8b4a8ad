"""The warden's gate: who may command, once, and never an older leader."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.commands import Command, Gate, canonical, sign
from trainwarden_hook.warden_state import Memory, StateFile

SECRET = b"0123456789abcdef"
NOW_NS = 1_000_000_000_000_000_000
S_NS = 1_000_000_000


class Fixture:
    """A gate over a real state file, with a clock and a list of what was executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ns = NOW_NS
        self.done: list[Command] = []
        self.open()

    def open(self) -> None:
        """As after a restart of the warden."""
        self.file = StateFile(str(self.folder))
        self.memory = self.file.load("n2", "j")
        self.gate = Gate(SECRET, self.memory, self.file, self.execute, lambda: self.now_ns)

    def close(self) -> None:
        self.file.close()

    def execute(self, command: Command) -> dict[str, Any]:
        self.done.append(command)
        return {"status": "done", "reason": "", "result": {"count": len(self.done)}}

    def send(self, secret: bytes = SECRET, **over: Any) -> tuple[int, dict[str, Any]]:
        command = {
            "id": f"id{len(self.done)}{over}",
            "verb": "kill",
            "node": "n2",
            "job": "j",
            "fence": 7,
            "issued_at_ns": NOW_NS,
            "expires_at_ns": NOW_NS + 5 * S_NS,
            "nonce": f"{abs(hash(str(over))):016x}"[:16],
            "args": {},
            **over,
        }
        body = canonical({key: value for key, value in command.items() if value is not ...})
        return self.gate.handle(body, sign(secret, body))


@pytest.fixture
def fixture(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "state")


def test_golden_signature_and_canonical_form() -> None:
    body = canonical({"verb": "stop", "args": {"b": 1, "a": [2, 3]}, "id": "x"})
    assert body == b'{"args":{"a":[2,3],"b":1},"id":"x","verb":"stop"}'
    assert sign(SECRET, body) == "7b023620f17b2e55f9d940726962ed33cf3bbb17237df0c9cab41b44335f89cd"


def test_a_good_command_is_executed(fixture: Fixture) -> None:
    code, answer = fixture.send(id="a")
    assert (code, answer["status"], answer["id"], answer["fence"]) == (200, "done", "a", 7)


def test_a_wrong_signature_is_401_and_nothing_happens(fixture: Fixture) -> None:
    code, answer = fixture.send(secret=b"another secret of someone else")
    assert code == 401
    assert "signature" in answer["reason"]
    assert not fixture.done


def test_a_signature_that_is_no_ascii_is_refused(fixture: Fixture) -> None:
    assert fixture.gate.handle(b"{}", "ä")[0] == 401


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"node": "n1"}, "node n2"),
        ({"job": "other"}, "job j"),
        ({"expires_at_ns": NOW_NS - 1}, "expired"),
        ({"issued_at_ns": NOW_NS + 60 * S_NS}, "future"),
    ],
)
def test_refusals_name_their_reason(fixture: Fixture, over: dict[str, Any], word: str) -> None:
    code, answer = fixture.send(**over)
    assert (code, answer["status"]) == (409, "refused")
    assert word in answer["reason"]
    assert not fixture.done


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"fence": "7"}, "fence"),
        ({"fence": True}, "fence"),
        ({"verb": "explode"}, "verb"),
        ({"args": []}, "args"),
        ({"nonce": ...}, "nonce"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_malformed_is_400_and_names_the_key(fixture: Fixture, over: dict[str, Any], word: str) -> None:
    code, answer = fixture.send(**over)
    assert code == 400
    assert word in answer["reason"]


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff\xfe", b'{"id":'])
def test_bytes_that_are_no_command(fixture: Fixture, body: bytes) -> None:
    assert fixture.gate.handle(body, sign(SECRET, body))[0] == 400


def test_a_nonce_counts_once(fixture: Fixture) -> None:
    fixture.send(id="a", nonce="0" * 16)
    code, answer = fixture.send(id="b", nonce="0" * 16)
    assert code == 409
    assert "nonce" in answer["reason"]


def test_the_same_id_gets_the_stored_answer_and_nothing_is_done_twice(fixture: Fixture) -> None:
    first = fixture.send(id="a", nonce="1" * 16)
    again = fixture.send(id="a", nonce="2" * 16)
    assert first == again
    assert len(fixture.done) == 1


def test_the_same_id_at_the_same_time_waits_for_the_first(fixture: Fixture) -> None:
    entered, leave = threading.Event(), threading.Event()
    plain = fixture.execute

    def slow(command: Command) -> dict[str, Any]:
        entered.set()
        leave.wait(60)
        return plain(command)

    fixture.gate = Gate(SECRET, fixture.memory, fixture.file, slow, lambda: NOW_NS)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(fixture.send(id="a", nonce="3" * 16))) for _ in range(2)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(60)
    assert len(fixture.done) == 1
    assert answers[0] == answers[1]


def test_a_lower_fence_is_refused_for_good(fixture: Fixture) -> None:
    fixture.send(fence=9)
    code, answer = fixture.send(fence=8)
    assert code == 409
    assert answer["fence"] == 9
    fixture.close()
    fixture.open()
    assert fixture.send(fence=8, id="after a restart")[0] == 409
    assert fixture.send(fence=9, id="the leader")[0] == 200


def test_answers_and_nonces_survive_a_restart(fixture: Fixture) -> None:
    first = fixture.send(id="a", nonce="4" * 16)
    fixture.close()
    fixture.open()
    assert fixture.send(id="a", nonce="5" * 16) == first
    assert fixture.send(id="b", nonce="4" * 16)[0] == 409
    assert len(fixture.done) == 1


def test_a_refused_command_raises_no_fence(fixture: Fixture) -> None:
    fixture.send(fence=100, node="n1")
    assert fixture.send(fence=7)[0] == 200


def test_expired_nonces_are_forgotten(fixture: Fixture) -> None:
    fixture.send(nonce="6" * 16)
    fixture.now_ns += 10 * S_NS
    fixture.send(id="later", expires_at_ns=fixture.now_ns + S_NS)
    assert "6" * 16 not in fixture.memory.nonces


def test_a_crash_between_gate_and_answer_executes_again(fixture: Fixture) -> None:
    def die(_: Command) -> tuple[int, dict[str, Any]]:
        raise KeyboardInterrupt

    fixture.gate._run = die  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        fixture.send(id="a", nonce="7" * 16)
    fixture.close()
    fixture.open()
    assert fixture.send(id="a", nonce="7" * 16)[0] == 200


def test_a_damaged_state_is_an_error_and_not_a_lost_fence(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path))
    file.save(Memory("n2", "j", fence=5))
    path = tmp_path / "warden.json"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="cannot be read"):
        file.load("n2", "j")


def test_a_state_of_another_node_is_refused(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path))
    file.save(Memory("n1", "j"))
    with pytest.raises(UsageError, match="node n1"):
        file.load("n2", "j")


def test_two_wardens_cannot_share_a_state_directory(tmp_path: Path) -> None:
    first = StateFile(str(tmp_path))
    with pytest.raises(UsageError, match="another warden"):
        StateFile(str(tmp_path))
    first.close()
    StateFile(str(tmp_path)).close()


def test_a_disk_that_fills_up_during_a_command_does_not_block_its_repetition(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = fixture.file.save, [0]

    def full_at_the_second(memory: Memory) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(28, "No space left on device")
        plain(memory)

    monkeypatch.setattr(fixture.file, "save", full_at_the_second)
    answers = [fixture.send(id="a", nonce="8" * 16)]
    again = threading.Thread(target=lambda: answers.append(fixture.send(id="a", nonce="9" * 16)), daemon=True)
    again.start()
    again.join(60)
    assert not again.is_alive(), "the id waits for ever for an answer that was given"
    assert [answer["status"] for _, answer in answers] == ["done", "done"]
    assert len(fixture.done) == 1
