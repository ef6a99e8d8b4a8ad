"""Mounted file systems: full, read-only, slow or stuck; one that does not answer costs its own row only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from collectors.asking import Question
from collectors.base import Context, Family, Row, Sample, Source, family
from collectors.machine.kernel import present, ratio
from collectors.machine.mounts import Mount, NfsCounts, lustre_client, parse_lustre, parse_mounts, parse_mountstats
from collectors.network.counters import Deltas
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Block, Gap, LogEvent
from trainwarden.settings import option

# the host's own view where the agent may see it, else that of its container
MOUNTS = ("/proc/1/mountinfo", "/proc/self/mountinfo")
STATISTICS = ("/proc/1/mountstats", "/proc/self/mountstats")
LUSTRE = ("/proc/fs/lustre/llite", "/sys/kernel/debug/lustre/llite")

MOUNT = family(
    "mount", "mounts",
    ("stalled", "bool", "state", "1 while the file system does not answer within the deadline"),
    ("waiting_s", "s", "gauge", "how long it has not answered; 0 when it does"),
    ("answer_ms", "ms", "gauge", "time of its newest answer"),
    ("used_ratio", "ratio", "gauge", "space in use, of what users may have"),
    ("free_bytes", "bytes", "gauge", "space that users may have"),
    ("inodes_used_ratio", "ratio", "gauge", "file numbers in use"),
    ("read_only", "bool", "state", "1 when mounted read-only, as a disk with errors is"),
    ("remote", "bool", "state", "1 when a server has to answer"),
    ("nfs_operations_per_s", "1/s", "counter", "NFS operations"),
    ("nfs_retransmits_per_s", "1/s", "counter", "NFS requests sent again"),
    ("nfs_timeouts_per_s", "1/s", "counter", "NFS requests not answered in time"),
    ("nfs_bad_xids_per_s", "1/s", "counter", "NFS answers that fit no request"),
    ("nfs_round_trip_ms", "ms", "gauge", "mean time from sending to answer"),
    ("nfs_queue_ms", "ms", "gauge", "mean time waiting to be sent"),
    ("nfs_total_ms", "ms", "gauge", "mean time of an operation, queues included"),
    ("read_bytes_per_s", "bytes/s", "counter", "received from the server (NFS, Lustre)"),
    ("write_bytes_per_s", "bytes/s", "counter", "sent to the server (NFS, Lustre)"),
)  # fmt: skip


class Space(NamedTuple):
    """What a file system says of itself, in units of its blocks."""

    block_bytes: int
    blocks: int
    free: int
    available: int
    files: int
    files_free: int


AskSpace = Callable[[str], Space]


def ask_space(path: str) -> Space:
    """`statvfs`; waits for ever on a dead server. Raises `OSError`."""
    found = os.statvfs(path)
    return Space(found.f_frsize, found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)


@dataclass
class _Watched:
    mount: Mount
    question: Question[Space]
    told: bool = False


class MountsSource(Source):
    """Each file system is asked for its space in a thread of its own, one question at a time. One that does not answer within
    `deadline_s` is stalled, which is an event once, and another when it answers again. NFS is judged by the kernel's record of its
    requests as well, which can be read while the server is dead.
    """

    name: ClassVar[str] = "mounts"
    families: ClassVar[tuple[Family, ...]] = (MOUNT,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.mounts]``."""

        every_s: float = option(10.0, "cadence of NFS and Lustre numbers, and of questions to remote file systems")
        local_every_s: float = option(60.0, "cadence of questions to file systems on disks")
        deadline_s: float = option(5.0, "a file system that has not answered by then is stalled")
        at_most: int = option(24, "how many file systems are watched, remote ones first")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self.ask: AskSpace = ask_space
        self._watched: dict[str, _Watched] = {}
        self._traffic = Traffic(context)
        self._read_ns: int | None = None
        self._packed: tuple[dict[str, Row], tuple[Block, ...]] = ({}, ())

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        at_ns = self.context.clock.monotonic_ns()
        if self._read_ns is None or at_ns - self._read_ns >= self.settings.every_s * NS_PER_S:
            self._read_ns = at_ns
            self._watch(parse_mounts(_first(self.context, MOUNTS), self.settings.at_most))
            self._traffic.read([watched.mount for watched in self._watched.values()])
        rows = {point: self._row(watched) for point, watched in self._watched.items()}
        if rows != self._packed[0]:
            self._packed = (rows, MOUNT.block(rows))
        stalled = any(row["stalled"] for row in rows.values())
        return Sample(self._packed[1], (Gap(self.name, "stalled"),) if stalled else ())

    def explain(self) -> str:
        watched = [f"{point} ({known.mount.kind})" for point, known in self._watched.items()]
        return f"file systems: {', '.join(watched)}" if watched else f"no list of mounts in {' or '.join(MOUNTS)}"

    def settle(self, timeout_s: float) -> bool:
        """Wait until all file systems have answered."""
        return all([watched.question.settle(timeout_s) for watched in self._watched.values()])

    def _watch(self, mounts: list[Mount]) -> None:
        kept = {}
        for mount in mounts:
            known = self._watched.get(mount.point)
            # a question that is still open belongs to its thread, whatever is mounted there now
            if known is None or (known.mount.kind != mount.kind and not known.question.open):
                known = _Watched(mount, self._question(mount))
            known.mount = mount
            kept[mount.point] = known
        self._watched = kept

    def _question(self, mount: Mount) -> Question[Space]:
        path = self.context.files.path(mount.point)
        every_s = self.settings.every_s if mount.remote else self.settings.local_every_s
        return Question("statvfs", self.context.clock, every_s, lambda: self.ask(path))

    def _row(self, watched: _Watched) -> Row:
        answer = watched.question.newest()
        waiting_s = watched.question.waiting_s
        stalled = waiting_s > self.settings.deadline_s
        self._tell(watched, stalled, waiting_s)
        row = {"stalled": float(stalled), "waiting_s": waiting_s if stalled else 0.0, "read_only": float(watched.mount.read_only),
               "remote": float(watched.mount.remote), **self._traffic.rows.get(watched.mount.point, {})}  # fmt: skip
        if answer is None or stalled:
            return row
        space = answer.value
        used = space.blocks - space.free
        return {**row, **present({
            "answer_ms": answer.took_ns / NS_PER_MS, "free_bytes": float(space.available * space.block_bytes),
            "used_ratio": ratio(used, used + space.available), "inodes_used_ratio": ratio(space.files - space.files_free, space.files),
        })}  # fmt: skip

    def _tell(self, watched: _Watched, stalled: bool, waiting_s: float) -> None:
        if stalled == watched.told:
            return
        watched.told = stalled
        mount = watched.mount
        said = f"has not answered for {waiting_s:.0f} s" if stalled else "answers again"
        event = LogEvent(
            source=self.name, severity="warning" if stalled else "info", code="mount_stalled" if stalled else "mount_answers",
            line=f"{mount.point} ({mount.kind} of {mount.source}) {said}",
            attributes={"mount": mount.point, "kind": mount.kind, "server": mount.source},
        )  # fmt: skip
        self.context.outlet.log(event, urgent=stalled)


