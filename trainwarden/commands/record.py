"""`trainwarden record`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging, stop_event

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    directory: Annotated[Path, typer.Argument(help="a new directory")],
    config: ConfigOption = None,
    seconds: Annotated[float, typer.Option(help="how long")] = 60.0,
) -> None:
    """Write the live topics, from their beginning, to a recording that `trainwarden replay` reads."""
    from streams.replay import record

    configure_logging()
    stop = stop_event()
    count = record(configuration.load(config), directory, seconds, stop=stop.is_set)
    print(f"{count} messages in {directory}")
