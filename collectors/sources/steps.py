"""The training hook's datagrams: steps, hellos, exits, saves. One unix datagram socket per node, read as they come.

The kernel queues only `net.unix.max_dgram_qlen` datagrams (10 by default) for a receiver, whatever its buffer: the socket must be read at
once, not once per tick.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from collectors.base import NAN, Context, Sample, Source, Worker
from collectors.linkevents import link_events
from trainwarden.errors import UsageError
from trainwarden.records import Gap, LogEvent, StepRow
from trainwarden.settings import option

logger = logging.getLogger(__name__)

WIRE_VERSION = 1
MAX_DATAGRAM_BYTES = 16384
CREDENTIALS = struct.Struct("3i")
MAX_PATH_BYTES = 100
Natural24 = Annotated[int, Meta(ge=0, lt=2**24)]
Natural31 = Annotated[int, Meta(ge=0, lt=2**31)]
Natural53 = Annotated[int, Meta(ge=0, lt=2**53)]
Natural63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Whole numbers that a record and the store can hold; JSON itself has no bounds."""
KINDS = ("hello", "step", "phase", "save", "restore", "exit", "bye", "link")


class Datagram(msgspec.Struct, kw_only=True):
    """What the hook sends; absent keys are unknown. Loss and norms may be the strings ``nan``, ``inf``, ``-inf``."""

    v: int
    t: str
    job: Annotated[str, Meta(min_length=1, max_length=200)]
    generation: Natural31
    rank: Natural24
    node: str = ""
    local_rank: Annotated[int, Meta(ge=-1, lt=2**24)] = -1
    world: Natural24 = 0
    pid: Natural31 = 0
    step: Annotated[int, Meta(ge=-1, lt=2**53)] = -1
    phase: str = ""
    start_ns: Natural63 = 0
    arrived_ns: Natural63 = 0
    at_ns: Natural63 = 0
    duration_ms: float = NAN
    data_ms: float = NAN
    forward_ms: float = NAN
    backward_ms: float = NAN
    wait_ms: float = NAN
    optimizer_ms: float = NAN
    checkpoint_ms: float = NAN
    cpu_ms: float = NAN
    loss: float | str = NAN
    grad_norm_local: float | str = NAN
    grad_norm: float | str = NAN
    param_checksum: float | str = NAN
    samples: Natural53 = 0
    dropped: Natural53 = 0
    exit_code: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    bytes: Natural63 = 0
    stall_ms: float = NAN
    persist_ms: float = NAN
    where: str = ""
    origin: str = msgspec.field(default="", name="from")
    ok: bool = True
    error: str = ""
    reason: str = ""
    event: str = ""
    rail: str = ""
    to: str = ""
    interface: str = ""
    peers: str = ""
    peer_count: Natural24 = 0
    cause: str = ""
    hold_s: float = NAN
    own: bool = False
    settled: bool = False


INFINITE = frozenset((float("inf"), float("-inf")))

_decoder = msgspec.json.Decoder(Datagram)


class WireError(Exception):
    """A datagram that is not ours; the message says why."""


def parse(payload: bytes) -> Datagram:
    """The datagram in `payload`; raises `WireError` with a sentence for the dead letters."""
    try:
        datagram = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a hook datagram: {error}") from None
    if datagram.v != WIRE_VERSION:
        raise WireError(f"hook datagram of version {datagram.v}, this collector reads {WIRE_VERSION}: upgrade it first")
    if datagram.t not in KINDS:
        raise WireError(f"hook datagram of kind {datagram.t[:40]!r}, expected one of {', '.join(KINDS)}")
    if datagram.t == "step" and datagram.step < 0:
        raise WireError("hook datagram of kind step without the number of the step")
    return datagram


def to_row(datagram: Datagram) -> StepRow:
    """The step in a ``step`` datagram."""
    said = (datagram.loss, datagram.grad_norm_local, datagram.grad_norm)
    loss, local, norm = map(number, said)
    finite = str not in map(type, said) and INFINITE.isdisjoint(said)
    return StepRow(
        step=datagram.step, phase=datagram.phase, started_at_ns=datagram.start_ns, duration_ms=datagram.duration_ms,
        data_ms=datagram.data_ms, forward_ms=datagram.forward_ms, backward_ms=datagram.backward_ms, wait_ms=datagram.wait_ms,
        optimizer_ms=datagram.optimizer_ms, checkpoint_ms=datagram.checkpoint_ms, arrived_at_ns=datagram.arrived_ns,
        cpu_ms=datagram.cpu_ms, loss=loss, grad_norm_local=local, grad_norm=norm, samples=datagram.samples,
        finite=finite, param_checksum=number(datagram.param_checksum),
    )  # fmt: skip


