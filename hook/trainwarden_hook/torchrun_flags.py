"""torchrun's flags, all of them: what each means here, and one sentence for those that mean nothing here."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from trainwarden_hook.addresses import UsageError

_TEXT = "text"
_SWITCH = "switch"
FLAGS: dict[str, tuple[str, str]] = {
    "nnodes": (_TEXT, "MIN:MAX or one number of nodes"),
    "nproc-per-node": (_TEXT, "a number, or cpu, gpu, xpu, auto"),
    "rdzv-backend": (_TEXT, "c10d (the default) or static"),
    "rdzv-endpoint": (_TEXT, "HOST:PORT, see trainwarden-rendezvous"),
    "rdzv-id": (_TEXT, "default: the job"),
    "rdzv-conf": (_TEXT, "KEY=VALUE,..."),
    "standalone": (_SWITCH, "one node, own store on a free port"),
    "max-restarts": (_TEXT, "restarts without an order (default 3)"),
    "monitor-interval": (_TEXT, "seconds (default 0.1)"),
    "start-method": (_TEXT, "no effect: workers are forked from one process"),
    "event-log-handler": (_TEXT, "no effect: events go to the collector"),
    "role": (_TEXT, "role of the workers (default trainer)"),
    "module": (_SWITCH, "the script is the name of a module"),
    "no-python": (_SWITCH, "the script is a program of its own"),
    "run-path": (_SWITCH, "as always here: the script runs in the worker's interpreter"),
    "log-dir": (_TEXT, "where output goes that is redirected"),
    "redirects": (_TEXT, "0 none, 1 out, 2 err, 3 both; or LOCAL_RANK:CODE,..."),
    "tee": (_TEXT, "as --redirects: files only, nothing is doubled on the console"),
    "local-ranks-filter": (_TEXT, "local ranks whose output may reach the console"),
    "duplicate-stdout-filters": (_TEXT, "no effect"),
    "duplicate-stderr-filters": (_TEXT, "no effect"),
    "node-rank": (_TEXT, "static: this node's number"),
    "master-addr": (_TEXT, "static: address of node 0"),
    "master-port": (_TEXT, "static: port of node 0 (default 29500)"),
    "local-addr": (_TEXT, "default: the address that leads to the endpoint"),
    "logs-specs": (_TEXT, "no effect"),
    "numa-binding": (_TEXT, "no effect: bind the launcher by numactl or the scheduler"),
    "signals-to-handle": (_TEXT, "signals that end the launcher cleanly"),
    "shutdown-timeout": (_TEXT, "seconds between SIGTERM and SIGKILL of a worker; as --grace"),
    "virtual-local-rank": (_SWITCH, "every worker sees LOCAL_RANK 0 and one device"),
}
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
NO_EFFECT = (
    "start-method", "event-log-handler", "duplicate-stdout-filters", "duplicate-stderr-filters", "logs-specs", "numa-binding",
)  # fmt: skip
STATIC_PORT = "29500"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP"
OUT, ERR = 1, 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of torchrun, with dashes or underscores."""
    group = parser.add_argument_group("as torchrun (each may be given as PET_<FLAG> in the environment too)")
    for name, (kind, text) in FLAGS.items():
        names = [*([SHORT[name]] if name in SHORT else []), f"--{name}"]
        if "-" in name:
            names.append("--" + name.replace("-", "_"))
        if kind == _SWITCH:
            group.add_argument(*names, action="store_true", help=text)
        else:
            group.add_argument(*names, default="", help=text)


