"""The file that says which rails there are and where each node is on them: one file for all nodes of a job.

::

    port = 9471                     # heartbeats, UDP, on every rail

    [rails]                         # in order of preference
    a = "eth0"                      # the interface, where it has the same name on every node
    b = "eth1"

    [nodes.n0]
    address = "10.78.0.10"          # the address that training binds, on an interface of its own
    a = "10.77.0.10"                # its address on each rail
    b = "10.79.0.10"
"""

from __future__ import annotations

import hashlib
import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainwarden_hook.addresses import UsageError

MAX_RAILS = 8
NODE_KEYS = frozenset({"address", "interfaces"})


@dataclass(frozen=True, slots=True)
class Tuning:
    """When a rail is bad, and how long it must be well before it is used again."""

    heartbeat_ms: float = 40.0
    """Between two heartbeats to each peer on each rail, while nothing is amiss; a quarter of it when anything changes or is missed."""
    silent_beats: int = 3
    """So many came on another rail and none on this: it is dead."""
    loss_ratio: float = 0.02
    """Share of heartbeats lost within the window from which a rail is degraded; it is well again below half of it."""
    loss_window_beats: int = 256
    slow_ms: float = 10.0
    """Median round trip from which a rail is degraded, if another one takes less than a third of that."""
    hold_ms: float = 60.0
    """A repaired rail must be well for so long before it is used again, after a first fault."""
    flap_hold_s: float = 1.0
    """The same after a second fault; doubled with each further one."""
    hold_limit_s: float = 60.0
    calm_s: float = 60.0
    """Well for so long: the next fault is a first one again."""
    lost_s: float = 1.0
    """Nothing from a peer on any rail for so long is told."""
    rto_min_ms: int = 50
    """Shortest retransmission time-out of TCP over our routes (above the 40 ms of delayed acknowledgements); 0 leaves the kernel's 200."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node as the others reach it: `address` is what training binds, `on` its address per rail."""

    name: str
    address: str
    on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rails:
    """The checked file, from the point of view of one node.

    Attributes
    ----------
    names, interfaces
        Per rail, in order of preference.
    nodes
        Names of all nodes, sorted; heartbeats name a node by its place here.
    mptcp
        Whether connections are to be MPTCP with a standby on each further rail.
    nccl
        Whether NCCL's own port fail-over is switched on and its log followed.
    """

    own: Peer
    peers: tuple[Peer, ...]
    names: tuple[str, ...]
    interfaces: tuple[str, ...]
    nodes: tuple[str, ...]
    port: int
    mptcp: bool
    mptcp_port: int
    nccl: bool
    digest: bytes
    tuning: Tuning = field(default_factory=Tuning)

    def rail(self, name: str) -> int:
        """Place of the rail called ``name``.

        Raises
        ------
        UsageError
            There is none.
        """
        if name not in self.names:
            raise UsageError(f"there is no rail {name!r}; the rails are {', '.join(self.names)}")
        return self.names.index(name)


def read_rails(path: str, node: str) -> Rails:
    """The file at ``path`` as node ``node`` sees it.

    Raises
    ------
    UsageError
        One sentence: which key, what was found, what was expected.
    """
    try:
        with open(path, "rb") as file:
            body = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the links file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the links file {path} is no TOML: {error}") from error
    return parse_rails(body, node)


def parse_rails(body: Mapping[str, Any], node: str) -> Rails:
    """As `read_rails`, from the parsed file."""
    body = dict(body)
    rails, nodes = _table(body, "rails"), _table(body, "nodes")
    if not 2 <= len(rails) <= MAX_RAILS:
        raise UsageError(f"links: there are {len(rails)} rails, expected 2 to {MAX_RAILS}")
    if node not in nodes:
        raise UsageError(f"links: node {node!r} is not among the nodes {', '.join(sorted(nodes))}; add [nodes.{node}]")
    port, mptcp_port = _port(body, "port", 9471), _port(body, "mptcp_port", 9480)
    mptcp, nccl = _switch(body, "mptcp"), _switch(body, "nccl")
    tuning = _tuning(body)
    if body:
        raise UsageError(f"links: unknown key {sorted(body)[0]!r}")
    names = tuple(rails)
    known = {name: _peer(name, entry, names) for name, entry in sorted(nodes.items())}
    _check_distinct(list(known.values()))
    return Rails(
        own=known[node], peers=tuple(peer for name, peer in known.items() if name != node), names=names,
        interfaces=_interfaces(rails, nodes[node], node), nodes=tuple(known), port=port, mptcp=mptcp, mptcp_port=mptcp_port,
        nccl=nccl, digest=_digest(names, known), tuning=tuning,
    )  # fmt: skip


