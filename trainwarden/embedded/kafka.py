"""Apache Kafka itself, one KRaft node on this machine from its published artifacts: for tests and for users without Docker.

All that is decided about the node (settings, Java flags, where artifacts are kept) stands in ``compose/kafka/start.sh``, which serves
people directly; this module starts the same script and waits, stops, crashes and restarts it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from trainwarden.clock import Clock
from trainwarden.embedded.child import Child, wait_until_stopped
from trainwarden.embedded.owned import OwnedBroker
from trainwarden.embedded.ports import LOOPBACK, free_port, require_free_port
from trainwarden.embedded.ready import BrokerMetadata, wait_for_broker
from trainwarden.errors import UnavailableError

log = logging.getLogger("trainwarden.embedded.kafka")

CACHE_ENV = "TRAINWARDEN_CACHE"
SCRIPTS_ENV = "TRAINWARDEN_KAFKA_SCRIPTS"
_START_TIMEOUT_S = 150.0
_STOP_GRACE_S = 20.0
_FETCH_TIMEOUT_S = 900.0


def find_start_script() -> Path:
    """Find ``start.sh``: $TRAINWARDEN_KAFKA_SCRIPTS, inside the installed package, or in the source tree.

    Raises
    ------
    UnavailableError
        It is in none of these.
    """
    here = Path(__file__).resolve().parent
    folders = [here / "kafka_runtime", here.parents[1] / "compose" / "kafka"]
    if SCRIPTS_ENV in os.environ:
        folders = [Path(os.environ[SCRIPTS_ENV])]
    for folder in folders:
        if (folder / "start.sh").is_file() and (folder / "pom.xml").is_file():
            return folder / "start.sh"
    raise UnavailableError(
        f"Kafka's start.sh and pom.xml are not in {' or '.join(map(str, folders))}: "
        f"set {SCRIPTS_ENV} to compose/kafka of the source tree"
    )


def cache_dir() -> Path:
    """Where fetched artifacts are kept: $TRAINWARDEN_CACHE, else trainwarden below the user's cache folder."""
    if CACHE_ENV in os.environ:
        return Path(os.environ[CACHE_ENV])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwarden"


def fetch_kafka(timeout_s: float = _FETCH_TIMEOUT_S) -> Path:
    """Make sure that Java and Kafka's artifacts are there; fetch them once (45 MB).

    Returns
    -------
    Path
        The folder of jars.

    Raises
    ------
    UnavailableError
        No Java, a Java older than 17, no Maven, or the artifacts cannot be had.
    """
    script = find_start_script()
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with (cache_dir() / "kafka-fetch.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that fetch at once would copy over each other
            done = subprocess.run(
                ["sh", str(script), "--fetch"],
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
                env={**os.environ, **_environment()},
            )
    except OSError as error:
        raise UnavailableError(
            f"Kafka's artifacts cannot be kept in {cache_dir()}: {error}; set {CACHE_ENV}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"fetching Kafka's artifacts took longer than {timeout_s:g} s: is the registry reachable?"
        ) from error
    if done.returncode != 0:
        raise UnavailableError(_why(done.stderr))
    return Path(done.stdout.strip())


def _environment() -> Mapping[str, str]:
    return {CACHE_ENV: str(cache_dir())}


def _why(output: str) -> str:
    """The script's own sentence, and before it what Maven complained of."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = next((line.removeprefix("start.sh: ") for line in reversed(lines) if line.startswith("start.sh: ")), "")
    maven = next((line for line in lines if line.startswith("[ERROR]")), "")
    return f"{own} ({maven[8:308]})" if own and maven else own or "Kafka's start.sh failed without a word"


class ApacheKafka(OwnedBroker):
    """One Kafka node whose data outlive it.

    Parameters
    ----------
    data_dir
        Everything of the node; made and formatted when empty. Its output goes to ``kafka.log`` in it.
    port
        TCP port for clients; None takes a free one, which a restart keeps.
    host
        Address to listen on. Where it is not the one that clients use (0.0.0.0), set $KAFKA_ADVERTISED_HOST.
    clock
        Used while waiting for the node.
    environment
        More variables for ``start.sh``, KAFKA_MORE_PROPERTIES for example.

    Examples
    --------
    >>> with ApacheKafka(Path("/var/tmp/kafka")) as kafka:  # doctest: +SKIP
    ...     kafka.kill()
    ...     kafka.start()
    """

    name = "Apache Kafka"
    stop_grace_s = _STOP_GRACE_S

    def __init__(
        self,
        data_dir: Path,
        port: int | None = None,
        host: str = LOOPBACK,
        clock: Clock | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(host, port if port is not None else free_port())
        self.data_dir = data_dir
        self._controller_port = free_port()
        self._clock = clock
        self._more = dict(environment or {})

    @property
    def log_path(self) -> Path:
        """Where the node's output goes."""
        return self.data_dir / "kafka.log"

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> BrokerMetadata:
        """Start the node, on the data of the last run if there are any, and return when it answers a metadata request.

        Raises
        ------
        UnavailableError
            No Java, no artifacts, port in use, data directory not writable, or the node died or did not answer in time.
        """
        fetch_kafka()
        require_free_port(self.host, self.port, self.name)
        require_free_port(self.host, self._controller_port, "Kafka's controller")
        argv = ["sh", str(find_start_script()), str(self.data_dir), str(self.port)]
        more = {**self._more, "KAFKA_CONTROLLER_PORT": str(self._controller_port), "KAFKA_HOST": self.host}
        self._child = child = Child(self.name, argv, self.log_path, {**_environment(), **more})
        try:
            return wait_for_broker(self.host, self.port, timeout_s=timeout_s, died=child.died, clock=self._clock)
        except BaseException:
            self.kill()
            raise

    def restart(self) -> BrokerMetadata:
        """Stop and start on the same data and port."""
        self.stop()
        return self.start()


def serve(host: str, port: int, directory: Path, stop: threading.Event) -> None:
    """Run a node in the foreground until `stop` is set; for a command.

    Raises
    ------
    UnavailableError
        It cannot be had or started, or it ended by itself.
    """
    log.info("looking for Java and Kafka's artifacts in %s (the first time 45 MB are fetched)", cache_dir())
    with ApacheKafka(directory, port, host) as node:
        log.info("Apache Kafka on %s, data in %s", node.bootstrap, directory)
        wait_until_stopped(stop, node.died)
