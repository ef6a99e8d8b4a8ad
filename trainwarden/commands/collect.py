"""`trainwarden collect`."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.commands.lifecycle import configure_logging
from trainwarden.config import Config
from trainwarden.errors import UsageError
from trainwarden.settings import parse_duration_ms

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    config: ConfigOption = None,
    node: Annotated[
        str | None, typer.Option(help="name of this node; default: collector.node, else the host name")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="root of /proc and /sys")] = None,
    once: Annotated[bool, typer.Option("--once", help="print what the sources read now, publish nothing")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="with --once: each source, what it finds here and what not and why")
    ] = False,
    tell: Annotated[
        str, typer.Option(help="order running collectors: interval_ms=5s or log_level=DEBUG; nothing is collected")
    ] = "",
    nodes: Annotated[
        str, typer.Option(help="with --tell: which nodes (names, gpu[001-032], rack7-*, rack=r7; * for all)")
    ] = "",
    ttl: Annotated[str, typer.Option(help="with --tell: how long the order holds, at most 24h")] = "10m",
    author: Annotated[str, typer.Option(help="with --tell: who orders")] = "",
    comment: Annotated[str, typer.Option(help="with --tell: why")] = "",
    log_level: str = "INFO",
) -> None:
    """Sample this node once a second and publish until SIGTERM."""
    from collectors import agent, optout

    loaded = configuration.load(config)
    changed = {name: value for name, value in (("node", node), ("root", root)) if value is not None}
    loaded = replace(loaded, collector=replace(loaded.collector, **changed))  # type: ignore[arg-type]
    if explain and not once:
        raise UsageError("--explain explains one look: give --once too")
    configure_logging("ERROR" if explain else log_level)
    if tell:
        _tell(loaded, tell, nodes, ttl, author, comment)
        return
    loaded = optout.at_start(loaded)
    if once and explain:
        _explain(loaded)
    elif once:
        print(json.dumps(agent.collect_once(loaded), indent=1))
    else:
        agent.run(loaded)


def _explain(config: Config) -> None:
    from collectors.agent import look
    from collectors.explain import explanations

    for explained in explanations(look(config)):
        for line in explained.lines():
            print(line)


def _tell(config: Config, tell: str, nodes: str, ttl: str, author: str, comment: str) -> None:
    """Check the order here, so that a wrong one never reaches a topic, and publish it."""
    from collectors.control import OrderError, check
    from trainwarden import topics
    from trainwarden.bus import connect
    from trainwarden.records import CollectorOrder, encode

    key, _, value = tell.partition("=")
    now_ns = time.time_ns()
    expires_ns = now_ns + int(parse_duration_ms(ttl, "--ttl", "s") * 1e6)
    order = CollectorOrder(
        cluster=config.cluster, observed_at_ns=now_ns, nodes=nodes, key=key.strip(), value=value.strip(), author=author,
        comment=comment, expires_at_ns=expires_ns,
    )  # fmt: skip
    try:
        check(order)
    except OrderError as error:
        raise UsageError(f"--tell {tell} --nodes {nodes!r}: {error}") from None
    publisher = connect(config.kafka).publisher()
    try:
        publisher.publish(topics.CONTROL.name, order.key.encode(), encode(order))
        publisher.flush(10.0)
    finally:
        publisher.close()
    print(
        f"{order.key} = {order.value} for {nodes} until {time.strftime('%H:%M:%S', time.gmtime(expires_ns / 1e9))} UTC"
    )
