"""A cluster of nodes on one machine: services, collectors, wardens and the job, as the same commands a user would run."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwarden.demo.data import write_held_out, write_shard
from trainwarden.demo.groups import CONTROLLERS, group_of
from trainwarden.demo.network import Loopback, Network, remove_namespaces
from trainwarden.demo.processes import Child, Children
from trainwarden.errors import UnavailableError

WARDEN_PORT = 9470
PROBE_PORT = 9471
SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Layout:
    """What to build.

    Attributes
    ----------
    kafka_url
        A broker that already runs; None starts an embedded one of kind `broker`.
    mode
        How far the action service may go.
    """

    directory: Path
    nodes: int = 4
    min_nodes: int = 2
    seed: int = 0
    broker: str = "tansu"
    kafka_url: str | None = None
    mode: str = "auto"
    save_every: int = 20
    eval_every: int = 250
    device_ms: float = 40.0
    webhook_url: str = ""
    more_toml: str = ""
    """More of the services' configuration."""


@dataclass
class Ports:
    """Ports of the services, free when the cluster was made."""

    broker: int
    store: int
    actions: int
    worker: int
    rendezvous: int


@dataclass
class Cluster:
    """Everything running. Use `start()`; `stop()` leaves nothing behind."""

    layout: Layout
    network: Network = field(default_factory=Loopback)
    say: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self.directory = self.layout.directory.resolve()
        temporary = self.directory / "tmp"  # libraries leave caches there
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
        self.children = Children(self.directory / "logs", environment)
        temporary.mkdir(exist_ok=True)
        self.ports = Ports(*self.network.seat.ports)
        self.secret_file = self.directory / "secret"

    # --- names and addresses -----------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """Name of the job: of its own for each demonstration that runs, since shared memory is named by it."""
        number = self.network.seat.number
        return f"digits-{number}" if number else "digits"

    @property
    def kafka_url(self) -> str:
        """The bus."""
        return self.layout.kafka_url or f"kafka://{self.network.host_address}:{self.ports.broker}"

    @property
    def store_url(self) -> str:
        """The store."""
        return f"clickhouse://127.0.0.1:{self.ports.store}/trainwarden"

    def node(self, number: int) -> str:
        """Name of a node."""
        return f"n{number}"

    def shard(self, number: int) -> Path:
        """A node's own training data."""
        return self.directory / self.node(number) / "shard.bin"

    def delay_file(self, number: int) -> Path:
        """While it exists, reads of the node's shard are late by the milliseconds written in it."""
        return self.shard(number).with_suffix(".delay_ms")

    def kernel_log(self, number: int) -> Path:
        """The file that stands for a node's kernel log."""
        return self.directory / self.node(number) / "kern.log"

    def warden_url(self, number: int) -> str:
        """A node's warden."""
        return f"http://{self.network.management_address(number)}:{WARDEN_PORT}"

    # --- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up and return when all ranks are stepping is left to the caller; raises when a part cannot start."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.secret_file.write_text(secrets.token_hex(32))
        self.secret_file.chmod(0o600)
        self._remove_leftovers()
        self.network.up(self.layout.nodes)
        self._make_data()
        self._write_configs()
        self._start_broker()
        self._start_job()
        self._start_services()
        self._start_collectors()

    def stop(self) -> None:
        """Stop every process, remove the network; files stay in the directory."""
        self.children.stop_all()
        self._remove_leftovers()
        self.network.down()

    def trainwarden(self, *arguments: str) -> list[str]:
        """Command line of one of our own commands."""
        return [sys.executable, "-m", "trainwarden.cli", *arguments]

    def start_service(self, name: str) -> Child:
        """Start (or start again) worker, store or actions."""
        return self.children.start(name, self.trainwarden(name, "--config", str(self.directory / "trainwarden.toml")))

    def start_collector(self, number: int) -> Child:
        """Start (or start again) a node's collector."""
        config = self.directory / self.node(number) / "collector.toml"
        command = self.network.enter(number, self.trainwarden("collect", "--config", str(config)))
        return self.children.start(f"collector-{self.node(number)}", command)

    def start_warden(self, number: int) -> Child:
        """Start a node's warden, which starts the launcher, which starts the rank."""
        name, home = self.node(number), self.directory / self.node(number)
        bin_directory = Path(sys.executable).parent
        launcher = [
            str(bin_directory / "trainwarden-run"), "--nnodes", f"{self.layout.min_nodes}:{self.layout.nodes}", "--nproc-per-node", "1",
            "--rdzv-endpoint", f"{self.network.host_address}:{self.ports.rendezvous}", "--rdzv-id", self.job,
            "--job", self.job, "--node", name,
            "--run-dir", str(home / "run"), "--local-addr", self.network.rail_address(number), str(SCRIPT),
            "--data", str(self.shard(number)), "--held-out", str(home / "held_out.bin"), "--seed", str(self.layout.seed),
            "--save-every", str(self.layout.save_every), "--eval-every", str(self.layout.eval_every),
            "--device-ms", str(self.layout.device_ms),
        ]  # fmt: skip
        command = [
            str(bin_directory / "trainwarden-warden"), "--node", name, "--job", self.job,
            "--listen", f"{self.network.management_address(number)}:{WARDEN_PORT}", "--secret-file", str(self.secret_file),
            "--state-dir", str(home / "warden"), "--run-dir", str(home / "run"), "--", *launcher,
        ]  # fmt: skip
        return self.children.start(
            f"warden-{name}", self.network.enter(number, command), TRAINWARDEN_SOCKET=str(home / "hook.sock"),
            GLOO_SOCKET_IFNAME=self.network.rail_interface, TRAINWARDEN_CHECKPOINT_DIR=str(home / "checkpoints"),
        )  # fmt: skip

    def warden_status(self, number: int) -> dict[str, Any]:
        """What a node's warden says; empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.warden_url(number)}/v1/status", timeout=1.0) as answer:
                return dict(json.loads(answer.read()))
        except (OSError, ValueError):
            return {}

    def ask_store(self, query: str) -> str:
        """The store's answer as tab-separated text; empty when it does not answer."""
        where = urllib.parse.urlencode({"database": "trainwarden", "query": query})
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports.store}/?{where}", timeout=2.0) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError):
            return ""

    def trainer_pid(self, number: int) -> int:
        """Process id of the rank on a node; 0 when there is none."""
        ranks = self.warden_status(number).get("ranks", [])
        return int(ranks[0]["pid"]) if ranks and ranks[0].get("alive") else 0

    # --- parts -------------------------------------------------------------------------------------------------------

    def _remove_leftovers(self) -> None:
        """What killed processes left of this seat: saves in shared memory (at the start they are of another run), control groups,
        namespaces."""
        from trainwarden_hook import segments

        for number in range(self.layout.nodes):
            segments.unlink_all(self.job, self.node(number))
        for controller in CONTROLLERS:
            group_of(self.network.seat.number, controller).remove()
        remove_namespaces(self.network.seat.number)

    def _make_data(self) -> None:
        for number in range(self.layout.nodes):
            home = self.directory / self.node(number)
            home.mkdir(parents=True, exist_ok=True)
            self.kernel_log(number).touch()
            write_shard(self.shard(number), seed=self.layout.seed)
            write_held_out(home / "held_out.bin")
        os.sync()

    def _start_broker(self) -> None:
        if self.layout.kafka_url is None:
            address = f"{self.network.host_address}:{self.ports.broker}"
            command = self.trainwarden(
                "broker",
                "--kind",
                self.layout.broker,
                "--listen",
                address,
                "--directory",
                str(self.directory / "broker"),
            )
            self.children.start("broker", command)
        self.wait(self._topics_ready, 60.0, f"the broker at {self.kafka_url} does not answer")

    def _topics_ready(self) -> bool:
        from trainwarden import topics
        from trainwarden.bus import connect

        try:
            bus = connect(self.kafka_url)
            bus.wait_ready(1.0)
        except UnavailableError:
            return False
        bus.ensure_topics(topics.ALL)
        return True

    def _start_job(self) -> None:
        bin_directory = Path(sys.executable).parent
        listen = f"{self.network.host_address}:{self.ports.rendezvous}"
        self.children.start("rendezvous", [str(bin_directory / "trainwarden-rendezvous"), "--listen", listen])
        for number in range(self.layout.nodes):
            self.start_warden(number)

    def _start_services(self) -> None:
        for name in ("store", "worker", "actions"):
            self.start_service(name)

    def _start_collectors(self) -> None:
        for number in range(self.layout.nodes):
            self.start_collector(number)

    def wait(self, ready: Callable[[], bool], timeout_s: float, sentence: str) -> None:
        """Poll `ready`, and fail with `sentence`; also when a child has ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            self.children.require_alive()
            if time.monotonic() > deadline:
                raise UnavailableError(f"{sentence} after {timeout_s:.0f} s; logs are in {self.directory / 'logs'}")
            time.sleep(0.05)

    # --- configuration files -----------------------------------------------------------------------------------------

    def _write_configs(self) -> None:
        common = f'cluster = "demo"\nrun_dir = {_toml(self.directory)}\n\n[kafka]\nurl = {_toml(self.kafka_url)}\n'
        (self.directory / "trainwarden.toml").write_text(common + self._services_toml())
        for number in range(self.layout.nodes):
            (self.directory / self.node(number) / "collector.toml").write_text(common + self._collector_toml(number))

    def _services_toml(self) -> str:
        nodes = "\n".join(f"{self.node(i)} = {_toml(self.warden_url(i))}" for i in range(self.layout.nodes))
        webhook = (
            f'\n[notify.oncall]\ntype = "webhook"\nurl = {_toml(self.layout.webhook_url)}\nallow_private = true\n'
            if self.layout.webhook_url
            else ""
        )
        return f"""
[store]
url = {_toml(self.store_url)}
directory = "clickhouse"

[streams]
web_listen = "127.0.0.1:{self.ports.worker}"

[actions]
listen = "127.0.0.1:{self.ports.actions}"
min_nodes = {self.layout.min_nodes}

[policy]
mode = {_toml(self.layout.mode)}

[backends.warden]
secret_file = {_toml(self.secret_file)}

[backends.warden.nodes]
{nodes}
{webhook}
{self.layout.more_toml}"""

    def _collector_toml(self, number: int) -> str:
        home = self.directory / self.node(number)
        peers = "\n".join(
            f'{self.node(i)} = "{self.network.rail_address(i)}:{PROBE_PORT}"'
            for i in range(self.layout.nodes)
            if i != number
        )
        return f"""
[collector]
node = {_toml(self.node(number))}
socket = {_toml(home / "hook.sock")}
spool_directory = {_toml(home / "spool")}
rail_address = {_toml(self.network.rail_address(number))}
probe_port = {PROBE_PORT}

[collector.peers]
{peers}

[collector.log_files]
kernel = {_toml(self.kernel_log(number))}
"""


def _toml(value: object) -> str:
    return json.dumps(str(value))
