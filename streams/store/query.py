"""Asking the store: one query, or a saved one by ``@name``, read-only, as text."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from clickhouse_connect.driver.exceptions import DatabaseError

from streams.store.chdb_server import ChdbServer
from streams.store.connect import connect
from streams.store.errors import StoreError, store_errors
from trainwarden.config import Config
from trainwarden.embedded.ports import free_port
from trainwarden.errors import UnavailableError, UsageError

FORMATS = {"table": "PrettyCompactMonoBlock", "csv": "CSVWithNames", "json": "JSONEachRow", "markdown": "Markdown"}

READ_ONLY = {
    "readonly": 2,
    "max_execution_time": 60,
    "max_memory_usage": 4 * 1024**3,
    "output_format_pretty_color": 0,
    "output_format_pretty_row_numbers": 0,
    "output_format_pretty_max_rows": 10_000,
    "output_format_pretty_max_value_width": 400,
    "output_format_json_quote_64bit_integers": 0,
}
"""A question may not change anything, take the store's memory or run for ever."""


@dataclass(frozen=True)
class SavedQuery:
    """A question worth keeping. `about` is the first comment line of its file."""

    name: str
    about: str
    text: str


def saved_queries() -> dict[str, SavedQuery]:
    """The saved queries of this build, by name."""
    found = {}
    for entry in sorted(files("streams.store").joinpath("queries").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".sql"):
            name, text = entry.name.removesuffix(".sql"), entry.read_text(encoding="utf-8")
            found[name] = SavedQuery(name, text.splitlines()[0].removeprefix("--").strip(), text)
    return found


def sql(config: Config, query: str, format: str = "table") -> str:
    """Answer of the store to `query`, as text.

    Parameters
    ----------
    query
        One statement, or ``@name`` of a saved query; ``@`` alone lists those.
    format
        ``table``, ``csv``, ``json`` (one object a line) or ``markdown``.

    Raises
    ------
    UsageError
        Unknown format or saved query, or a statement that the store refuses; the store's own reason is given.
    UnavailableError
        The store does not answer.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format}: expected one of {', '.join(FORMATS)}")
    if query.strip() == "@":
        return "".join(f"@{saved.name:22} {saved.about}\n" for saved in saved_queries().values())
    text = resolve(query)
    try:
        with store_errors("the store refused the query"), opened(config) as client:
            return bytes(client.raw_query(text, fmt=FORMATS[format], settings=READ_ONLY)).decode(errors="replace")
    except StoreError as error:
        if isinstance(error.__cause__, DatabaseError):
            raise UsageError(_short(str(error))) from None
        raise UnavailableError(
            f"no store answers at {config.store.shown_url}: start `trainwarden store`, or set store.url ({error})"
        ) from None


@contextlib.contextmanager
def opened(config: Config) -> Iterator[Any]:
    """The running store; of an embedded store that has stopped, its directory, owned until the end of the block.

    Raises
    ------
    UnavailableError
        Nobody answers at `store.url`, and there is no directory that this process could open instead.
    """
    logging.getLogger("clickhouse_connect").setLevel("ERROR")  # it would log the refusal that is told in one sentence
    directory = config.store.directory and config.path(config.store.directory)
    try:
        client = connect(config.store.url)
    except UnavailableError:
        if directory is None or not directory.is_dir():
            raise
        with (
            ChdbServer(directory, port=free_port()) as server,
            contextlib.closing(server.client(database=database_of(config))) as own,
        ):
            yield own
        return
    with contextlib.closing(client):
        yield client


def database_of(config: Config) -> str:
    """The database that `store.url` names."""
    return urlsplit(config.store.url).path.strip("/") or "default"


def resolve(query: str) -> str:
    """The text of `query`: itself, or the saved query that ``@name`` names."""
    text = query.strip().rstrip(";")
    if not text.startswith("@"):
        return text
    saved = saved_queries()
    if text[1:] not in saved:
        near = difflib.get_close_matches(text[1:], saved, n=1)
        hint = f"did you mean @{near[0]}?" if near else f"known: {', '.join('@' + name for name in saved)}"
        raise UsageError(f"no saved query is called {text}: {hint}")
    return saved[text[1:]].text.strip().rstrip(";")


def _short(message: str) -> str:
    """The store's sentence without its wrapping and version number."""
    message = re.sub(r"(Code: \d+\. DB::Exception: )+", "", message)
    return re.sub(r"\s*\(version [^)]*\).*$", "", message, flags=re.S)
