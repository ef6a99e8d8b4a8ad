"""`trainwarden evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    directory: Annotated[
        Path, typer.Argument(help="folder of labelled recordings: real-fault tables, or our own with labels.json")
    ],
    runs: Annotated[list[str] | None, typer.Argument(help="only these runs")] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line, the summary last")] = False,
) -> None:
    """Score the incidents of labelled recordings: one line a run, a summary last, exit 0 when all are right."""
    from streams.evaluate import evaluate

    right = evaluate(directory, configuration.load(config), print, tuple(runs or ()), as_json)
    raise SystemExit(0 if right else 1)
