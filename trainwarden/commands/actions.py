"""`trainwarden actions` (the service) and the operator's commands to it."""

from __future__ import annotations

import getpass
import json
from typing import Annotated, Any

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Reason = Annotated[str, typer.Option(help="why; it stands in the ledger")]


@app.callback(invoke_without_command=True)
def serve(ctx: typer.Context, config: ConfigOption = None, log_level: str = "INFO") -> None:
    """Without a subcommand: plan, act and verify until SIGTERM. With one: speak to the running service."""
    loaded = configuration.load(config)
    ctx.obj = loaded
    if ctx.invoked_subcommand is not None:
        return
    from actions.console.mount import mount
    from actions.notify.service import in_background
    from actions.service import run
    from trainwarden.selfmetrics import Metrics

    configure_logging(log_level)
    metrics = Metrics("actions")  # one page for both
    with in_background(loaded, metrics):
        run(loaded, mount, metrics)


@app.command()
def plans(ctx: typer.Context, limit: int = 20) -> None:
    """Newest plans with their rows."""
    _print(_client(ctx).plans(limit))


@app.command()
def nodes(ctx: typer.Context) -> None:
    """Nodes as their wardens describe them."""
    _print(_client(ctx).nodes())


@app.command()
def health(ctx: typer.Context) -> None:
    """State, fence and kill switch of the service."""
    _print(_client(ctx).health())


@app.command()
def approve(ctx: typer.Context, plan: str, reason: Reason) -> None:
    """Let a waiting plan run."""
    _print(_client(ctx).approve(plan, reason))


@app.command()
def reject(ctx: typer.Context, plan: str, reason: Reason) -> None:
    """End a waiting plan."""
    _print(_client(ctx).reject(plan, reason))


@app.command("return")
def return_node(ctx: typer.Context, node: str, reason: Reason) -> None:
    """Admit an excluded node and let its job grow again."""
    _print(_client(ctx).return_node(node, reason))


@app.command("kill-switch")
def kill_switch(ctx: typer.Context, on: Annotated[bool, typer.Option("--on/--off")], reason: Reason) -> None:
    """Stop everything that acts, or let it act again."""
    _print(_client(ctx).kill_switch(on, reason))


@app.command("reset-breaker")
def reset_breaker(ctx: typer.Context, reason: Reason) -> None:
    """Close the breaker; plans that came meanwhile are dropped."""
    _print(_client(ctx).reset_breaker(reason))


@app.command("raise-fence")
def raise_fence(ctx: typer.Context, at_least: int, reason: Reason) -> None:
    """Continue above the fence of a ledger that is gone."""
    _print(_client(ctx).raise_fence(at_least, reason))


def _client(ctx: typer.Context) -> Any:
    from actions.operator import OperatorClient

    return OperatorClient(ctx.obj, getpass.getuser())


def _print(value: Any) -> None:
    print(json.dumps(value, indent=1))
