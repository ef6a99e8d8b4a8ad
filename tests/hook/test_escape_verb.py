"""The warden's verb `reroute`: checked, remembered over a restart, and refused where there is nothing to move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from trainwarden_hook.addresses import UsageError
from trainwarden_hook.warden_links import WardenLinks
from trainwarden_hook.warden_state import Memory


class FakeClient:
    """Stands for the process that watches the links."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failure: Exception | None = None

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append({"verb": verb, **arguments})
        if self.failure is not None:
            raise self.failure
        return {"rail": "a", "moves": [{"peer": "n0", "from": "a", "to": "b"}], "avoided": [["a", "n0"]]}


@pytest.fixture
def links() -> WardenLinks:
    made = WardenLinks.__new__(WardenLinks)
    made._memory, made._lock = Memory("n1", "j"), threading.Lock()
    made._client = FakeClient()  # type: ignore[assignment]
    return made


def persist_in(memory: Memory) -> Callable[[Callable[[Memory], None]], None]:
    return lambda change: change(memory)


def test_an_order_is_carried_out_and_remembered(links: WardenLinks) -> None:
    memory = links._memory
    answer = links.reroute({"rail": "a", "peers": ["n0"]}, persist_in(memory))
    assert answer["status"] == "done"
    assert answer["result"] == {"rail": "a", "moves": [{"peer": "n0", "from": "a", "to": "b"}]}
    assert answer["reason"] == "rail a is out of use until this is undone; 1 peer(s) move"
    assert memory.avoided == [["a", "n0"]]
    assert links._client.asked == [  # type: ignore[attr-defined]
        {"verb": "order", "rail": "a", "peers": ["n0"], "undo": False, "dry_run": False}
    ]


def test_a_dry_run_is_not_remembered(links: WardenLinks) -> None:
    answer = links.reroute({"dry_run": True}, persist_in(links._memory))
    assert answer["reason"].startswith("dry run: rail a is out of use")
    assert links._memory.avoided == []


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"rial": "a"}, "unknown argument 'rial'"),
        ({"peers": "n0"}, "peers is 'n0', expected a list of nodes"),
        ({"peers": [1]}, "expected a list of nodes"),
        ({"undo": "yes"}, "undo is 'yes', expected true or false"),
        ({"rail": 1}, "rail is 1, expected the name of a rail"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(
    links: WardenLinks, args: dict[str, Any], sentence: str
) -> None:
    answer = links.reroute(args, persist_in(links._memory))
    assert answer["status"] == "refused"
    assert sentence in answer["reason"]
    assert links._client.asked == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failure", "status"),
    [(UsageError("there is no rail 'c'; the rails are a, b"), "refused"), (TimeoutError("timed out"), "failed")],
)
def test_an_order_that_fails_changes_no_memory(links: WardenLinks, failure: Exception, status: str) -> None:
    links._client.failure = failure  # type: ignore[attr-defined]
    answer = links.reroute({"rail": "c"}, persist_in(links._memory))
    assert answer["status"] == status
    assert str(failure) in answer["reason"]
    assert links._memory.avoided == []