def _table(body: dict[str, Any], key: str) -> dict[str, Any]:
    found = body.pop(key, None)
    if not isinstance(found, dict) or not found:
        raise UsageError(f"links: [{key}] is {found!r}, expected a table with at least one entry")
    return found


def _port(body: dict[str, Any], key: str, default: int) -> int:
    found = body.pop(key, default)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= 65000:
        raise UsageError(f"links: {key} is {found!r}, expected a port from 1 to 65000")
    return found


def _switch(body: dict[str, Any], key: str) -> bool:
    found = body.pop(key, False)
    if not isinstance(found, bool):
        raise UsageError(f"links: {key} is {found!r}, expected true or false")
    return found


def _tuning(body: dict[str, Any]) -> Tuning:
    given: dict[str, float] = {}
    for setting in fields(Tuning):
        if setting.name in body:
            found = body.pop(setting.name)
            least = 0 if setting.name == "rto_min_ms" else 1e-9
            if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found < 1e9:
                raise UsageError(f"links: {setting.name} is {found!r}, expected a number above 0")
            given[setting.name] = int(found) if isinstance(setting.default, int) else float(found)
    return Tuning(**given)  # type: ignore[arg-type]


def _peer(name: str, entry: object, rails: tuple[str, ...]) -> Peer:
    if not isinstance(entry, dict):
        raise UsageError(f"links: nodes.{name} is {entry!r}, expected a table")
    if unknown := sorted(set(entry) - NODE_KEYS - set(rails)):
        raise UsageError(f"links: nodes.{name} has the unknown key {unknown[0]!r}, the rails are {', '.join(rails)}")
    on = tuple(_address(entry.get(rail), f"nodes.{name}.{rail}") for rail in rails)
    return Peer(name, _address(entry.get("address"), f"nodes.{name}.address"), on)


def _address(found: object, key: str) -> str:
    try:
        if isinstance(found, str):
            return str(ipaddress.IPv4Address(found))
    except ValueError:
        pass
    raise UsageError(f"links: {key} is {found!r}, expected an IPv4 address (IPv6 is not moved by this version)")


def _check_distinct(peers: list[Peer]) -> None:
    owner: dict[str, str] = {}
    for peer in peers:
        for address in {peer.address, *peer.on}:
            if address in owner:
                raise UsageError(f"links: {address} belongs to both {owner[address]} and {peer.name}")
            owner[address] = peer.name


def _interfaces(rails: Mapping[str, Any], entry: Mapping[str, Any], node: str) -> tuple[str, ...]:
    own = entry.get("interfaces", {})
    if not isinstance(own, dict) or set(own) - set(rails):
        raise UsageError(f"links: nodes.{node}.interfaces is {own!r}, expected a table of rails")
    chosen = tuple(own.get(rail, interface) for rail, interface in rails.items())
    for rail, interface in zip(rails, chosen, strict=True):
        if not isinstance(interface, str) or not 1 <= len(interface) <= 15:
            raise UsageError(
                f"links: the interface of rail {rail} is {interface!r}, expected a name of 1 to 15 letters"
            )
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"links: two rails of node {node} are on one interface: {', '.join(chosen)}")
    return chosen


def _digest(names: tuple[str, ...], known: Mapping[str, Peer]) -> bytes:
    """Same on all nodes that have the same file: heartbeats of another file are not understood, but counted."""
    text = repr((names, [(peer.name, peer.address, peer.on) for peer in known.values()]))
    return hashlib.sha256(text.encode()).digest()[:4]