def fill_from_environment(given: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """``PET_NNODES`` and the like stand in for flags that are not given."""
    for name, (kind, _) in FLAGS.items():
        dest = name.replace("-", "_")
        value = environment.get(f"PET_{dest.upper()}", "")
        if value and not getattr(given, dest):
            setattr(given, dest, value not in {"", "0"} if kind == _SWITCH else value)


def without_effect(given: argparse.Namespace) -> list[str]:
    """One sentence for each given flag that changes nothing here."""
    said = [f"--{name}: {FLAGS[name][1]}" for name in NO_EFFECT if getattr(given, name.replace("-", "_"))]
    if given.tee:
        said.append(f"--tee: {FLAGS['tee'][1]}")
    return said


def number(text: str, flag: str, default: float, whole: bool = False) -> float:
    """The number that a flag was given, or its default.

    Raises
    ------
    UsageError
        It is none.
    """
    try:
        return (int(text) if whole else float(text)) if text else default
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, expected a {'whole ' if whole else ''}number") from None


def workers_of(text: str) -> int:
    """``--nproc-per-node``: a number, or counted from this machine.

    Raises
    ------
    UsageError
        Neither, or accelerators are asked for where there are none.
    """
    if text in {"", "1"}:
        return 1
    if text == "cpu":
        return os.cpu_count() or 1
    if text not in {"gpu", "xpu", "auto"}:
        return int(number(text, "--nproc-per-node", 1, whole=True))
    import torch

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count == 0 and text != "auto":
        raise UsageError(f"--nproc-per-node is {text} but this machine has no accelerator that torch can use")
    return count or os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the nodes meet. `node_rank` is -1 where the rendezvous gives the ranks; `hosts` whether this node serves the store."""

    endpoint: str
    node_rank: int
    hosts: bool


def meeting_of(given: argparse.Namespace, conf: Mapping[str, str], nodes: tuple[int, int]) -> Meeting:
    """From ``--rdzv-backend`` and what belongs to it.

    Raises
    ------
    UsageError
        A backend that is not there, or a static one without fixed nodes.
    """
    backend = given.rdzv_backend
    asked = conf.get("is_host", "").lower() in {"1", "true"}
    if backend == "c10d" or (not backend and not (given.master_addr or given.node_rank)):
        # who says c10d expects what torchrun does: the node that the endpoint names serves the store, unless somebody does
        told = "is_host" in given.rdzv_conf
        hosts = asked or (backend == "c10d" and not told and is_here(given.rdzv_endpoint.rpartition(":")[0]))
        return Meeting(given.rdzv_endpoint, -1, hosts)
    if backend not in {"", "static"}:
        known = "c10d (a store at --rdzv-endpoint) or static (--master-addr, --master-port, --node-rank)"
        raise UsageError(f"--rdzv-backend is {backend!r}, expected {known}")
    if nodes[0] != nodes[1]:
        raise UsageError(
            f"--nnodes is {given.nnodes} but a static rendezvous has a fixed number; use --rdzv-backend c10d"
        )
    rank = int(number(given.node_rank, "--node-rank", 0, whole=True))
    if not 0 <= rank < nodes[1]:
        raise UsageError(f"--node-rank is {rank}, expected 0 to {nodes[1] - 1} with --nnodes {nodes[1]}")
    endpoint = given.rdzv_endpoint or f"{given.master_addr or '127.0.0.1'}:{given.master_port or STATIC_PORT}"
    return Meeting(endpoint, rank, rank == 0 or asked)


def is_here(host: str) -> bool:
    """Whether ``host`` is an address of this machine: then a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return bool(host)


def signals_of(text: str) -> tuple[int, ...]:
    """``--signals-to-handle`` as numbers; SIGTERM and SIGINT always are among them.

    Raises
    ------
    UsageError
        A name that is no signal.
    """
    names = {part.strip() for part in (text or DEFAULT_SIGNALS).split(",") if part.strip()} | {"SIGTERM", "SIGINT"}
    try:
        return tuple(sorted(int(signal.Signals[name]) for name in names))
    except KeyError as error:
        raise UsageError(f"--signals-to-handle names {error.args[0]!r}, expected signals such as SIGTERM") from None


def redirects_of(text: str, flag: str = "--redirects") -> dict[int, int]:
    """Local rank → bits of what goes to files; key -1 stands for all others.

    >>> redirects_of("0:3,1:0")
    {0: 3, 1: 0}
    """
    if not text:
        return {}
    try:
        if ":" not in text:
            return {-1: _code(text)}
        return {int(rank): _code(code) for rank, code in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, expected 0 to 3, or LOCAL_RANK:CODE parts separated by commas") from None


def _code(text: str) -> int:
    code = int(text)
    if not 0 <= code <= (OUT | ERR):
        raise ValueError(text)
    return code


def ranks_of(text: str, flag: str) -> frozenset[int]:
    """A list of ranks, empty for all.

    Raises
    ------
    UsageError
        Something in it is no number.
    """
    try:
        return frozenset(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{flag} is {text!r}, expected numbers separated by commas") from None
