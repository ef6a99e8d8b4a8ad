"""Failures of the store, told apart from those of a row: the first is waited out, the second becomes a dead letter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from clickhouse_connect.driver.exceptions import ClickHouseError
from urllib3.exceptions import HTTPError

from trainwarden.errors import TrainwardenError

_CAUSE = re.compile(r"Caused by \w+\([\"'](?:<?\w+[^>]*?[>)]: )?(.*?)[\"']\)\)")

_WRAPPING = re.compile(r"^Received ClickHouse exception, code: \d+, server response: ")


class StoreError(TrainwardenError):
    """The store did not take or answer something. Nothing may be committed; the same work is done again later."""


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Turn whatever the client raises into one `StoreError` that says what was being done."""
    try:
        yield
    except (ClickHouseError, HTTPError, OSError) as error:
        raise StoreError(f"{doing}: {sentence_of(error)}") from error


def sentence_of(error: BaseException) -> str:
    """The telling part of a client's error: the innermost cause of a failed connection, else the first line."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    cause = _CAUSE.search(first_line)
    return cause.group(1) if cause else _WRAPPING.sub("", first_line)[:500]
