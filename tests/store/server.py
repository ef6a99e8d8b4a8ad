"""A store server as a process that tests may stop, kill and start again on the same directory and port."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from streams.store.connect import connect
from trainwarden.embedded.ports import free_port
from trainwarden.errors import TrainwardenError

START_LIMIT_S = 300.0


class StoreProcess:
    """`ChdbServer` in a child process."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory = directory
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str) -> str:
        """Address of a database."""
        return f"clickhouse://127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory.parent / f"{self.directory.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.store.server", str(self.directory), str(self.port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the store did not start, see {log.name}")
            time.sleep(0.1)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it by a signal and wait for the end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(120)
            self._process = None

    def _answers(self) -> bool:
        try:
            connect(self.url("default")).close()
        except TrainwardenError:
            return False
        return True

    def __enter__(self) -> StoreProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> None:
    """Serve until SIGTERM."""
    from streams.store.chdb_server import ChdbServer

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = ChdbServer(Path(sys.argv[1]), "127.0.0.1", int(sys.argv[2]))
    server.start()
    stop.wait()
    server.stop()


if __name__ == "__main__":
    main()
