"""Command line of ``trainwarden-run``: the flags of torchrun that matter, and a few of ours."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from trainwarden_hook.addresses import UsageError, address_towards, parse_endpoint

RENDEZVOUS_DEFAULTS = {
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "3",
    "last_call_timeout": "3",
    "join_timeout": "600",
    "is_host": "false",
}
PRELOAD = "torch,torch._dynamo,torch.distributed,torch.nn.parallel,torch.optim,torch.utils.data"
MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one launcher; times in seconds."""

    job: str
    node: str
    min_nodes: int
    max_nodes: int
    workers_per_node: int
    endpoint: tuple[str, int]
    standalone: bool
    rdzv_id: str
    rdzv_conf: dict[str, str]
    local_addr: str
    max_restarts: int
    monitor_interval_s: float
    order_timeout_s: float
    start_wait_s: float
    join_timeout_s: float
    grace_s: float
    exit_barrier_s: float
    pg_timeout_s: int
    run_dir: str
    checkpoint_dir: str
    socket_path: str
    warden_path: str
    preload: tuple[str, ...]
    fresh_interpreter: bool
    script: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwarden-run", description="Elastic launcher: heals by orders of a warden, or alone as torchrun does."
    )
    meeting = parser.add_argument_group("rendezvous (as torchrun)")
    meeting.add_argument("--standalone", action="store_true", help="one node, own store on a free port")
    meeting.add_argument("--nnodes", default="1:1", metavar="MIN:MAX")
    meeting.add_argument("--nproc-per-node", type=int, default=1)
    meeting.add_argument("--rdzv-endpoint", default="", metavar="HOST:PORT", help="see trainwarden-rendezvous")
    meeting.add_argument("--rdzv-id", default="", help="default: the job")
    meeting.add_argument("--rdzv-conf", default="", metavar="KEY=VALUE,...")
    meeting.add_argument("--local-addr", default="", help="default: the address that leads to the endpoint")
    meeting.add_argument("--max-restarts", type=int, default=3, help="restarts without an order (default 3)")
    meeting.add_argument("--monitor-interval", type=float, default=0.1, metavar="S")
    _add_own(parser.add_argument_group("trainwarden"))
    parser.add_argument("script", nargs=argparse.REMAINDER, help="training script and its arguments, or -m module ...")
    return parser


def _add_own(own: argparse._ArgumentGroup) -> None:
    own.add_argument("--job", default="", help="default: $TRAINWARDEN_JOB or job")
    own.add_argument("--node", default="", help="default: $TRAINWARDEN_NODE or the host name")
    own.add_argument("--run-dir", default="", help="sockets and logs; default: $TRAINWARDEN_RUN_DIR, else temporary")
    own.add_argument("--checkpoint-dir", default="", help="persisted checkpoints; default: none but memory")
    own.add_argument("--socket", default="", help="the collector's datagram socket; default: $TRAINWARDEN_SOCKET")
    own.add_argument("--warden", default="", help="the warden's socket (set by the warden)")
    own.add_argument(
        "--order-timeout", type=float, default=30.0, metavar="S", help="wait for an order before restarting alone"
    )
    own.add_argument(
        "--start-wait", type=float, default=60.0, metavar="S", help="wait for MAX nodes at the first start"
    )
    own.add_argument(
        "--join-timeout", type=float, default=60.0, metavar="S", help="wait for the members of an ordered world"
    )
    own.add_argument("--grace", type=float, default=1.0, metavar="S", help="between SIGTERM and SIGKILL of a worker")
    own.add_argument(
        "--exit-barrier", type=float, default=15.0, metavar="S", help="wait for other nodes at a clean end"
    )
    own.add_argument(
        "--pg-timeout", type=int, default=60, metavar="S", help="time-out used by trainwarden_hook.init_process_group"
    )
    own.add_argument(
        "--preload", default=PRELOAD, metavar="MODULE,...", help="imported once, before the workers are forked"
    )
    own.add_argument("--fresh-interpreter", action="store_true", help="start each worker as a new interpreter (slower)")


def _positive(value: float, flag: str) -> None:
    if value <= 0:
        raise UsageError(f"{flag} is {value:g}, expected a number above 0")


def parse_nodes(text: str) -> tuple[int, int]:
    """``MIN:MAX`` or one number.

    Raises
    ------
    UsageError
        Not numbers, or MIN is under 1 or above MAX.
    """
    low, _, high = text.partition(":")
    if not _is_number(low) or not _is_number(high or low) or not 1 <= int(low) <= int(high or low):
        raise UsageError(f"--nnodes is {text!r}, expected MIN:MAX such as 2:4 with 1 <= MIN <= MAX")
    return int(low), int(high or low)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def parse_conf(text: str) -> dict[str, str]:
    """``key=value,key=value`` over our defaults.

    Raises
    ------
    UsageError
        A part has no ``=``.
    """
    conf = dict(RENDEZVOUS_DEFAULTS)
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"--rdzv-conf has {part!r}, expected key=value parts separated by commas")
        conf[key.strip()] = value.strip()
    return conf


def _script(rest: Sequence[str]) -> list[str]:
    script = list(rest[1:] if rest[:1] == ["--"] else rest)
    if not script or script == ["-m"]:
        raise UsageError("no training script given; expected: trainwarden-run [flags] script.py [arguments]")
    return script


def parse(argv: Sequence[str], environment: dict[str, str]) -> Options:
    """Parse and check.

    Raises
    ------
    UsageError
        With one sentence that names the flag.
    """
    given = _parser().parse_args(list(argv))
    low, high = parse_nodes(given.nnodes)
    for flag in ("nproc_per_node", "monitor_interval", "order_timeout", "join_timeout", "pg_timeout"):
        _positive(getattr(given, flag), "--" + flag.replace("_", "-"))
    if not given.standalone and not given.rdzv_endpoint:
        raise UsageError(
            "no --rdzv-endpoint given; expected HOST:PORT of trainwarden-rendezvous, or --standalone for one node"
        )
    if given.standalone and high != 1:
        raise UsageError(f"--standalone is for one node but --nnodes is {given.nnodes}; give --rdzv-endpoint instead")
    endpoint = ("127.0.0.1", 0) if given.standalone else parse_endpoint(given.rdzv_endpoint, "--rdzv-endpoint")
    for name in ("job", "node", "run_dir", "checkpoint_dir", "socket", "warden"):
        setattr(given, name, getattr(given, name) or environment.get(f"TRAINWARDEN_{name.upper()}", ""))
    job = given.job or "job"
    return Options(
        job=job,
        node=given.node or socket.gethostname(),
        min_nodes=low,
        max_nodes=high,
        workers_per_node=given.nproc_per_node,
        endpoint=endpoint,
        standalone=given.standalone,
        rdzv_id=given.rdzv_id or job,
        rdzv_conf=parse_conf(given.rdzv_conf),
        local_addr=given.local_addr or address_towards(*endpoint),
        max_restarts=given.max_restarts,
        monitor_interval_s=given.monitor_interval,
        order_timeout_s=given.order_timeout,
        start_wait_s=given.start_wait,
        join_timeout_s=given.join_timeout,
        grace_s=given.grace,
        exit_barrier_s=given.exit_barrier,
        pg_timeout_s=given.pg_timeout,
        run_dir=given.run_dir,
        checkpoint_dir=given.checkpoint_dir,
        socket_path=given.socket,
        warden_path=given.warden,
        preload=tuple(filter(None, given.preload.split(","))),
        fresh_interpreter=given.fresh_interpreter,
        script=_script(given.script),
    )
