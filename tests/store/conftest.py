"""A store of their own for the store's tests: one chDB server process, one new database per test."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.store.connect import connect
from streams.store.service import prepare
from tests.store.server import StoreProcess


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A store server in its own process (chDB has one owner, and this process may not be it)."""
    with StoreProcess(tmp_path_factory.mktemp("store")) as process:
        yield process


@pytest.fixture
def store_url(store: StoreProcess) -> str:
    """Address of a new, empty, migrated database."""
    url = store.url(f"t{uuid.uuid4().hex[:8]}")
    prepare(url).close()
    return url


@pytest.fixture
def client(store_url: str) -> Iterator[Any]:
    """Client of the new database."""
    client = connect(store_url)
    yield client
    client.close()


@pytest.fixture
def fresh_client(store: StoreProcess) -> Iterator[Any]:
    """Client of a new database without any table."""
    name = f"t{uuid.uuid4().hex[:8]}"
    admin = connect(store.url("default"))
    admin.command(f"CREATE DATABASE {name}")
    admin.close()
    client = connect(store.url(name))
    yield client
    client.close()


@pytest.fixture
def python() -> Path:
    """The interpreter of this run."""
    return Path(sys.executable)


@pytest.fixture
def migrated() -> Iterator[Callable[[str], Any]]:
    """Makes a migrated database and gives its client."""
    clients = []

    def make(url: str) -> Any:
        clients.append(prepare(url))
        return clients[-1]

    yield make
    for made in clients:
        made.close()
