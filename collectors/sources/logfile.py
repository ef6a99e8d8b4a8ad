"""Tailed log files and the kernel log: known lines become log events, fatal ones at once. Other lines stay on the node."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from collectors import patterns
from collectors.base import Context, Sample, Source, Worker
from collectors.tail import Position, Tail
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

LINE_CHARS = 500
MAX_RANK_DIGITS = 8
SAVE_EVERY_NS = 5 * NS_PER_S
URGENT = "critical"
SECRET = re.compile(
    r"(?i)\b(token|password|passwd|secret|authorization|api[_-]?key)(\s*[=:]\s*)\S+|(://)[^/\s:@]+:[^/\s@]+@"
)


class Reader(Protocol):
    """A place that lines come from."""

    def poll(self, max_bytes: int) -> list[str]:
        """New lines; raises `OSError`."""
        ...

    def position(self) -> Position | None:
        """Where to go on after a restart."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class KernelRing:
    """/dev/kmsg: one record per read. Resumes by sequence number within the same boot of the kernel."""

    def __init__(self, path: Path, position: Position | None, boot: int) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._boot = boot
        self._last = position.offset if position is not None and position.device == boot else -1
        if self._last < 0:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        self.overwritten = 0

    def poll(self, max_bytes: int) -> list[str]:
        lines: list[str] = []
        size_bytes = 0
        while size_bytes < max_bytes:
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self.overwritten += 1
                continue
            size_bytes += len(record)
            sequence = record.split(b",", 2)[1:2]
            number = int(sequence[0]) if sequence and sequence[0].isdigit() else self._last + 1
            if number > self._last:
                self._last = number
                lines.append(record.split(b"\n", 1)[0].decode("utf-8", "replace"))
        return lines

    def position(self) -> Position | None:
        return Position(self._boot, 0, self._last) if self._last >= 0 else None

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass
class _Fold:
    """Repeats of a line that was already published."""

    event: LogEvent
    until_ns: int
    repeats: int = 0


class Folder:
    """Folds identical lines and limits the rate per code; what is held back is counted and said with the next event.

    Parameters
    ----------
    fold_s
        Repeats within this time after the first one are published as one event with their number.
    burst, per_s
        Token bucket per file and code.
    refused
        Called with the file's name for each line over the rate.
    """

    def __init__(self, fold_s: float, burst: float, per_s: float, refused: Callable[[str], None]) -> None:
        self._fold_ns = int(fold_s * NS_PER_S)
        self._burst = burst
        self._per_s = per_s
        self._refused = refused
        self._folds: dict[str, _Fold] = {}
        self._buckets: dict[str, tuple[float, int]] = {}
        self.dropped: dict[str, int] = {}

    def admit(self, key: str, event: LogEvent, now_ns: int) -> LogEvent | None:
        """The event to publish now; None when it is folded or over the rate."""
        fold = self._folds.get(key)
        if fold is not None and now_ns < fold.until_ns:
            fold.repeats += 1
            return None
        bucket = f"{event.source}\x1f{event.code}"
        if not self._take(bucket, now_ns):
            self.dropped[bucket] = self.dropped.get(bucket, 0) + 1
            self._refused(event.source)
            return None
        self._folds[key] = _Fold(event, now_ns + self._fold_ns)
        missed = self.dropped.pop(bucket, 0)
        if not missed:
            return event
        return msgspec.structs.replace(event, attributes={**event.attributes, "dropped_before": str(missed)})

    def settle(self, now_ns: int) -> list[LogEvent]:
        """Events for the repeats of folds that are over."""
        over = [key for key, fold in self._folds.items() if now_ns >= fold.until_ns]
        settled = []
        for key in over:
            fold = self._folds.pop(key)
            if fold.repeats:
                settled.append(msgspec.structs.replace(fold.event, repeat=fold.repeats))
        self._buckets = {k: v for k, v in self._buckets.items() if now_ns - v[1] < 60 * NS_PER_S or k in self.dropped}
        return settled

    def _take(self, bucket: str, now_ns: int) -> bool:
        tokens, at_ns = self._buckets.get(bucket, (self._burst, now_ns))
        tokens = min(self._burst, tokens + (now_ns - at_ns) / NS_PER_S * self._per_s)
        self._buckets[bucket] = (tokens - 1 if tokens >= 1 else tokens, now_ns)
        return tokens >= 1


