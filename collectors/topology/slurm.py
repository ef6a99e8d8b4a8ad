"""Slurm's words: ``topology.conf``, ``scontrol show topology``, and the environment of a job's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from collectors.topology.hostlist import HostlistError, matches

MAX_LINES = 100_000
JOB_KEYS = {
    "SLURM_JOB_ID": "slurm_job_id",
    "SLURM_JOB_NAME": "slurm_job_name",
    "SLURM_JOB_PARTITION": "slurm_partition",
    "SLURM_JOB_ACCOUNT": "slurm_account",
    "SLURM_NNODES": "slurm_nodes",
    "SLURM_RESTART_COUNT": "slurm_restarts",
}


@dataclass(frozen=True)
class Switch:
    """A switch or block. `nodes` and `children` are host lists, unexpanded; `level` is -1 where the text does not say it."""

    name: str
    nodes: str = ""
    children: str = ""
    level: int = -1
    block: bool = False


def parse_topology(text: str) -> tuple[Switch, ...]:
    """Switches and blocks of ``topology.conf`` or ``scontrol show topology``; other lines and broken ones are skipped.

    Examples
    --------
    >>> parse_topology("SwitchName=s0 Level=0 LinkSpeed=1 Nodes=tux[0-5]")
    (Switch(name='s0', nodes='tux[0-5]', children='', level=0, block=False),)
    """
    return tuple(switch for line in _lines(text) if (switch := _switch(line)) is not None)


def place_of(node: str, switches: tuple[Switch, ...]) -> dict[str, str]:
    """``leaf``, ``spine`` (the switches above it, nearest first) and ``block`` of a node; empty when it is named nowhere."""
    found: dict[str, str] = {}
    block = next((s for s in switches if s.block and _holds(s.nodes, node)), None)
    if block is not None:
        found["block"] = block.name
    leaf = _leaf(node, switches)
    if leaf is None:
        return found
    found["leaf"] = leaf.name
    above = _above(leaf, switches)
    if above:
        found["spine"] = " ".join(switch.name for switch in above)
    return found


def place_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """``leaf`` and ``spine`` out of ``SLURM_TOPOLOGY_ADDR`` (``spine1.leaf3.node7``) and its pattern (``switch.switch.node``)."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(address) != len(kinds) or kinds[-1] != "node":
        return {}  # a node name with dots cannot be told from a switch
    switches = [name for name, kind in zip(address, kinds, strict=True) if kind == "switch" and name]
    blocks = [name for name, kind in zip(address, kinds, strict=True) if kind == "block" and name]
    found = {"leaf": switches[-1]} if switches else {}
    if len(switches) > 1:
        found["spine"] = " ".join(reversed(switches[:-1]))
    return {**found, "block": blocks[-1]} if blocks else found


def job_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What the job's topology event says of the Slurm job."""
    return {ours: environment[theirs] for theirs, ours in JOB_KEYS.items() if environment.get(theirs)}


def _lines(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    return [line.partition("#")[0].strip() for line in joined.splitlines()[:MAX_LINES]]


def _switch(line: str) -> Switch | None:
    words = {key.lower(): value for key, equals, value in (word.partition("=") for word in line.split()) if equals}
    name = words.get("switchname") or words.get("blockname")
    if not name:
        return None
    level = words.get("level", "")
    number = int(level) if level.isdecimal() and len(level) < 4 else -1
    return Switch(name, words.get("nodes", ""), words.get("switches", ""), number, "blockname" in words)


def _holds(hosts: str, name: str) -> bool:
    try:
        return bool(hosts) and matches(hosts, name)
    except HostlistError:
        return False


def _leaf(node: str, switches: tuple[Switch, ...]) -> Switch | None:
    """The lowest switch that names the node: ``scontrol`` lists the nodes of a spine too."""
    holding = [switch for switch in switches if not switch.block and _holds(switch.nodes, node)]
    own = [switch for switch in holding if switch.level == 0 or not switch.children]
    return next(iter(own or holding), None)


def _above(switch: Switch, switches: tuple[Switch, ...]) -> list[Switch]:
    found: list[Switch] = []
    here = switch
    while len(found) < 8:
        parent = next((s for s in switches if s.children and _holds(s.children, here.name)), None)
        if parent is None or parent in found:
            break
        found.append(parent)
        here = parent
    return found


def node_names(node: str, environment: Mapping[str, str]) -> list[str]:
    """Names that Slurm may know this node by: its own word, ours, and ours without the domain."""
    names = [environment.get("SLURMD_NODENAME", ""), node, node.partition(".")[0]]
    return [name for name in dict.fromkeys(names) if name and not set(name) & set("[],")]
