"""`trainwarden store`: the writer, and in embedded mode the store itself in the same process (chDB has one owner)."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streams.cycles import collect_rarely
from streams.store.chdb_server import DEFAULT_PORT, Access, ChdbServer
from streams.store.connect import connect
from streams.store.errors import store_errors
from streams.store.schema import migrate
from streams.store.vitals import StoreHealth
from streams.store.writer import BatchLimits, StoreWriter, run_until
from trainwarden import bus, selfmetrics, topics
from trainwarden.clock import NS_PER_S, Clock, SystemClock
from trainwarden.commands.lifecycle import stop_event
from trainwarden.config import Config
from trainwarden.errors import ConfigError, UnavailableError
from trainwarden.selfmetrics import Metrics

LOG = logging.getLogger("trainwarden.store")

BROKER_WAIT_S = 60.0
TOPICS_WAIT_S = 10


def run(
    config: Config, stop: threading.Event | None = None, clock: Clock | None = None, metrics: Metrics | None = None
) -> None:
    """Serve (embedded mode) and write until `stop` is set; without `stop`, until SIGTERM or SIGINT.

    In embedded mode the process gives way by `store.nice`: a merge takes both cores of a small machine for seconds, and a worker beside it
    must not wait that long.

    Raises
    ------
    UnavailableError
        Port taken, directory owned by another process, broker or store not there.
    """
    for chatty in ("urllib3.connectionpool", "clickhouse_connect"):
        logging.getLogger(chatty).setLevel("ERROR")  # each failure is one line of the writer's already
    collect_rarely()
    if config.store.directory is not None:
        os.nice(config.store.nice)  # threads inherit it: before the engine starts its own
    clock = clock or SystemClock()
    stop = stop or stop_event()
    connection = bus.connect(config.kafka)
    with open_store(config) as client:
        connection.wait_ready(BROKER_WAIT_S)
        make_topics(connection, clock)
        limits = BatchLimits(config.store.batch_ms, config.store.batch_rows)
        metrics = metrics or Metrics("store")
        writer = StoreWriter(connection, client, clock, metrics, config.cluster, limits)
        LOG.info("writing to %s", config.store.shown_url)
        with (
            metrics_page(metrics, config.store.metrics_listen),
            contextlib.closing(StoreHealth(config, connection, client, clock, metrics)) as health,
        ):
            run_until(writer, stop, health.look)


@contextlib.contextmanager
def metrics_page(metrics: Metrics, listen: str) -> Iterator[None]:
    """The writer's Prometheus page, where one is asked for."""
    if not listen:
        yield
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"store.metrics_listen: {listen!r} is no host:port such as 127.0.0.1:9482")
    try:
        server = selfmetrics.serve(metrics, host, int(port))
    except OSError as error:
        raise UnavailableError(f"store.metrics_listen {listen}: {error.strerror}: free it or set another") from None
    metrics.set("tw_up", 1)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def make_topics(connection: bus.Bus, clock: Clock) -> None:
    """Create what is missing; a broker tells of a topic that was made just now only after a moment."""
    deadline_ns = clock.monotonic_ns() + TOPICS_WAIT_S * NS_PER_S
    while True:
        try:
            connection.ensure_topics(topics.ALL)
        except UnavailableError:
            if clock.monotonic_ns() > deadline_ns:
                raise
            clock.sleep(0.5)
        else:
            return


@contextlib.contextmanager
def open_store(config: Config) -> Iterator[Any]:
    """A client of the migrated store; with `store.directory` the store itself runs in this process as long as the client is used."""
    with contextlib.ExitStack() as stack:
        server = None
        if config.store.directory is not None:
            server = stack.enter_context(_embedded(config, config.store.directory))
        client = stack.enter_context(contextlib.closing(prepare(config.store.url)))
        yield client if server is None else server.direct(client)


def _embedded(config: Config, directory: Path) -> ChdbServer:
    parts = urlsplit(config.store.url)
    if parts.scheme != "clickhouse" or not parts.hostname:
        raise ConfigError(
            f"store.url: {config.store.shown_url!r} with store.directory set, expected clickhouse://host:port/database to serve on"
        )
    access = Access(parts.username or "default", parts.password or "")
    return ChdbServer(config.path(directory), parts.hostname, parts.port or DEFAULT_PORT, access=access)


def prepare(url: str) -> Any:
    """Client of the database in `url`, which is made and migrated as needed."""
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if database:
        if not database.replace("_", "").isalnum():
            raise ConfigError(f"store.url: database {database!r} may have letters, digits and _ only")
        with (
            store_errors(f"making database {database}"),
            contextlib.closing(connect(parts._replace(path="").geturl())) as admin,
        ):
            admin.command(f"CREATE DATABASE IF NOT EXISTS {database}")
    client = connect(url)
    migrate(client)
    return client
