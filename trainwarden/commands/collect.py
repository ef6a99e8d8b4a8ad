"""`trainwarden collect`."""

from __future__ import annotations

import json
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
    node: Annotated[
        str | None, typer.Option(help="name of this node; default: collector.node, else the host name")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="root of /proc and /sys")] = None,
    once: Annotated[bool, typer.Option("--once", help="print what the sources read now, publish nothing")] = False,
    log_level: str = "INFO",
) -> None:
    """Sample this node once a second and publish until SIGTERM."""
    from collectors import agent

    loaded = configuration.load(config)
    changed = {name: value for name, value in (("node", node), ("root", root)) if value is not None}
    loaded = replace(loaded, collector=replace(loaded.collector, **changed))  # type: ignore[arg-type]
    configure_logging(log_level)
    if once:
        print(json.dumps(agent.collect_once(loaded), indent=1))
        return
    agent.run(loaded)
