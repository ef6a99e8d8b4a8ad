"""Command line of ``trainwarden-run``: the flags of torchrun that matter, and a few of ours."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwarden_hook import torchrun_flags
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
NO_PYTHON = "--no-python"


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
    role: str = "trainer"
    node_rank: int = -1
    hosts_store: bool = False
    log_dir: str = ""
    redirects: dict[int, int] = field(default_factory=dict)
    console_ranks: frozenset[int] = frozenset()
    signals: tuple[int, ...] = torchrun_flags.signals_of("")
    virtual_local_rank: bool = False
    no_restart_codes: frozenset[int] = frozenset()
    no_progress_limit: int = 3
    spare: bool = False
    in_process: bool = False
    notes: tuple[str, ...] = ()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwarden-run", description="Elastic launcher: heals by orders of a warden, or alone as torchrun does."
    )
    torchrun_flags.add_flags(parser)
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
    own.add_argument(
        "--no-restart-exit-codes", default="", metavar="CODE,...",
        help="a worker that ends with one of these ends the job: a restart would not help",
    )  # fmt: skip
    own.add_argument(
        "--no-progress-limit",
        type=int,
        default=3,
        metavar="N",
        help="end the job after N failures in a row without a new step",
    )
    own.add_argument(
        "--in-process",
        action="store_true",
        help="survivors of a dead rank keep their processes (scripts that loop by job.steps)",
    )
    own.add_argument("--spare", action="store_true", help="a node more than the job needs: waits until one is missing")
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


def _script(rest: Sequence[str], given: argparse.Namespace) -> list[str]:
    script = list(rest[1:] if rest[:1] == ["--"] else rest)
    if not script or script == ["-m"]:
        raise UsageError("no training script given; expected: trainwarden-run [flags] script.py [arguments]")
    if given.module and given.no_python:
        raise UsageError("--module and --no-python exclude each other: a program of its own is no module")
    kind = ["-m"] if given.module else [NO_PYTHON] if given.no_python else []
    return [*kind, *script]


def parse(argv: Sequence[str], environment: dict[str, str]) -> Options:
    """Parse and check.

    Raises
    ------
    UsageError
        With one sentence that names the flag.
    """
    given = _parser().parse_args(list(argv))
    torchrun_flags.fill_from_environment(given, environment)
    low, high = parse_nodes(given.nnodes or "1:1")
    conf = parse_conf(given.rdzv_conf)
    meeting = torchrun_flags.meeting_of(given, conf, (low, high))
    # as torchrun: one node needs no meeting place
    given.standalone = given.standalone or (high == 1 and not meeting.endpoint)
    workers = torchrun_flags.workers_of(given.nproc_per_node)
    interval_s = torchrun_flags.number(given.monitor_interval, "--monitor-interval", 0.1)
    _check(given, {"--nproc-per-node": workers, "--monitor-interval": interval_s}, meeting.endpoint, high)
    for name in ("job", "node", "run_dir", "checkpoint_dir", "socket", "warden"):
        setattr(given, name, getattr(given, name) or environment.get(f"TRAINWARDEN_{name.upper()}", ""))
    return _options(given, conf, meeting, (low, high), workers, interval_s)


def _options(
    given: argparse.Namespace,
    conf: dict[str, str],
    meeting: torchrun_flags.Meeting,
    nodes: tuple[int, int],
    workers: int,
    interval_s: float,
) -> Options:
    low, high = nodes
    grace_s = torchrun_flags.number(given.shutdown_timeout, "--shutdown-timeout", given.grace)
    endpoint = ("127.0.0.1", 0) if given.standalone else parse_endpoint(meeting.endpoint, "--rdzv-endpoint")
    job = given.job or "job"
    # under a static rendezvous the nodes know each other by number
    number = meeting.node_rank if not given.node and high > 1 else -1
    return Options(
        job=job,
        node=given.node or (f"node{number}" if number >= 0 else socket.gethostname()),
        min_nodes=low,
        max_nodes=high,
        workers_per_node=workers,
        endpoint=endpoint,
        standalone=given.standalone,
        rdzv_id=given.rdzv_id or job,
        # whoever serves the store, it is not torch's part of the rendezvous
        rdzv_conf={**conf, "is_host": "false"},
        local_addr=given.local_addr or address_towards(*endpoint),
        max_restarts=int(torchrun_flags.number(given.max_restarts, "--max-restarts", 3, whole=True)),
        monitor_interval_s=interval_s,
        order_timeout_s=given.order_timeout,
        start_wait_s=given.start_wait,
        join_timeout_s=given.join_timeout,
        grace_s=grace_s,
        exit_barrier_s=given.exit_barrier,
        pg_timeout_s=given.pg_timeout,
        run_dir=given.run_dir,
        checkpoint_dir=given.checkpoint_dir,
        socket_path=given.socket,
        warden_path=given.warden,
        preload=tuple(filter(None, given.preload.split(","))),
        fresh_interpreter=given.fresh_interpreter,
        script=_script(given.script, given),
        role=given.role or "trainer",
        node_rank=number,
        hosts_store=meeting.hosts and not given.standalone,
        log_dir=given.log_dir,
        redirects=torchrun_flags.redirects_of(given.redirects) or torchrun_flags.redirects_of(given.tee, "--tee"),
        console_ranks=torchrun_flags.ranks_of(given.local_ranks_filter, "--local-ranks-filter"),
        signals=torchrun_flags.signals_of(given.signals_to_handle),
        virtual_local_rank=given.virtual_local_rank,
        no_restart_codes=torchrun_flags.ranks_of(given.no_restart_exit_codes, "--no-restart-exit-codes"),
        no_progress_limit=given.no_progress_limit,
        spare=given.spare,
        in_process=given.in_process,
        notes=tuple(torchrun_flags.without_effect(given)),
    )


def _check(given: argparse.Namespace, numbers: dict[str, float], endpoint: str, most: int) -> None:
    own = {
        "--" + name.replace("_", "-"): getattr(given, name) for name in ("order_timeout", "join_timeout", "pg_timeout")
    }
    for flag, value in {**numbers, **own}.items():
        _positive(value, flag)
    if not given.standalone and not endpoint:
        raise UsageError(
            "no --rdzv-endpoint given; expected HOST:PORT of trainwarden-rendezvous, or --standalone for one node"
        )
    if given.standalone and most != 1:
        raise UsageError(f"--standalone is for one node but --nnodes is {given.nnodes}; give --rdzv-endpoint instead")
