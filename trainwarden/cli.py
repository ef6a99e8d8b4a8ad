"""The `trainwarden` command. Subcommands are imported lazily: `trainwarden collect` loads neither numpy nor torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwarden import __version__
from trainwarden.errors import TrainwardenError

ABOUT = "Names the culprit that stalls or slows a large training job, and heals the job."

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("trainwarden.commands.demo", "hurt a real training job on this machine and watch it heal"),
    "up": ("trainwarden.commands.up", "run broker, store, worker and action service on this machine"),
    "run": ("trainwarden.commands.run", "launch a training script (torchrun's flags); execs trainwarden-run"),
    "checkpoint": (
        "trainwarden.commands.checkpoint",
        "list the saves of a job, or export one for torch.distributed.checkpoint",
    ),
    "collect": ("trainwarden.commands.collect", "the node agent"),
    "scan": ("trainwarden.commands.scan", "one look at this node, without a server: what is here and what looks wrong"),
    "worker": ("trainwarden.commands.worker", "the stream worker: detection and incidents"),
    "store": ("trainwarden.commands.store", "the store writer, and the store itself when embedded"),
    "actions": ("trainwarden.commands.actions", "the action service, and the operator's commands to it"),
    "broker": ("trainwarden.commands.broker", "an embedded broker for a desk: Tansu, or Apache Kafka on Java"),
    "topics": ("trainwarden.commands.topics", "create and check the topics"),
    "sql": ("trainwarden.commands.sql", "ask the store"),
    "status": ("trainwarden.commands.status", "job, nodes, incidents and actions now"),
    "simulate": ("trainwarden.commands.simulate", "a whole cluster with faults, to a recording or into Kafka"),
    "train": ("trainwarden.commands.train", "train the relation model on the simulator's normal life"),
    "record": ("trainwarden.commands.record", "write the live topics to a recording"),
    "replay": ("trainwarden.commands.replay", "verdicts and incidents of a recording"),
    "evaluate": ("trainwarden.commands.evaluate", "score incidents of recordings against their labels"),
    "config": ("trainwarden.commands.config", "check, show and document the configuration"),
}


ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; default $TRAINWARDEN_CONFIG")]


def _listing() -> typer.Typer:
    """Root command that only lists: each real subcommand is a Typer of its own, imported when it is named."""
    listing = typer.Typer(no_args_is_help=True, add_completion=False, help=ABOUT)
    for name, (_, help_text) in COMMANDS.items():
        listing.command(name, help=help_text)(_listed)
    return listing


def _listed() -> None:
    return None


def main(arguments: list[str] | None = None) -> int:
    """Entry point: errors of ours are one sentence on stderr and their exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given in (["--version"], ["-V"]):
        print(f"trainwarden {__version__}")
        return 0
    try:
        if given and given[0] in COMMANDS:
            importlib.import_module(COMMANDS[given[0]][0]).app(args=given[1:], prog_name=f"trainwarden {given[0]}")
        else:
            _listing()(args=given, prog_name="trainwarden")
    except TrainwardenError as error:
        print(f"trainwarden: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    return 0


if __name__ == "__main__":
    main()
