"""The store's owner process: one chDB directory, answered in ClickHouse's HTTP form on loopback.

`trainwarden sql`, notebooks, Grafana (through a plain-HTTP ClickHouse data source) and the console read with the ordinary
ClickHouse client while the writer writes, from any process. What differs from a ClickHouse server:

* no sessions: `session_id` is accepted and means nothing, `SET`, `USE` and temporary tables end with their request;
* responses are not compressed (loopback), request bodies may be (gzip, deflate, lz4, zstd);
* refused with a clear error: external data, ClickHouse's own block compression (`compress=1`), several statements in one request;
* Native blocks carry no block info whatever `client_protocol_version` says (clickhouse-connect copes, clickhouse-go does not).

A request on a read-only port or with `readonly=1`, and every GET, cannot write.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from streams.store.chdb_engine import ChdbEngine, Limits
from streams.store.chdb_http import Access, Activity, Listener
from streams.store.direct import DirectClient
from trainwarden.clock import Clock
from trainwarden.embedded.ports import LOOPBACK
from trainwarden.errors import ConfigError

__all__ = ["DEFAULT_PORT", "Access", "ChdbServer", "Limits", "serve"]

log = logging.getLogger("trainwarden.store.chdb")

DEFAULT_PORT = 8123
_STOP_GRACE_S = 10.0
_KILL_GRACE_S = 5.0


class ChdbServer:
    """Owner of a chDB directory and its HTTP form; start it once per process.

    Parameters
    ----------
    directory
        The chDB directory; made when missing.
    host, port
        Where to listen; port 0 takes a free one, see `port` after `start`. Other than loopback only with a password.
    access
        Credentials and read-only for that port.
    readonly_port
        A second port that only reads (Grafana, analysts); None for none, 0 for a free one.
    limits
        Slots and memory of statements.

    Examples
    --------
    >>> with ChdbServer(Path("/var/lib/trainwarden/store"), port=0) as server:  # doctest: +SKIP
    ...     server.client().query("select 1").result_rows
    [(1,)]
    """

    def __init__(
        self,
        directory: Path,
        host: str = LOOPBACK,
        port: int = DEFAULT_PORT,
        *,
        access: Access | None = None,
        readonly_port: int | None = None,
        limits: Limits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.directory = directory
        self.host = host
        self.port = port
        self.readonly_port = readonly_port
        self._access = access or Access()
        self._engine = ChdbEngine(directory, limits, clock=clock)
        self._activity = Activity()
        self._listeners: list[Listener] = []
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """Address for `streams.store.connect.connect`, without credentials."""
        return f"clickhouse://{self.host}:{self.port}"

    def start(self) -> None:
        """Open the directory and listen.

        Raises
        ------
        UnavailableError
            Another owner, a port in use, no permission.
        ConfigError
            An address beyond loopback without a password.
        """
        _refuse_open_door(self.host, self._access)
        self._engine.open()
        try:
            self.port = self._listen(self.port, self._access)
            if self.readonly_port is not None:
                reading = Access(self._access.user, self._access.password, readonly=True)
                self.readonly_port = self._listen(self.readonly_port, reading)
            self._engine.announce(self.url)
        except BaseException:
            self.stop()
            raise

    def _listen(self, port: int, access: Access) -> int:
        listener = Listener(self.host, port, self._engine, access, self._activity)
        thread = threading.Thread(target=listener.serve_forever, args=(0.1,), name="store-http", daemon=True)
        self._listeners.append(listener)
        self._threads.append(thread)
        thread.start()
        return int(listener.server_address[1])

    def stop(self) -> None:
        """Finish what runs (10 s, then cancel it), close the engine, let go of the directory."""
        self._activity.close()
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()
        quiet = self._activity.drained(_STOP_GRACE_S) or self._cancel_all()
        for listener in self._listeners:
            listener.hang_up()
        for thread in self._threads:
            thread.join()
        self._listeners.clear()
        self._threads.clear()
        if quiet:
            self._engine.close()
        else:
            log.error("a statement cannot be ended: the engine of %s stays open until the process ends", self.directory)

    def _cancel_all(self) -> bool:
        log.warning("statements still run after %g s: cancelling them", _STOP_GRACE_S)
        self._engine.kill_statements()
        return self._activity.drained(_KILL_GRACE_S)

    def client(self, **options: Any) -> Any:
        """An ordinary clickhouse-connect client of this server, for the writer in the same process.

        Parameters
        ----------
        options
            Passed on to `clickhouse_connect.get_client`.
        """
        from streams.store.connect import open_http

        return open_http(self.host, self.port, self._access.user, self._access.password, options)

    def direct(self, client: Any) -> DirectClient:
        """`client`, with inserts that take no way through HTTP; a stop of this server does not wait for them."""
        return DirectClient(client, self._engine)

    def __enter__(self) -> ChdbServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(server: ChdbServer, say: Callable[[str], None], stop: threading.Event) -> None:
    """Run a store owner in the foreground until `stop` is set (by SIGTERM or SIGINT); for a command."""
    with server:
        reading = f", read-only on port {server.readonly_port}" if server.readonly_port is not None else ""
        say(f"chDB store {server.directory} answers at {server.url}{reading}")
        stop.wait()


def _refuse_open_door(host: str, access: Access) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not access.password:
        raise ConfigError(f"the store would listen on {host} without a password: set one, or listen on {LOOPBACK}")
