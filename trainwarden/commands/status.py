"""`trainwarden status`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print it as JSON")] = False,
) -> None:
    """Job, nodes, incidents and actions now; a part that does not answer is named, the rest is shown all the same."""
    from actions.console.status import as_table, status
    from actions.console.text import render_text

    made = status(configuration.load(config))
    sys.stdout.write(json.dumps(as_table(made), indent=1) + "\n" if as_json else render_text(made))
