"""A collector in a network namespace is cut off from the broker, silently, and comes back: nothing is lost, its node is said to be silent
and nothing else, and that is taken back."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streams.store.connect import connect
from tests.faults.running.test_reconcile import assert_equal, of_store, of_topics
from tests.faults.theatre import Theatre, wait_for
from trainwarden.demo.network import Namespaces
from trainwarden.embedded.kafka import ApacheKafka
from trainwarden.records import IncidentStatus, LogEvent, Reach, StepReport, Tick

CUT_S = float(os.environ.get("TRAINWARDEN_CUT_S", "60"))
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.torch,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900 + CUT_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

NOBODY = "02:00:00:00:00:99"
"""A hardware address that no port of the bridge has: what is sent there is lost without a word."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Spaces(Namespaces):
    """Namespaces with a broker on an address of its own, so that a node can be cut off from it alone."""

    @property
    def broker_address(self) -> str:
        return f"10.79.{self.subnet}.1"

    @contextmanager
    def with_broker(self) -> Iterator[None]:
        """The broker's address, before there is any node."""
        device = f"twk{self.seat.number}"
        ip("link", "add", device, "type", "bridge")
        try:
            ip("addr", "add", f"{self.broker_address}/32", "dev", device)
            ip("link", "set", device, "up")
            yield
        finally:
            ip("link", "del", device)

    def up(self, nodes: int) -> None:
        super().up(nodes)
        for number in range(nodes):
            self.join(number)

    def join(self, number: int) -> None:
        """The node's way to the broker."""
        ip("-n", self.namespace(number), "route", "replace", f"{self.broker_address}/32", "via", self.host_address)

    @contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """The same way leads nowhere."""
        nowhere = f"10.78.{self.subnet}.254"
        ip(
            "-n",
            self.namespace(number),
            "neigh",
            "replace",
            nowhere,
            "lladdr",
            NOBODY,
            "dev",
            "mgmt0",
            "nud",
            "permanent",
        )
        ip("-n", self.namespace(number), "route", "replace", f"{self.broker_address}/32", "via", nowhere)
        try:
            yield
        finally:
            self.join(number)


@pytest.fixture
def spaces() -> Spaces:
    return Spaces()


@pytest.fixture
def play(kafka_runtime: None, spaces: Spaces, tmp_path: Path) -> Iterator[Theatre]:
    with spaces.with_broker():
        kafka = ApacheKafka(tmp_path / "kafka", host=spaces.broker_address)
        made = Theatre(tmp_path, network=spaces, kafka=kafka)
        try:
            made.start()
            yield made
        finally:
            made.stop()


def furthest(play: Theatre) -> int:
    return max(row.step for row in play.observed.attempts[play.observed.newest_attempt].last.values())


def test_a_collector_that_is_cut_off_from_the_broker_loses_nothing_and_is_said_to_be_silent(
    play: Theatre, spaces: Spaces
) -> None:
    play.ready()
    attempt, before, pids = play.observed.newest_attempt, furthest(play), play.pids()

    def of_n1() -> list[tuple[str, IncidentStatus, Reach]]:
        return [
            (i.kind, i.status, i.reach)
            for i in play.observed.loud_incidents()
            if any(c.node == "n1" for c in i.culprits)
        ]

    with spaces.cut(1):
        begun_s = time.monotonic()
        wait_for(
            "the node to be called silent", lambda: "telemetry_lost" in {kind for kind, _, _ in of_n1()}, CUT_S + 60
        )
        wait_for("the end of the cut", lambda: time.monotonic() - begun_s >= CUT_S, CUT_S + 60)
        assert play.spooled(1) > 4096
        assert furthest(play) > before + 100, "the others train on, and so does the node"
    play.drained()
    wait_for("the word to be taken back", lambda: all(status is IncidentStatus.CLOSED for _, status, _ in of_n1()))
    play.trains()
    assert not [told for told in of_n1() if told[2] is Reach.ACT]
    assert play.observed.newest_attempt == attempt
    assert play.pids() == pids
    play.assert_no_gaps(Tick, StepReport, LogEvent)
    play.healed(play.hurt("kill", 1))
    stored_as_said(play)


def stored_as_said(play: Theatre) -> None:
    """No row is missing in the store, and none is there twice."""
    for child in play.cluster.children.all():
        if child.name.startswith("collector") or child.name in ("worker", "actions"):
            play.cluster.children.stop(child.name)
    expected, client = of_topics(play), connect(play.cluster.store_url)
    try:
        wait_for("the store to catch up", lambda: all(of_store(client)[n] >= count for n, count in expected.items()))
        assert_equal(of_store(client), expected)
    finally:
        client.close()
