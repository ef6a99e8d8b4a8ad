"""`trainwarden up`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging, stop_event
from trainwarden.config import Config
from trainwarden.demo.processes import Children
from trainwarden.errors import ConfigError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    config: ConfigOption = None,
    kafka: Annotated[
        bool, typer.Option("--with-broker/--without-broker", help="start an embedded broker at kafka.url too")
    ] = True,
    kind: Annotated[str, typer.Option(help="embedded broker: tansu or kafka")] = "tansu",
) -> None:
    """Run broker, store, worker and action service on this machine until Ctrl-C; collectors and wardens run on the nodes."""
    loaded = configuration.load(config)
    configure_logging()
    stop = stop_event()
    children = Children(loaded.run_dir / "logs", {})
    try:
        if kafka:
            children.start(
                "broker",
                _ours(
                    "broker",
                    "--kind",
                    kind,
                    "--listen",
                    _address(loaded),
                    "--directory",
                    str(loaded.run_dir / "broker"),
                ),
            )
        _wait_for_topics(loaded)
        for part in ("store", "worker", "actions"):
            children.start(part, _ours(part, *_config_arguments(config)))
        print(
            f"status page http://{loaded.actions.listen}/  store {loaded.store.shown_url}  logs {loaded.run_dir / 'logs'}",
            flush=True,
        )
        while not stop.wait(0.5):
            children.require_alive()
    finally:
        children.stop_all()


def _wait_for_topics(config: Config) -> None:
    from trainwarden import topics
    from trainwarden.bus import connect

    bus = connect(config.kafka)
    bus.wait_ready(30.0)
    bus.ensure_topics(topics.ALL)
    bus.close()


def _ours(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainwarden.cli", *arguments]


def _config_arguments(path: Path | None) -> list[str]:
    return ["--config", str(path)] if path is not None else []


def _address(config: Config) -> str:
    scheme, _, address = config.kafka.url.partition("://")
    if scheme != "kafka" or "," in address:
        raise ConfigError(
            f"kafka.url: an embedded broker needs one address such as kafka://127.0.0.1:9092, found {config.kafka.url!r}"
        )
    return address