def number(value: float | str) -> float:
    """A number that may have come as ``nan``, ``inf`` or ``-inf``; any other text is NaN."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else NAN
    return value


class StepsSource(Source):
    """Receives datagrams in its own thread; the process family shows what they say about each rank.

    Steps join the report of their rank; exits, saves, restores and goodbyes become log events, exits at once.
    """

    name: ClassVar[str] = "steps"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.steps]``."""

        socket: Path = option(Path("hook.sock"), "path of the socket; set from collector.socket")
        buffer_bytes: int = option(4 * 1024 * 1024, "receive buffer")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._socket: socket.socket | None = None
        self._worker = Worker("tw-steps-socket", self._receive, self._failed)
        self._problem = "not_started"
        self._translated: dict[int, int] = {}

    def start(self) -> None:
        """Bind the socket; raises `UsageError` when another collector answers there."""
        self._socket = bind(self.settings.socket, self.settings.buffer_bytes)
        self._problem = ""
        self._worker.start()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        path = self.settings.socket
        if not self._problem and not path.exists():
            # somebody cleaned up: the hook would be silent for ever
            self._rebind()
        return Sample(gaps=(Gap(self.name, self._problem),) if self._problem else ())

    def close(self) -> None:
        if self._socket is not None:
            sock = self._socket
            self._worker.close(timeout_s=2.0, wake=lambda: sock.shutdown(socket.SHUT_RD))
            sock.close()
            self.settings.socket.unlink(missing_ok=True)

    def handle(self, payload: bytes, sender_pid: int = 0) -> None:
        """Take in one datagram."""
        try:
            datagram = parse(payload)
        except WireError as error:
            self.context.metrics.count("tw_bad_datagrams_total")
            self.context.outlet.dead("hook", str(error), payload)
            return
        if datagram.dropped > 0:
            self.context.metrics.count("tw_hook_dropped_total", datagram.dropped)
        if datagram.t == "exit":
            self._exit(datagram)
            return
        if datagram.t == "link":
            for event in link_events(datagram):
                self.context.outlet.log(event, urgent=True)
            return
        self._board(datagram, sender_pid)
        if datagram.t == "step":
            row = to_row(datagram)
            self.context.outlet.step(datagram.job, datagram.generation, datagram.rank, datagram.world, row)
        elif datagram.t not in ("hello", "phase"):
            self._event(datagram)

    def _board(self, datagram: Datagram, sender_pid: int) -> None:
        known: dict[str, int | str] = {}
        if datagram.pid > 0:
            known["pid"] = self._pid(datagram.pid, sender_pid)
        if datagram.world > 0:
            known["world"] = datagram.world
        if datagram.t == "hello":
            known["local_rank"] = datagram.local_rank
        if datagram.t == "step":
            now_ns = self.context.clock.monotonic_ns()
            # a step that held a save is over, and so is the save
            phase = "train" if datagram.phase == "checkpoint" else datagram.phase
            known |= {"last_step": datagram.step, "phase": phase, "seen_monotonic_ns": now_ns}
        if datagram.t == "phase":
            # an evaluation or a save begins or ends: no step will come for a while, and that is no hang
            known["phase"] = datagram.phase
        if self.context.ranks.seen(datagram.job, datagram.generation, datagram.rank, **known):
            self.context.outlet.topology_changed()

    def _exit(self, datagram: Datagram) -> None:
        code = datagram.exit_code
        attributes = {
            "rank": str(datagram.rank), "pid": str(datagram.pid), "exit_code": str(code),
            "generation": str(datagram.generation), "at_ns": str(datagram.at_ns),
        }  # fmt: skip
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        event = LogEvent(
            source="hook", severity="info" if code == 0 else "critical", code=f"worker_exit:{code}", attributes=attributes,
            line=f"worker of rank {datagram.rank} (pid {datagram.pid}) {how}", job=datagram.job, attempt=datagram.generation,
            rank=datagram.rank,
        )  # fmt: skip
        self.context.outlet.log(event, urgent=True)
        now_ns = max(1, self.context.clock.monotonic_ns())
        self.context.ranks.ended(datagram.job, datagram.generation, datagram.rank, now_ns, clean=code == 0)

    def _event(self, datagram: Datagram) -> None:
        if datagram.t == "bye":
            self.context.ranks.leaving(datagram.job, datagram.generation, datagram.rank)
        code, severity = event_code(datagram)
        attributes = {
            "rank": str(datagram.rank), "step": str(datagram.step), "where": datagram.where or datagram.origin,
            "bytes": str(datagram.bytes), "stall_ms": f"{datagram.stall_ms:g}", "persist_ms": f"{datagram.persist_ms:g}",
            "error": datagram.error[:500], "reason": datagram.reason[:100],
        }  # fmt: skip
        event = LogEvent(
            source="hook", severity=severity, code=code, line=f"rank {datagram.rank}: {code} {datagram.error[:200]}".rstrip(),
            attributes={k: v for k, v in attributes.items() if v not in ("", "nan")}, job=datagram.job,
            attempt=datagram.generation, rank=datagram.rank,
        )  # fmt: skip
        self.context.outlet.log(event, urgent=severity != "info")

    def _pid(self, said: int, sender: int) -> int:
        """The rank's pid as this namespace sees it: the sender's, where its own namespace calls it `said`."""
        if said == sender or sender <= 0:
            return said
        if sender not in self._translated:
            status = self.context.files.text(f"/proc/{sender}/status")
            inner = next((line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:")), "")
            self._translated = {
                **dict(list(self._translated.items())[-255:]),
                sender: int(inner) if inner.isdigit() else sender,
            }
            self.context.files.forget(f"/proc/{sender}")
        return sender if self._translated[sender] == said else said

    def _receive(self) -> None:
        if self._socket is None:
            return
        try:
            payload, control, _, _ = self._socket.recvmsg(MAX_DATAGRAM_BYTES, 64)
        except BlockingIOError:
            return
        if not payload and self._worker.stopping:
            return
        self.handle(payload, sender_pid(control))

    def _failed(self, error: Exception) -> None:
        logger.warning("hook socket: %s: %s", type(error).__name__, error)
        self.context.metrics.count("tw_bad_datagrams_total")

    def _rebind(self) -> None:
        try:
            fresh = bind(self.settings.socket, self.settings.buffer_bytes)
        except (OSError, UsageError) as error:
            logger.warning("hook socket %s is gone and cannot be made again: %s", self.settings.socket, error)
            return
        old, self._socket = self._socket, fresh
        if old is not None:
            old.close()


NOT_FINITE = "is not finite"
"""How the hook's reason ends when it refuses to save a state whose loss or gradients are not finite."""


def event_code(datagram: Datagram) -> tuple[str, str]:
    """Log code and severity of a save, restore or bye."""
    if datagram.t == "bye":
        return "hook_bye", "info"
    if datagram.t == "restore":
        return ("restored", "info") if datagram.ok else ("restore_failed", "error")
    if datagram.ok:
        return "save_ok", "info"
    # a state that is not finite must not be saved: the refusal is right, what is wrong is told by the steps
    return ("save_refused", "warning") if datagram.error.endswith(NOT_FINITE) else ("save_failed", "error")


def bind(path: Path, buffer_bytes: int) -> socket.socket:
    """A bound, readable socket at `path`; a dead one left there is replaced.

    Raises
    ------
    UsageError
        When a running collector owns the path, or it cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        address = short_address(path)
        _remove_dead(path, address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(address)
        os.chmod(path, 0o666)  # training processes may run as another user
    except OSError as error:
        sock.close()
        raise UsageError(f"hook socket {path} cannot be made ({error.strerror}): set collector.socket") from None
    except UsageError:
        sock.close()
        raise
    # the kernel's own time-out: Python's would cost a poll() before each read
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
    return sock


def short_address(path: Path) -> str:
    """A path that fits the 108 bytes of a unix address (through /proc when it is too long)."""
    if len(os.fsencode(path)) < MAX_PATH_BYTES:
        return str(path)
    # the descriptor stays open: the kernel resolves it at bind only, but a rebind needs it again
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{path.name}"


def _remove_dead(path: Path, address: str) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"{path} exists and is no socket: set collector.socket to a path that is free")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise UsageError(f"hook socket {path} belongs to a running collector: give each node its own socket")


def sender_pid(control: list[tuple[int, int, bytes]]) -> int:
    """Pid of the sender in this process's namespace, as the kernel vouches for it; 0 when unknown."""
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= CREDENTIALS.size:
            return int(CREDENTIALS.unpack_from(data)[0])
    return 0
