"""The `trainwarden` command. Subcommands are imported lazily: `trainwarden collect` loads neither numpy nor torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from trainwarden import __version__
from trainwarden.errors import TrainwardenError

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("trainwarden.commands.demo", "hurt a real training job on this machine and watch it heal"),
    "up": ("trainwarden.commands.up", "run broker, store, worker and action service on this machine"),
    "run": ("trainwarden.commands.run", "launch a training script (torchrun's flags); execs trainwarden-run"),
    "collect": ("trainwarden.commands.collect", "the node agent"),
    "worker": ("trainwarden.commands.worker", "the stream worker: detection and incidents"),
    "store": ("trainwarden.commands.store", "the store writer, and the store itself when embedded"),
    "actions": ("trainwarden.commands.actions", "the action service, and the operator's commands to it"),
    "broker": ("trainwarden.commands.broker", "an embedded broker for a desk: Tansu, or Apache Kafka on Java"),
    "topics": ("trainwarden.commands.topics", "create and check the topics"),
    "sql": ("trainwarden.commands.sql", "ask the store"),
    "status": ("trainwarden.commands.status", "job, nodes, incidents and actions now"),
    "record": ("trainwarden.commands.record", "write the live topics to a recording"),
    "replay": ("trainwarden.commands.replay", "verdicts and incidents of a recording"),
    "evaluate": ("trainwarden.commands.evaluate", "score incidents of recordings against their labels"),
    "config": ("trainwarden.commands.config", "check, show and document the configuration"),
}


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> Any:
        del ctx
        if name not in COMMANDS:
            return None
        module, help_text = COMMANDS[name]
        if _only_listing():
            return click.Command(name, help=help_text, short_help=help_text)
        loaded: Any = typer.main.get_command(importlib.import_module(module).app)
        loaded.name, loaded.short_help = name, help_text
        return loaded


def _only_listing() -> bool:
    return len(sys.argv) == 1 or sys.argv[1:] in (["--help"], ["-h"])


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; default $TRAINWARDEN_CONFIG")]


@app.callback()
def root() -> None:
    """Names the culprit that stalls or slows a large training job, and heals the job."""


def main(arguments: list[str] | None = None) -> int:
    """Entry point: errors of ours are one sentence on stderr and their exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given in (["--version"], ["-V"]):
        print(f"trainwarden {__version__}")
        return 0
    try:
        app(args=given, prog_name="trainwarden", standalone_mode=True)
    except TrainwardenError as error:
        print(f"trainwarden: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return 0


if __name__ == "__main__":
    main()