class LogfileSource(Source):
    """Watches files in its own thread, every `poll_ms`. Positions are stored once the events are in the spool: at once after an event,
    else every few seconds.
    """

    name: ClassVar[str] = "logfile"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.logfile]``; `files` comes from ``collector.log_files``."""

        files: dict[str, str] = option({}, "name = path")
        poll_ms: int = option(250, "cadence of looking")
        bytes_per_poll: int = option(256 * 1024, "read from one file at most per look: files take turns")
        from_start: bool = option(False, "read files that are already there at the first start from their beginning")
        fold_s: float = option(5.0, "identical lines within this time are one event with a count")
        burst: float = option(20.0, "events of one code and file at once")
        per_s: float = option(2.0, "events of one code and file per second after a burst")
        patterns: Path | None = option(None, "another table of patterns")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._table = patterns.load(settings.patterns) if settings.patterns else patterns.load()
        self._store = context.state_directory / "log_positions.json"
        self._saved = self._load()
        self._saved_ns = 0
        self._spoke = False
        self._readers: dict[str, Reader] = {}
        self._pairs = {name: patterns.PairMemory(self._table) for name in settings.files}
        self._folder = Folder(settings.fold_s, settings.burst, settings.per_s, self._refused)
        self._problems: dict[str, str] = {}
        self._worker = Worker("tw-logfile", self._turn, self._failed)

    def start(self) -> None:
        """Begin to watch."""
        if self.settings.files:
            self._worker.start()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        return Sample(gaps=tuple(Gap(self.name, f"{reason}:{name}") for name, reason in sorted(self._problems.items())))

    def close(self) -> None:
        self._worker.close()
        self._save()
        for reader in self._readers.values():
            reader.close()

    def poll(self) -> None:
        """Look at every file once."""
        for name, path in self.settings.files.items():
            try:
                lines = self._reader(name, path).poll(self.settings.bytes_per_poll)
            except OSError as error:
                self._trouble(name, path, error)
                continue
            self._problems.pop(name, None)
            for line in lines:
                self._take(name, line)
        for event in self._folder.settle(self.context.clock.monotonic_ns()):
            self.context.outlet.log(event, urgent=False)
        now_ns = self.context.clock.monotonic_ns()
        if self._spoke or now_ns - self._saved_ns >= SAVE_EVERY_NS:
            self._spoke, self._saved_ns = False, now_ns
            self._save()

    def _take(self, file: str, line: str) -> None:
        """One line that nobody thought of must not take the rest of the look along: the file is not read again."""
        try:
            self.line(file, line)
        except Exception as error:
            logger.exception("a line of log file %s could not be taken in", file)
            reason = f"a pattern failed on it: {type(error).__name__}: {error}"
            self.context.outlet.dead(f"logfile:{file}", reason, redact(line.strip())[:LINE_CHARS].encode())

    def line(self, file: str, line: str) -> None:
        """Take in one line."""
        hit = self._pairs[file].feed(line) if self._table.pairs else None
        hit = hit or self._table.match(line)
        if hit is None:
            return
        event = self._event(file, line, hit)
        admitted = self._folder.admit(f"{file}\x1f{hit.fold_key}", event, self.context.clock.monotonic_ns())
        self._spoke = True
        if admitted is not None:
            self.context.outlet.log(admitted, urgent=hit.severity == URGENT)

    def _refused(self, file: str) -> None:
        self.context.metrics.count("tw_log_lines_dropped_total", file=file)

    def _event(self, file: str, line: str, hit: patterns.Hit) -> LogEvent:
        layouts = self.context.ranks.layouts()
        job = next(iter(layouts)) if len(layouts) == 1 else ""
        rank = hit.attributes.get("rank", "")
        return LogEvent(
            source=file, severity=hit.severity, code=hit.code, line=redact(line.strip())[:LINE_CHARS], template_id=hit.name,
            attributes={name: redact(value) for name, value in hit.attributes.items()}, job=job,
            attempt=layouts[job][0].generation if job else 0,
            rank=int(rank) if rank.isdecimal() and len(rank) <= MAX_RANK_DIGITS else -1,
        )  # fmt: skip

    def _reader(self, name: str, location: str) -> Reader:
        reader = self._readers.get(name)
        if reader is None:
            saved, path = self._saved.get(name), Path(location)
            if path.exists() and stat.S_ISCHR(path.stat().st_mode):
                reader = KernelRing(path, saved, _kernel_boot())
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
        self._worker.wait(self.settings.poll_ms / 1000)

    def _failed(self, error: Exception) -> None:
        logger.exception("watching log files: %s", error)
        self._problems["*"] = "error"

    # --- positions -------------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Position]:
        try:
            return msgspec.json.decode(self._store.read_bytes(), type=dict[str, Position])
        except (OSError, msgspec.DecodeError):
            return {}

    def _save(self) -> None:
        now = {name: position for name, reader in self._readers.items() if (position := reader.position())}
        if now == self._saved:
            return
        scratch = self._store.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(now))
            os.replace(scratch, self._store)
        except OSError as error:
            self._problems["*"] = "positions_unsaved"
            logger.warning("log positions %s not stored: %s", self._store, error.strerror)
            return
        self._problems.pop("*", None)
        self._saved = now


def redact(line: str) -> str:
    """The line without what looks like a secret.

    Examples
    --------
    >>> redact("connect https://me:pw@host token=abc")
    'connect https://***@host token=***'
    """
    return SECRET.sub(lambda m: f"{m.group(1)}{m.group(2)}***" if m.group(1) else f"{m.group(3)}***@", line)


def _kernel_boot() -> int:
    """A number that changes with each boot of the kernel."""
    try:
        return int(
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")[:12], 16
        )
    except (OSError, ValueError):
        return 0
