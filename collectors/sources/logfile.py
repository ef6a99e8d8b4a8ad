"""Tailed log files and the kernel log: known lines become log events, fatal ones at once. Other lines stay on the node."""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from collectors import patterns
from collectors.base import Context, Sample, Source, Worker
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from collectors.logs.positions import Positions
from collectors.logs.secrets import redact
from collectors.logs.watch import Watch
from collectors.tail import Position, Tail
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Gap
from trainwarden.settings import option

logger = logging.getLogger(__name__)

__all__ = ["KernelRing", "LogfileSource", "redact"]

LOOK_AT_LEAST_EVERY_S = 1.0
SAVE_EVERY_NS = 5 * NS_PER_S
CHUNK_BYTES = 256 * 1024


class Reader(Protocol):
    """A place that lines come from."""

    def block(self, max_bytes: int) -> bytes:
        """New lines, each with its newline; raises `OSError`."""
        ...

    def position(self) -> Position | None:
        """Where to go on after a restart."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class KernelRing:
    """/dev/kmsg: one record per read. Resumes by sequence number within the same boot of the kernel.

    Attributes
    ----------
    lost
        Records that were overwritten before they were read; whoever tells of them puts it back to 0.
    """

    def __init__(self, path: Path, position: Position | None, boot: int, from_start: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._boot = boot
        self._last = position.offset if position is not None and position.device == boot else -1
        if self._last < 0 and not from_start:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        self._was_overwritten = False
        self.lost = 0

    def poll(self, max_bytes: int) -> list[str]:
        """As `block`, decoded."""
        return self.block(max_bytes).decode("utf-8", "replace").splitlines()

    def fileno(self) -> int:
        """Descriptor to wait for new records at."""
        return self._descriptor

    def block(self, max_bytes: int) -> bytes:
        lines: list[bytes] = []
        size_bytes = 0
        while size_bytes < max_bytes:
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self._was_overwritten = True
                continue
            if not record:
                break
            size_bytes += len(record)
            sequence = record.split(b",", 2)[1:2]
            number = int(sequence[0]) if sequence and sequence[0].isdigit() else self._last + 1
            if number > self._last:
                if self._was_overwritten:
                    self.lost += max(1, number - self._last - 1) if self._last >= 0 else 1
                self._was_overwritten = False
                self._last = number
                lines.append(record.split(b"\n", 1)[0])
        return b"\n".join([*lines, b""]) if lines else b""

    def position(self) -> Position | None:
        return Position(self._boot, 0, self._last) if self._last >= 0 else None

    def close(self) -> None:
        os.close(self._descriptor)


class LogfileSource(Source):
    """Watches files in its own thread, which sleeps until one of them is written to, and looks once a second in any case.

    Positions are stored once the events are in the spool: at once after an event, else every few seconds.
    """

    name: ClassVar[str] = "logfile"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.logfile]``; `files` comes from ``collector.log_files``."""

        files: dict[str, str] = option({}, "name = path")
        poll_ms: int = option(
            250, "no two looks closer together; a file that another node writes to is looked at once a second"
        )
        bytes_per_poll: int = option(4 * 1024 * 1024, "read from one file at most per look: files take turns")
        budget_ms: int = option(25, "time for one look: a flood of lines waits in its file")
        from_start: bool = option(
            False, "read what is already there at the first start, files and the kernel's log, from its beginning"
        )
        fold_s: float = option(5.0, "identical lines within this time are one event with a count")
        burst: float = option(20.0, "events of one code and file at once")
        per_s: float = option(2.0, "events of one code and file per second after a burst")
        patterns: Path | None = option(None, "another table of patterns")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._table = patterns.load(settings.patterns) if settings.patterns else patterns.load()
        self._positions = Positions(context.state_directory / "log_positions.json")
        self._readers: dict[str, Reader] = {}
        self._channels = {name: Channel(name) for name in settings.files}
        folder = Folder(settings.fold_s, settings.burst, settings.per_s, refused(context))
        self._desk = Desk(context, self._table, folder, self.name)
        self._problems: dict[str, str] = {}
        self._overwritten: set[str] = set()
        self._watch: Watch | None = None
        self._more = False
        self._worker = Worker("tw-logfile", self._turn, self._failed)

    def start(self) -> None:
        """Begin to watch."""
        if self.settings.files:
            self._watch = Watch(self.settings.files.values())
            self._worker.start()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        overwritten, self._overwritten = self._overwritten, set()
        gaps = [Gap(self.name, f"{reason}:{name}") for name, reason in sorted(self._problems.items())]
        return Sample(gaps=(*gaps, *(Gap(self.name, f"overwritten:{name}") for name in sorted(overwritten))))

    def close(self) -> None:
        watch = self._watch
        self._worker.close(wake=watch.wake if watch else None)
        if watch and not self._worker.running:  # one that hangs in a dead file system still holds it
            watch.close()
        self._desk.settle(list(self._channels.values()), last=True)
        self._save()
        for reader in self._readers.values():
            reader.close()

    def poll(self) -> None:
        """Look at every file once; files with much to say take turns until the time is up."""
        clock = self.context.clock
        until_ns = clock.monotonic_ns() + self.settings.budget_ms * NS_PER_MS
        waiting, taken = dict(self.settings.files), 0
        while waiting and taken < self.settings.bytes_per_poll:
            waiting = {name: path for name, path in waiting.items() if self._look(name, path)}
            taken += CHUNK_BYTES
            if clock.monotonic_ns() >= until_ns:
                break
        self._more = bool(waiting) or any(
            isinstance(reader, Tail) and reader.unsettled for reader in self._readers.values()
        )
        self._desk.settle(list(self._channels.values()))
        now_ns = clock.monotonic_ns()
        if self._desk.spoke or now_ns - self._positions.saved_ns >= SAVE_EVERY_NS:
            self._desk.spoke, self._positions.saved_ns = False, now_ns
            self._save()

    def _look(self, name: str, path: str) -> bool:
        """Take in one piece of a file; true when more of it waits."""
        try:
            block = self._reader(name, path).block(CHUNK_BYTES)
        except OSError as error:
            self._trouble(name, path, error)
            return False
        self._problems.pop(name, None)
        self._note_lost(name)
        self._desk.block(self._channels[name], block)
        return len(block) > CHUNK_BYTES // 2

    def _note_lost(self, name: str) -> None:
        reader = self._readers.get(name)
        if isinstance(reader, KernelRing) and reader.lost:
            self.context.metrics.count("tw_log_lines_dropped_total", reader.lost, file=name)
            self._overwritten = {*self._overwritten, name}
            reader.lost = 0

    def _reader(self, name: str, location: str) -> Reader:
        reader = self._readers.get(name)
        if reader is None:
            saved, path = self._positions.of(name), Path(location)
            if path.exists() and stat.S_ISCHR(path.stat().st_mode):
                reader = ring = KernelRing(path, saved, _kernel_boot(), self.settings.from_start)
                if self._watch is not None:
                    self._watch.follow(ring.fileno())
            else:
                reader = Tail(path, saved, self.settings.from_start)
            self._readers[name] = reader
        return reader

    def _trouble(self, name: str, path: str, error: OSError) -> None:
        reason = {errno.EACCES: "permission", errno.EPERM: "permission"}.get(error.errno or 0, "unreadable")
        if self._problems.get(name) != reason:
            logger.warning("log file %s (%s) cannot be read: %s", name, path, error.strerror)
        self._problems[name] = reason

    def _turn(self) -> None:
        self.poll()
        if self._watch is not None:
            least_s = self.settings.poll_ms / 1000
            self._watch.wait(least_s, least_s if self._more else max(least_s, LOOK_AT_LEAST_EVERY_S))

    def _failed(self, error: Exception) -> None:
        logger.exception("watching log files: %s", error)
        self._problems["*"] = "error"

    def _save(self) -> None:
        problem = self._positions.save({name: reader.position() for name, reader in self._readers.items()})
        if problem:
            self._problems["*"] = problem
        else:
            self._problems.pop("*", None)


def _kernel_boot() -> int:
    """A number that changes with each boot of the kernel."""
    try:
        return int(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")[:12], 16
        )
    except (OSError, ValueError):
        return 0
