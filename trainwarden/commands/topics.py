"""`trainwarden topics`."""

from __future__ import annotations

import typer

from trainwarden import config as configuration
from trainwarden import topics
from trainwarden.bus import connect
from trainwarden.cli import ConfigOption

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(config: ConfigOption = None, timeout_s: float = 10.0) -> None:
    """Create missing topics, check the others, print the layout."""
    loaded = configuration.load(config)
    wanted = topics.needed(loaded.streams.stages)
    bus = connect(loaded.kafka)
    bus.wait_ready(timeout_s)
    bus.ensure_topics(wanted)
    for topic in wanted:
        kept = "compacted" if topic.compacted else f"{topic.retention_ms // 3_600_000} h"
        print(f"{topic.name:14} {topic.partitions:3} partitions  {kept:10} by {topic.key:12} {topic.carries}")
