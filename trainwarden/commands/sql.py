"""`trainwarden sql`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    query: Annotated[str, typer.Argument(help='one statement, @name of a saved query, or "@" to list those')],
    config: ConfigOption = None,
    format: Annotated[str, typer.Option(help="table, csv, json or markdown")] = "table",
) -> None:
    """Ask the store, read-only; the embedded store answers while it writes and, from its directory, after it has stopped."""
    from streams.store.query import sql

    sys.stdout.write(sql(configuration.load(config), query, format))
