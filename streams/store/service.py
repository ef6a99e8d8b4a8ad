"""`trainwarden store`: the writer, and in embedded mode the store itself in the same process (chDB has one owner)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from streams.store.connect import address_of, connect
from streams.store.schema import migrate
from streams.store.writer import BatchLimits, StoreWriter, run_until
from trainwarden import bus, topics
from trainwarden.clock import Clock, SystemClock
from trainwarden.commands.lifecycle import stop_event
from trainwarden.config import Config
from trainwarden.selfmetrics import Metrics

LOG = logging.getLogger("trainwarden.store")

BROKER_WAIT_S = 60.0


def run(config: Config, stop: threading.Event | None = None, clock: Clock | None = None, metrics: Metrics | None = None) -> None:
    """Serve (embedded mode) and write until `stop` is set; without `stop`, until SIGTERM or SIGINT.

    Raises
    ------
    UnavailableError
        Port taken, directory owned by another process, broker or store not there.
    """
    clock = clock or SystemClock()
    stop = stop or stop_event()
    connection = bus.connect(config.kafka.url)
    with open_store(config) as client:
        migrate(client)
        connection.wait_ready(BROKER_WAIT_S)
        connection.ensure_topics(topics.ALL)
        limits = BatchLimits(config.store.batch_ms, config.store.batch_rows)
        writer = StoreWriter(connection, client, clock, metrics or Metrics("store"), config.cluster, limits)
        LOG.info("writing to %s", config.store.url)
        run_until(writer, stop)


@contextlib.contextmanager
def open_store(config: Config) -> Iterator[Any]:
    """A client of the store; with `store.directory` set the store itself runs in this process as long as the client is used."""
    if config.store.directory is None:
        with contextlib.closing(connect(config.store.url)) as client:
            yield client
        return
    from streams.store.chdb_server import ChdbServer

    host, port = address_of(config.store.url)
    server = ChdbServer(config.path(config.store.directory), host, port)
    server.start()
    try:
        yield server.client()
    finally:
        server.stop()
