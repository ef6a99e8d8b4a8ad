"""`trainwarden scan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    config: ConfigOption = None,
    root: Annotated[Path | None, typer.Option(help="root of /proc and /sys")] = None,
    log_level: str = "ERROR",
) -> None:
    """Look at this node for two seconds and say what is here and what looks wrong; exit code 1 when something does."""
    from collectors.agent import look
    from collectors.explain import findings, screen

    loaded = configuration.load(config)
    if root is not None:
        loaded = replace(loaded, collector=replace(loaded.collector, root=root))
    configure_logging(log_level)
    seen = look(loaded)
    print(screen(seen))
    if findings(seen):
        raise typer.Exit(1)
