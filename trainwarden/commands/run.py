"""`trainwarden run`: becomes trainwarden-run, the launcher of the hook distribution."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer

from trainwarden.errors import UnavailableError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(ctx: typer.Context) -> None:
    """Launch a training script; all arguments go to trainwarden-run unchanged."""
    beside = Path(sys.executable).with_name("trainwarden-run")
    program = str(beside) if beside.exists() else shutil.which("trainwarden-run")
    if program is None:
        raise UnavailableError(
            "trainwarden-run is not installed here: pip install trainwarden-hook into the training environment"
        )
    os.execv(program, [program, *ctx.args])
