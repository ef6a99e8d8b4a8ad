"""What a node's owner switched off by a label: the whole collection, or single sources."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from collectors.agent import node_name
from collectors.base import registry
from collectors.topology.apiserver import ApiServer
from collectors.topology.kubernetes import OPT_OUT_LABEL as LABEL
from collectors.topology.kubernetes import labels_of_node
from trainwarden.config import Config

logger = logging.getLogger(__name__)

WATCHER = "kubernetes"
"""Reads the label: it stays, else nobody would see that the label is gone."""
FILE = "opt_out.json"
START_DEADLINE_S = 5.0


@dataclass(frozen=True)
class OptOut:
    """Sources that are off, and names in labels that are no source."""

    sources: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def read_labels(labels: Mapping[str, str], known: Iterable[str]) -> OptOut:
    """``trainwarden.io/collect=off`` switches everything off but the watcher, ``trainwarden.io/collect.<source>=off`` one source.

    Examples
    --------
    >>> read_labels({"trainwarden.io/collect.mesh": "off", "trainwarden.io/collect.gpu": "off"}, ["kubernetes", "mesh"])
    OptOut(sources=('mesh',), unknown=('gpu',))
    """
    names = sorted(known)
    if labels.get(LABEL) == "off":
        return OptOut(tuple(name for name in names if name != WATCHER))
    prefix = f"{LABEL}."
    named = sorted(
        key.removeprefix(prefix) for key, value in labels.items() if key.startswith(prefix) and value == "off"
    )
    return OptOut(
        tuple(name for name in named if name in names and name != WATCHER),
        tuple(name for name in named if name not in names or name == WATCHER),
    )


def applied(config: Config, sources: Iterable[str]) -> Config:
    """The configuration without these sources; the watcher is told which they were."""
    off = sorted(sources)
    tables = {name: dict(table) for name, table in config.collector.sources.items()}
    for name in off:
        tables[name] = {"enabled": False}
    tables[WATCHER] = {**tables.get(WATCHER, {}), "opted_out": off}
    return replace(config, collector=replace(config.collector, sources=tables))


def at_start(config: Config, api: ApiServer | None = None) -> Config:
    """The configuration after the label of this node, outside of pods as it is.

    The API server is given five seconds. When it does not answer, what the agent before this one knew holds: a node that was left alone
    is left alone.
    """
    table = config.collector.sources.get(WATCHER, {})
    server = api or (
        ApiServer.of_pod(START_DEADLINE_S) if table.get("enabled", True) and table.get("api", True) else None
    )
    if server is None:
        return config
    directory = config.path(config.collector.spool_directory, node_name(config), "spool")
    try:
        labels = labels_of_node(server.node(str(table.get("node") or os.environ.get("NODE_NAME") or node_name(config))))
    except (OSError, ValueError) as error:
        off = saved(directory)
        logger.warning(
            "the label %s cannot be read (%s): as before, %s", LABEL, error, ", ".join(off) or "nothing is off"
        )
        return applied(config, off)
    found = read_labels(labels, registry().all())
    if found.unknown:
        logger.warning("no source: %s, named by a label %s.<source>=off of this node", ", ".join(found.unknown), LABEL)
    save(directory, found.sources)
    return applied(config, found.sources)


def saved(directory: Path) -> tuple[str, ...]:
    """What was off the last time; nothing when nobody knows."""
    try:
        return tuple(msgspec.json.decode((directory / FILE).read_bytes(), type=list[str]))
    except (OSError, msgspec.DecodeError):
        return ()


def save(directory: Path, sources: Iterable[str]) -> None:
    """Keep it for the next agent."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_bytes(msgspec.json.encode(sorted(sources)))
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s): a later agent may begin before it has read the label", directory / FILE, error
        )
