"""`trainwarden checkpoint`: looks at saves and takes them elsewhere; becomes the hook's trainwarden-checkpoint."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from trainwarden.errors import UnavailableError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def checkpoint(ctx: typer.Context) -> None:
    """List or export saves; all arguments go to trainwarden-checkpoint unchanged."""
    if importlib.util.find_spec("trainwarden_hook") is None:
        raise UnavailableError(
            "trainwarden-checkpoint is not installed here: pip install trainwarden-hook into the training environment"
        )
    os.execv(sys.executable, [sys.executable, "-m", "trainwarden_hook.export", *ctx.args])
