"""Failures of the store, told apart from those of a row: the first is waited out, the second becomes a dead letter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clickhouse_connect.driver.exceptions import ClickHouseError
from urllib3.exceptions import HTTPError

from trainwarden.errors import TrainwardenError


class StoreError(TrainwardenError):
    """The store did not take or answer something. Nothing may be committed; the same work is done again later."""


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Turn whatever the client raises into one `StoreError` that says what was being done."""
    try:
        yield
    except (ClickHouseError, HTTPError, OSError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StoreError(f"{doing}: {first_line[:500]}") from error
