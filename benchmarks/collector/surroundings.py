"""What surrounds the agent: a broker, peers that answer probes, a trainer of eight ranks that reports, a log that grows."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.collector_cost import step_datagram
from collectors import echo
from trainwarden import topics
from trainwarden.bus import Message, connect
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker

RANKS = 8
STEP_EVERY_S = 0.5
PEERS = 3
QUIET_S = 3.0
READY_S = 60.0
TOPICS = (topics.TICKS, topics.EVENTS, topics.LOGS, topics.STEPS, topics.CATALOG, topics.TOPOLOGY, topics.DEAD)


class Surroundings:
    """Addresses of what surrounds the agent, and what the broker got from it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.peers = {f"n{number + 1}": free_port() for number in range(PEERS)}
        self.page_port = free_port()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        for name in ("kernel.log", "train.log"):
            (folder / name).touch()

    def configuration(self, more: str = "") -> Path:
        """The agent's configuration file; every source is on."""
        addresses = ", ".join(f'{name} = "127.0.0.1:{port}"' for name, port in self.peers.items())
        folder = self.folder
        path = folder / "collector.toml"
        path.write_text(
            f'run_dir = "{folder}"\n[kafka]\nurl = "{self.url}"\n[collector]\nnode = "n0"\nrail_address = "127.0.0.1"\n'
            f'probe_port = {free_port()}\npeers = {{ {addresses} }}\nmetrics_listen = "127.0.0.1:{self.page_port}"\n'
            f'log_files = {{ kernel = "{folder}/kernel.log", train = "{folder}/train.log" }}\n{more}',
            encoding="utf-8",
        )
        return path

    def messages(self) -> list[Message]:
        """Everything that the broker holds of the agent, once that has ended: else there is no end of them."""
        bus = connect(self.url)
        reader = bus.subscriber([topic.name for topic in TOPICS])
        found: list[Message] = []
        while some := reader.poll(QUIET_S):
            found += some
        reader.close()
        bus.close()
        return found

    def page(self) -> dict[str, float]:
        """The agent's own word on itself: value by metric with its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.page_port}/metrics", timeout=30) as reply:
            lines = reply.read().decode("utf-8").splitlines()
        return {
            name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line.startswith("tw_"))
        }

    def start(self) -> None:
        """Begin to answer and to report."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        responder = echo.Responder(1000.0)
        sockets = [echo.stamped_socket(("127.0.0.1", port)) for port in self.peers.values()]
        hook = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        step, next_step = 0, time.monotonic()
        with (self.folder / "train.log").open("a", encoding="utf-8") as log:
            while not self._stop.wait(0.01):
                for sock in sockets:
                    responder.serve(sock, time.monotonic())
                if time.monotonic() >= next_step:
                    next_step, step = next_step + STEP_EVERY_S, step + 1
                    self._report(hook, step)
                    log.write(f"step {step} loss 2.31\n")
                    log.flush()
        for sock in (*sockets, hook):
            sock.close()

    def _report(self, hook: socket.socket, step: int) -> None:
        for rank in range(RANKS):
            try:
                hook.sendto(step_datagram(rank, step, RANKS), str(self.folder / "n0" / "hook.sock"))
            except OSError:
                return  # the agent is not up yet, or is gone


@contextmanager
def surrounded(folder: Path) -> Iterator[Surroundings]:
    """A broker of its own and everything else."""
    broker = TansuBroker(folder / "broker.log")
    broker.start()
    here = Surroundings(folder, f"kafka://{broker.bootstrap}")
    bus = connect(here.url)
    bus.wait_ready(READY_S)
    bus.ensure_topics(TOPICS)
    bus.close()
    here.start()
    try:
        yield here
    finally:
        here.stop()
        broker.stop()


def by_label(page: dict[str, float], name: str, label: str) -> dict[str, float]:
    """Values of one metric of a page, by one of its labels."""
    found = {}
    for key, value in page.items():
        if key.startswith(f"{name}{{"):
            found[key.partition(f'{label}="')[2].partition('"')[0]] = value
    return found
