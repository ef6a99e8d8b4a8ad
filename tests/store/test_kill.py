"""Kill -9 of a real writer process at random moments: every published row is there once, in the tables and in the roll-ups."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import ClickHouseError

from streams.store.connect import connect
from streams.store.service import make_topics
from tests.store.make_records import catalogs, log, publish, steps, tick
from tests.store.server import StoreProcess
from trainwarden.bus import Bus
from trainwarden.bus import connect as connect_bus
from trainwarden.clock import SystemClock
from trainwarden.config import StoreConfig
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import TrainwardenError
from trainwarden.topics import node_block

NODES = 8
LIMIT_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(
    params=[pytest.param("tansu", marks=pytest.mark.faults), pytest.param("kafka", marks=pytest.mark.kafka)]
)
def bus_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A broker that this test has to itself where that is cheap."""
    if request.param == "kafka":
        yield f"kafka://{request.getfixturevalue('kafka').bootstrap}"
        return
    with TansuBroker(tmp_path / "tansu.log") as broker:
        yield f"kafka://{broker.bootstrap}"


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """Two in `make test`; the moments that matter are tried one by one in test_writer."""
    return 4 if "tansu" in request.node.name else 2


class Feed:
    """Publishes ticks, steps and logs until told to stop, and knows how many."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._publisher = bus.publisher()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go)
        self.run = run
        self.rounds = 0

    def __enter__(self) -> Feed:
        publish(self._bus, [("tw.catalog", c.catalog_id.encode(), c) for c in catalogs()])
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._publisher.close()

    def _go(self) -> None:
        while not self._stop.wait(0.05):
            nodes = [f"{self.run}n{number}" for number in range(NODES)]
            publish(self._bus, [
                *(("tw.ticks", node_block(node), tick(self.rounds, node, rank)) for rank, node in enumerate(nodes)),
                *(("tw.steps", self.run.encode(), steps(self.rounds * 5, 5, rank, node)) for rank, node in enumerate(nodes)),
                ("tw.logs", b"b", log(self.rounds, node=nodes[0])),
            ], self._publisher)  # fmt: skip
            self.rounds += 1


def start_writer(bus_url: str, store_url: str, log_path: Path, *directory: str) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as output:
        command = [sys.executable, "-m", "tests.store.writer_process", bus_url, store_url, *directory]
        return subprocess.Popen(command, stdout=output, stderr=output)


def counts(url: str, run: str) -> dict[str, Any] | None:
    """What the store has of a run; None while it cannot say."""
    try:
        client = connect(url)
    except TrainwardenError:
        return None
    try:
        where = f"startsWith(node, '{run}')"
        ask = {
            "ticks": f"SELECT count() FROM host_ticks WHERE {where}",
            "ticks_once": f"SELECT uniqExact(node, seq) FROM host_ticks WHERE {where}",
            "ports": f"SELECT count() FROM nic_ticks WHERE {where}",
            "steps": f"SELECT count() FROM steps WHERE {where}",
            "steps_once": f"SELECT uniqExact(node, step) FROM steps WHERE {where}",
            "logs": f"SELECT count() FROM log_events WHERE {where}",
            "host_1m": f"SELECT sum(samples) FROM host_1m WHERE {where}",
            "nic_1m": f"SELECT sum(samples) FROM nic_1m WHERE {where}",
            "steps_1m": f"SELECT sum(steps) FROM steps_1m WHERE {where}",
        }
        return {name: client.query(query).result_rows[0][0] for name, query in ask.items()}
    except ClickHouseError:
        return None  # not migrated yet, or killed just now
    finally:
        client.close()


def expected(rounds: int) -> dict[str, int]:
    ticks, made = rounds * NODES, rounds * NODES * 5
    return {"ticks": ticks, "ticks_once": ticks, "ports": 2 * ticks, "steps": made, "steps_once": made, "logs": rounds, "host_1m": ticks,
            "nic_1m": 2 * ticks, "steps_1m": made}  # fmt: skip


def wait_for(url: str, feed: Feed) -> dict[str, Any] | None:
    """Counts once all that was published is there (or more), or at the time limit."""
    deadline = time.monotonic() + LIMIT_S
    found = None
    while time.monotonic() < deadline:
        found = counts(url, feed.run)
        if found is not None and all(found[name] >= count for name, count in expected(feed.rounds).items()):
            break
        time.sleep(0.3)
    return found


def kill_while_feeding(bus: Bus, feed: Feed, start: Any, seen: Any, kills: int, seed: int) -> None:
    """Start a writer, let it get going, kill it at a random moment; again and again."""
    dice = random.Random(seed)
    with feed:
        for _ in range(kills):
            before, writer = seen(), start()
            deadline = time.monotonic() + LIMIT_S
            while seen() <= before and time.monotonic() < deadline:
                assert writer.poll() is None, "the writer ended by itself"
                time.sleep(0.05)
            time.sleep(dice.uniform(0.0, 0.7))
            writer.kill()
            writer.wait()


def test_killed_writer_loses_and_doubles_nothing(
    bus_url: str, store: StoreProcess, store_url: str, tmp_path: Path, kills: int
) -> None:
    bus = connect_bus(bus_url)
    bus.wait_ready(30)
    make_topics(bus, SystemClock())
    feed = Feed(bus, f"r{random.randrange(10**6)}")

    def seen() -> int:
        found = counts(store_url, feed.run)
        return int(found["ticks"]) if found else 0

    def start() -> subprocess.Popen[bytes]:
        return start_writer(bus_url, store_url, tmp_path / "writer.log")

    kill_while_feeding(bus, feed, start, seen, kills, seed=7)
    last = start()
    try:
        assert wait_for(store_url, feed) == expected(feed.rounds)
    finally:
        last.terminate()
        assert last.wait(90) == 0
    assert counts(store_url, feed.run) == expected(feed.rounds)


def test_killed_embedded_store_loses_and_doubles_nothing(bus_url: str, tmp_path: Path, kills: int) -> None:
    bus = connect_bus(bus_url)
    bus.wait_ready(30)
    make_topics(bus, SystemClock())
    feed = Feed(bus, f"r{random.randrange(10**6)}")
    url = f"clickhouse://127.0.0.1:{free_port()}/trainwarden"

    def seen() -> int:
        found = counts(url, feed.run)
        return int(found["ticks"]) if found else 0

    def start() -> subprocess.Popen[bytes]:
        return start_writer(bus_url, url, tmp_path / "writer.log", str(tmp_path / "chdb"))

    kill_while_feeding(bus, feed, start, seen, kills, seed=11)
    last = start()
    try:
        assert wait_for(url, feed) == expected(feed.rounds)
        told = {named for named in priorities(last.pid) if named[0] in ("MergeMutate", "BgSchPool")}
        nice = min(os.nice(0) + StoreConfig().nice, 19)
        assert told == {("MergeMutate", nice), ("BgSchPool", nice)}
    finally:
        last.terminate()
        assert last.wait(90) == 0


def priorities(pid: int) -> set[tuple[str, int]]:
    """Name and nice value of each thread of a process; of one that ends meanwhile nothing."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            found.add((name, os.getpriority(os.PRIO_PROCESS, int(task.name))))
    return found
