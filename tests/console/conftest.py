"""The recorded story in a real store."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from streams.store.service import prepare
from tests.store.server import StoreProcess
from tests.store.story import fill, story


@pytest.fixture(scope="module")
def story_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a store that holds the story, which has just ended."""
    with StoreProcess(tmp_path_factory.mktemp("console-store")) as process:
        url = process.url("trainwarden")
        client = prepare(url)
        fill(client, story(time.time_ns()))
        client.close()
        yield url
