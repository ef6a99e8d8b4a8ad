"""`trainwarden worker`."""

from __future__ import annotations

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(config: ConfigOption = None, log_level: str = "INFO") -> None:
    """Detect and correlate until SIGTERM."""
    from streams.app import run as serve

    configure_logging(log_level)
    serve(configuration.load(config))
