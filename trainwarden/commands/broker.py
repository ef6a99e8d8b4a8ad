"""`trainwarden broker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.commands.lifecycle import configure_logging, stop_event
from trainwarden.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    kind: Annotated[
        str, typer.Option(help="tansu (in memory, for a desk) or kafka (Apache Kafka on Java 17)")
    ] = "tansu",
    listen: Annotated[str, typer.Option(help="host:port")] = "127.0.0.1:9092",
    directory: Annotated[Path, typer.Option(help="data and logs")] = Path("run/broker"),
) -> None:
    """Run an embedded broker until SIGTERM."""
    configure_logging()
    host, port = _address(listen)
    stop = stop_event()
    if kind == "tansu":
        from trainwarden.embedded import tansu

        tansu.serve(host, port, directory, stop)
    elif kind == "kafka":
        from trainwarden.embedded import kafka

        kafka.serve(host, port, directory, stop)
    else:
        raise UsageError(f"--kind {kind}: expected tansu or kafka")


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5:
        raise UsageError(f"--listen {listen}: expected host:port")
    return host, int(port)
