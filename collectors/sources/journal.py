"""The system journal, followed by one long-lived `journalctl`: known lines become events. Off until it is asked for."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import msgspec

from collectors import patterns
from collectors.base import Context, Sample, Source, Worker
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from collectors.logs.journal import Entry, JournalReader
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap
from trainwarden.settings import option

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024
SAVE_EVERY_NS = 5 * NS_PER_S
BACKOFF_MAX_S = 60.0
GOOD_RUN_NS = 60 * NS_PER_S
CURSOR_REFUSALS = 2
FIELDS = "MESSAGE,SYSLOG_IDENTIFIER,_SYSTEMD_UNIT,_TRANSPORT,_PID,CONTAINER_NAME"
MAX_CHANNELS = 256


class Place(msgspec.Struct):
    """Where reading stopped: the cursor, and the wall clock for a journal in which the cursor is gone."""

    cursor: str = ""
    realtime_us: int = 0


class JournalSource(Source):
    """Runs ``journalctl -o export -f`` as a child and reads its output in a thread of its own, which waits in the kernel between entries.

    Notes
    -----
    A child that ends is started again after 1, 2, 4 ... 60 s, behind the last entry read. A cursor that the journal no longer knows is
    replaced by the time of the last entry. The place is stored after an event and every few seconds.
    """

    name: ClassVar[str] = "journal"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.journal]``."""

        follow: bool = option(False, "read the journal; the kernel's part comes more cheaply from /dev/kmsg")
        matches: list[str] = option([], "journalctl matches such as _SYSTEMD_UNIT=kubelet.service; empty = everything")
        directory: str = option(
            "", "directory of the journal (/host/var/log/journal in a container); empty = the system's"
        )
        command: str = option("journalctl", "program that reads the journal")
        fold_s: float = option(5.0, "identical lines within this time are one event with a count")
        burst: float = option(20.0, "events of one code and unit at once")
        per_s: float = option(2.0, "events of one code and unit per second after a burst")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        folder = Folder(settings.fold_s, settings.burst, settings.per_s, refused(context))
        self._desk = Desk(context, patterns.load(), folder, self.name)
        self._channels: dict[str, Channel] = {}
        self._store = context.state_directory / "journal_place.json"
        self._place = _load(self._store)
        self._saved_ns = 0
        self._refusals = 0
        self._backoff_s = 0.0
        self._problem = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._reader = JournalReader()
        self._begun_ns = 0
        self._worker = Worker("tw-journal", self._turn, self._failed)

    def start(self) -> None:
        """Begin to follow, if it is asked for."""
        if self.settings.follow:
            self._worker.start()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        return Sample(gaps=(Gap(self.name, self._problem),) if self._problem else ())

    def close(self) -> None:
        if not self.settings.follow:
            return
        self._worker.close(timeout_s=2.0, wake=self._end_child)
        self._desk.settle(list(self._channels.values()), last=True)
        self._save()

    def command(self) -> list[str]:
        """The child's command line, from where reading stopped."""
        line = [self.settings.command, "-o", "export", "-f", "-q", "--no-pager", f"--output-fields={FIELDS}"]
        if self.settings.directory:
            line.append(f"--directory={self.settings.directory}")
        if self._place.cursor and self._refusals < CURSOR_REFUSALS:
            line += ["-n", "all", f"--after-cursor={self._place.cursor}"]
        elif self._place.realtime_us:
            line += ["-n", "all", f"--since=@{self._place.realtime_us / 1e6:.6f}"]
        else:
            line += ["-n", "0"]
        return [*line, *self.settings.matches]

    def take(self, piece: bytes) -> None:
        """Take in a piece of the child's output."""
        before = self._reader.broken
        for entry in self._reader.feed(piece):
            self._entry(entry)
        if self._reader.broken > before:
            self.context.outlet.dead(
                "journal", "not in the journal export format: the rest of the entry is left out", piece[:500]
            )

    def _entry(self, entry: Entry) -> None:
        if cursor := entry.cursor:
            self._place = Place(cursor, entry.realtime_us or self._place.realtime_us)
        unit = (
            entry.text("CONTAINER_NAME") or entry.text("_SYSTEMD_UNIT") or entry.text("SYSLOG_IDENTIFIER") or "journal"
        )
        channel = self._channel("kernel" if entry.text("_TRANSPORT") == "kernel" else unit[:100])
        for line in entry.fields.get("MESSAGE", b"").split(b"\n"):
            self._desk.block(channel, line + b"\n")

    def _channel(self, unit: str) -> Channel:
        channel = self._channels.get(unit)
        if channel is None:
            if len(self._channels) >= MAX_CHANNELS:  # sessions have units of their own, each day new ones
                self._channels = {name: c for name, c in self._channels.items() if c.is_open}
            channel = self._channels[unit] = Channel(f"journal/{unit}")
        return channel

    # --- the child ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._child is None and not self._begin():
            self._worker.wait(self._backoff_s)
            return
        child = self._child
        piece = os.read(child.stdout.fileno(), PIECE_BYTES) if child is not None and child.stdout is not None else b""
        if piece:
            self._problem, self._refusals = "", 0
            self.take(piece)
            self._settle()
        elif not self._worker.stopping:
            self._ended()
            self._worker.wait(self._backoff_s)

    def _begin(self) -> bool:
        self._reader = JournalReader()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        try:
            self._child = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._complaints, bufsize=0
            )
        except OSError as error:
            self._complain("missing" if isinstance(error, FileNotFoundError) else "permission", error.strerror or "")
            return False
        self._begun_ns = self.context.clock.monotonic_ns()
        return True

    def _ended(self) -> None:
        child, self._child = self._child, None
        code = child.wait() if child is not None else 0
        if self.context.clock.monotonic_ns() - self._begun_ns >= GOOD_RUN_NS:
            self._backoff_s = 0.0
        self._refusals += 1
        said = b""
        if self._complaints is not None:
            self._complaints.seek(0)
            said = self._complaints.read(500)
        self._complain(f"child_ended:{code}", said.decode("utf-8", "replace").strip())

    def _complain(self, reason: str, said: str) -> None:
        self._backoff_s = min(max(1.0, self._backoff_s * 2), BACKOFF_MAX_S)
        if self._complaints is not None:
            self._complaints.close()
            self._complaints = None
        if self._problem != reason:
            logger.warning(
                "%s ended or did not start (%s: %s): next attempt in %g s",
                self.settings.command, reason, said, self._backoff_s,
            )  # fmt: skip
        self._problem = reason

    def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.kill()

    def _failed(self, error: Exception) -> None:
        logger.exception("following the journal: %s", error)
        self._problem = "error"

    # --- the place ---------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self._desk.settle([c for c in self._channels.values() if c.is_open])
        now_ns = self.context.clock.monotonic_ns()
        if self._desk.spoke or now_ns - self._saved_ns >= SAVE_EVERY_NS:
            self._desk.spoke, self._saved_ns = False, now_ns
            self._save()

    def _save(self) -> None:
        scratch = self._store.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(self._place))
            os.replace(scratch, self._store)
        except OSError as error:
            self._problem = "positions_unsaved"
            logger.warning("place in the journal %s not stored: %s", self._store, error.strerror)


def _load(path: Path) -> Place:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Place)
    except (OSError, msgspec.DecodeError):
        return Place()
