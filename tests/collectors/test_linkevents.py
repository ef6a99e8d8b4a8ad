"""What a warden tells of links becomes log events that blame the node only for its own link."""

from __future__ import annotations

import json
from typing import Any

import pytest

from collectors.linkevents import link_events
from collectors.sources.steps import parse
from detectors.rules.codes import meaning_of
from trainwarden.records import LogEvent


def events(**fields: Any) -> tuple[LogEvent, ...]:
    body = {"v": 1, "t": "link", "job": "j", "generation": 2, "node": "n1", "rank": 0, **fields}
    return link_events(parse(json.dumps(body).encode()))


MOVED = {
    "event": "moved", "rail": "a", "interface": "eth0", "to": "b", "cause": "no_carrier", "peers": "n0,n2", "peer_count": 2,
    "own": True, "hold_s": 0.06, "took_us": 200, "at_ns": 5,
}  # fmt: skip


def test_a_move_off_an_own_dead_link_is_an_incident_of_its_own_kind() -> None:
    (event,) = events(**MOVED)
    assert (event.code, event.severity, event.job, event.attempt) == ("link_moved", "warning", "j", 2)
    assert event.line == "link_moved rail a (eth0) to rail b, 2 peers: no_carrier"
    assert event.attributes == {
        "rail": "a", "to": "b", "interface": "eth0", "cause": "no_carrier", "peers": "n0,n2", "peer_count": "2", "hold_s": "0.06",
        "at_ns": "5",
    }  # fmt: skip
    meaning = meaning_of(event)
    assert meaning is not None
    assert meaning.kind == "link_rerouted"


def test_a_move_because_of_the_far_end_blames_nobody() -> None:
    (event,) = events(**{**MOVED, "cause": "far_end", "own": False})
    assert event.severity == "info"
    assert meaning_of(event) is None


@pytest.mark.parametrize(
    ("fields", "codes", "kinds"),
    [
        ({"event": "returned", "rail": "a", "settled": False}, ["link_returned"], [None]),
        ({"event": "returned", "rail": "a", "settled": True}, ["link_returned", "link_settled"], [None, None]),
        ({"event": "lost", "rail": "b", "settled": True}, ["link_lost", "link_settled"], ["suspect_code", None]),
        ({"event": "silent", "rail": "a"}, ["link_silent"], [None]),
        ({"event": "nccl_moved", "interface": "mlx5_1"}, ["nccl_moved"], ["suspect_code"]),
        ({"event": "nccl_port_up", "interface": "mlx5_1"}, ["nccl_port_up"], [None]),
        ({}, ["link_unknown"], [None]),
    ],
)
def test_the_other_events(fields: dict[str, Any], codes: list[str], kinds: list[str | None]) -> None:
    told = events(**fields)
    assert [event.code for event in told] == codes
    assert [meaning.kind if (meaning := meaning_of(event)) else None for event in told] == kinds
