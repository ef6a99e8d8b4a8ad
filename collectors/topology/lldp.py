"""Switches at the other end of the cables, as lldpd tells: ``lldpctl -f json`` and its more regular sister ``json0``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from collectors.topology.ibnet import FormatError

MAX_NEIGHBOURS = 1024
MAX_NAME = 200


@dataclass(frozen=True)
class Neighbour:
    """What is at the other end of `interface`."""

    interface: str
    switch: str
    port: str


def parse_lldp(text: str) -> list[Neighbour]:
    """Neighbours in the order of the output; an interface without a neighbour is left out. Raises `FormatError`.

    Examples
    --------
    >>> parse_lldp('{"lldp":{"interface":{"eth0":{"chassis":{"leaf1":{}},"port":{"id":{"type":"ifname","value":"swp3"}}}}}}')
    [Neighbour(interface='eth0', switch='leaf1', port='swp3')]
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({error}): expected the output of lldpctl -f json") from None
    if not isinstance(document, dict) or "lldp" not in document:
        raise FormatError("no key 'lldp': expected the output of lldpctl -f json")
    found = []
    for top in _entries(document["lldp"]):
        for name, entry in _named(top.get("interface")):
            neighbour = _neighbour(name, entry)
            if neighbour is not None:
                found.append(neighbour)
    return found[:MAX_NEIGHBOURS]


def _neighbour(interface: str, entry: dict[str, Any]) -> Neighbour | None:
    switch = next((_switch(name, chassis) for name, chassis in _named(entry.get("chassis"))), "")
    port = next((_value(port.get("id")) or _value(port.get("descr")) for port in _entries(entry.get("port"))), "")
    return Neighbour(interface[:MAX_NAME], switch, port) if interface and switch else None


def _switch(name: str, chassis: dict[str, Any]) -> str:
    """Its system name; an anonymous one is known by the address of its chassis."""
    return (name or _value(chassis.get("name")) or _value(chassis.get("id")))[:MAX_NAME]


def _entries(node: Any) -> list[dict[str, Any]]:
    """One table or a list of them."""
    items = node if isinstance(node, list) else [node]
    return [item for item in items if isinstance(item, dict)]


def _named(node: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, table) pairs: ``{"eth0": {...}}``, a list of such, or (json0) ``[{"name": "eth0", ...}]``.

    A chassis without a name is its own table: its keys are then fields, not names.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for item in _entries(node):
        name = item.get("name")
        if isinstance(name, str):
            found.append((name, item))
        elif "id" in item or isinstance(name, list):
            found.append(("", item))
        else:
            found += [(key, value) for key, value in item.items() if isinstance(value, dict)]
    return found


def _value(node: Any) -> str:
    if isinstance(node, str):
        return node[:MAX_NAME]
    for item in _entries(node):
        value = item.get("value")
        if isinstance(value, str):
            return value[:MAX_NAME]
    return ""