class Traffic:
    """What the kernel counts per mount: NFS requests and their times, Lustre's octets."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._deltas = Deltas()
        self.rows: dict[str, Row] = {}

    def read(self, mounts: list[Mount]) -> None:
        """Read anew where there is something to read."""
        kinds = {mount.kind for mount in mounts}
        rows: dict[str, Row] = {}
        now_ns = self._context.clock.monotonic_ns()
        if kinds & {"nfs", "nfs4"}:
            for point, counts in parse_mountstats(_first(self._context, STATISTICS)).items():
                rows[point] = self._nfs(point, counts, now_ns)
        for mount in mounts if "lustre" in kinds else ():
            if mount.kind == "lustre":
                rows[mount.point] = self._lustre(mount, now_ns)
        self.rows = rows
        self._deltas.keep(lambda key: isinstance(key, tuple) and key[0] in rows)

    def _nfs(self, point: str, counts: NfsCounts, now_ns: int) -> Row:
        rate = {name: self._deltas.per_second((point, name), value, now_ns) for name, value in counts._asdict().items()}
        operations = rate["operations"]
        row = {
            "nfs_operations_per_s": operations, "nfs_timeouts_per_s": rate["timeouts"], "nfs_bad_xids_per_s": rate["bad_xids"],
            "nfs_retransmits_per_s": rate["transmissions"] - operations,
            "read_bytes_per_s": rate["received_bytes"], "write_bytes_per_s": rate["sent_bytes"],
        }  # fmt: skip
        if operations > 0:
            row |= {f"nfs_{name}_ms": rate[f"{name}_ms"] / operations for name in ("round_trip", "queue", "total")}
        return row

    def _lustre(self, mount: Mount, now_ns: int) -> Row:
        files = self._context.files
        for root in LUSTRE:
            client = lustre_client(files.names(root), mount.source)
            if client:
                counts = parse_lustre(files.text(f"{root}/{client}/stats"))
                return {
                    f"{name}_per_s": self._deltas.per_second((mount.point, name), int(value), now_ns)
                    for name, value in counts.items()
                }
        return {}


def _first(context: Context, names: tuple[str, ...]) -> str:
    """The first of several files that can be read."""
    return next((text for text in map(context.files.text, names) if text), "")
