"""The agent against a real broker that dies and comes back, and an agent that is killed while it is away."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collectors.outbox import WAITED_NS
from trainwarden import topics
from trainwarden.bus import Bus, connect
from trainwarden.clock import NS_PER_S
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker
from trainwarden.errors import TrainwardenError
from trainwarden.records import LogEvent, Record, Tick, decode

RUN = "import sys, pathlib; from collectors.agent import run; from trainwarden.config import load; run(load(pathlib.Path(sys.argv[1])))"
LIMIT_S = 120.0


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """What was started; whatever a test leaves is killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start_agent(directory: Path, url: str, agents: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    path = directory / "collector.toml"
    path.write_text(
        f'run_dir = "{directory}"\n[kafka]\nurl = "{url}"\n[collector]\nnode = "n0"\nprobe_port = 0\ninterval_ms = 250\n'
    )
    agents.append(subprocess.Popen([sys.executable, "-c", RUN, str(path)]))
    return agents[-1]


def wait(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Reader:
    """Reads ticks and logs; comes back by itself when the broker does."""

    def __init__(self, bus: Bus) -> None:
        bus.ensure_topics([topics.TICKS, topics.EVENTS, topics.LOGS])
        self._subscriber = bus.subscriber([topics.TICKS.name, topics.EVENTS.name, topics.LOGS.name])
        self.records: list[Record] = []

    def poll(self) -> list[Record]:
        self.records += [decode(message.value) for message in self._subscriber.poll(0.2)]
        return self.records

    def codes(self) -> list[str]:
        return [record.code for record in self.poll() if isinstance(record, LogEvent)]

    def ticks(self) -> list[Tick]:
        return [record for record in self.poll() if isinstance(record, Tick)]

    def close(self) -> None:
        self._subscriber.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TansuBroker]:
    with TansuBroker(tmp_path / "tansu.log", free_port()) as started:
        yield started


def say_exit(directory: Path, code: int) -> None:
    ended = {"v": 1, "t": "exit", "job": "j", "generation": 1, "rank": 0, "pid": 1, "exit_code": code}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hook:
        hook.sendto(json.dumps(ended).encode(), str(directory / "n0" / "hook.sock"))


def spooled(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (directory / "n0" / "spool").glob("*.seg"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_the_broker_is_away_and_the_agent_is_killed(
    tmp_path: Path, broker: TansuBroker, agents: list[subprocess.Popen[bytes]]
) -> None:
    url = f"kafka://{broker.bootstrap}"
    reader = Reader(connect(url))
    agent = start_agent(tmp_path, url, agents)
    wait(lambda: len(reader.ticks()) >= 3, "no ticks")
    say_exit(tmp_path, -1)
    wait(lambda: "worker_exit:-1" in reader.codes(), "the exit did not come through")
    reader.close()
    broker.kill()
    away_s = time.monotonic()

    say_exit(tmp_path, -2)
    wait(lambda: len(kept := spooled(tmp_path)) > 5_000 and b"worker_exit:-2" in kept, "nothing is spooled")
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    again = start_agent(tmp_path, url, agents)
    wait(lambda: again.poll() is None and socket_answers(tmp_path), "the agent does not come back")
    say_exit(tmp_path, -3)

    # a tick counts as spooled once it has waited for WAITED_NS
    wait(lambda: time.monotonic() - away_s > 2 * WAITED_NS / NS_PER_S, "time stands still")
    broker.start()  # as empty as Tansu always is after a restart
    reader = Reader(connected(url))
    wait(lambda: {"worker_exit:-2", "worker_exit:-3"} <= set(reader.codes()), "what waited was not sent")
    assert reader.codes().index("worker_exit:-2") < reader.codes().index("worker_exit:-3")
    wait(lambda: sum(not tick.spooled for tick in reader.ticks()) >= 3, "no fresh ticks after the backlog")
    assert any(tick.spooled for tick in reader.ticks())
    for boot in {tick.boot_id for tick in reader.ticks()}:
        seqs = list(dict.fromkeys(tick.seq for tick in reader.ticks() if tick.boot_id == boot))
        assert seqs == list(range(seqs[0], seqs[-1] + 1)), "a tick is missing or out of order"
    reader.close()
    again.terminate()
    assert again.wait(LIMIT_S) == 0


def socket_answers(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(directory / "n0" / "hook.sock"))
        except OSError:
            return False
    return True


def connected(url: str) -> Bus:
    """The bus once its broker answers."""
    bus = connect(url)

    def ready() -> bool:
        try:
            bus.wait_ready(1.0)
        except TrainwardenError:
            return False
        return True

    wait(ready, "the broker does not come back")
    return bus
