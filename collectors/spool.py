"""The disk spool: everything the agent says lies here until the broker has acknowledged it.

Segment files of framed entries (length, CRC32, body) are appended to and read from a cursor. An entry that was appended survives the
agent's death; one that was acknowledged may come again after a crash (receivers drop repeats by sequence number), none is lost.
(Death of the agent, that is: nothing waits for the disk, so a power cut may cost the last seconds.)
In the steady state the one segment is cut to nothing after each acknowledgement, so hardly a byte reaches the disk.

When the spool is full, old ticks are thinned first (every second is dropped, then every second of the rest...), step reports go
after all ticks, log events last. When the disk itself is full, a small memory ring takes over and losses are counted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from trainwarden.errors import UsageError
from trainwarden.selfmetrics import Metrics

logger = logging.getLogger(__name__)

FRAME = struct.Struct("<II")
MAX_BODY_BYTES = 8 * 1024 * 1024
MIN_LIMIT_BYTES = 256 * 1024
SEGMENTS = 16
MAX_SEGMENT_BYTES = 4 * 1024 * 1024
READ_BYTES = 512 * 1024
MEMORY_BYTES = 1024 * 1024
RECENT_ENTRIES = 512
RECENT_BYTES = 1024 * 1024
NO_TICKS_LEVEL = 5
ONLY_LOGS_LEVEL = 6


class Value(IntEnum):
    """What an entry is worth when there is no room for all."""

    BEACON = 0
    TICK = 1
    STEP = 2
    LOG = 3


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One message that waits for the broker."""

    value_class: int
    written_ns: int
    topic: str
    key: bytes
    value: bytes


@dataclass(frozen=True, order=True)
class Place:
    """End of an entry: segment, its thinning level, offset. Segment -1 is the memory ring (offset = entries)."""

    segment: int
    level: int
    offset: int


@dataclass(frozen=True)
class Held:
    """An entry and where it ends."""

    entry: Entry
    place: Place


@dataclass
class _Segment:
    number: int
    level: int
    size_bytes: int

    @property
    def name(self) -> str:
        return f"{self.number:010d}.{self.level}.seg"


class Spool:
    """Bounded queue on disk with one writer side and one reader side, both thread-safe.

    Parameters
    ----------
    directory
        Made when missing. One agent owns it.
    limit_bytes
        Above this, entries are thinned by their value.
    """

    def __init__(self, directory: Path, limit_bytes: int, metrics: Metrics) -> None:
        self._directory = directory
        self._limit_bytes = max(limit_bytes, MIN_LIMIT_BYTES)
        self._segment_bytes = min(self._limit_bytes // SEGMENTS, MAX_SEGMENT_BYTES)
        self._metrics = metrics
        self._lock = threading.RLock()
        self._memory: deque[Entry] = deque()
        self._memory_bytes = 0
        self._lent = -1
        self._owner = _own(directory)
        self._segments = self._recover()
        self._active = self._open_active()
        # what the one segment holds, for as long as that is little: it need not be read back from the disk
        self._recent: list[Held] | None = None if any(s.size_bytes for s in self._segments) else []
        self._cursor = self._load_cursor()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk that are not acknowledged, plus the memory ring."""
        with self._lock:
            return sum(s.size_bytes for s in self._segments) - self._cursor.offset + self._memory_bytes

    @property
    def disk_full(self) -> bool:
        """Whether entries wait in memory because the disk takes none."""
        return bool(self._memory)

    def append(self, entry: Entry) -> bool:
        """Keep an entry; false when it could only be kept in memory (disk full or broken), or is too large to be read back."""
        frame = _frame(entry)
        if len(frame) - FRAME.size > MAX_BODY_BYTES:
            logger.error("spool %s: a record of %d bytes for %s is given up", self._directory, len(frame), entry.topic)
            self._metrics.count("tw_spool_dropped_total", topic=entry.topic)
            return False
        with self._lock:
            if not (self._drain_memory() and self._write(frame)):
                self._remember(entry)
                return False
            self._note_recent([entry], [frame])
            if sum(s.size_bytes for s in self._segments) > self._limit_bytes:
                self._make_room()
            return True

    def extend(self, entries: Sequence[Entry]) -> None:
        """Keep several entries, small ones by one write."""
        frames = list(map(_frame, entries))
        size_bytes = sum(map(len, frames))
        with self._lock:
            together = size_bytes <= min(self._segment_bytes // 2, MAX_BODY_BYTES) and not self._memory
            if not (together and self._write(b"".join(frames))):
                for entry in entries:
                    self.append(entry)
                return
            self._note_recent(entries, frames)
            if sum(s.size_bytes for s in self._segments) > self._limit_bytes:
                self._make_room()

    def peek(self, max_entries: int = 512) -> list[Held]:
        """The oldest entries that are not acknowledged, in order. They are lent until `acknowledge` or `release`."""
        with self._lock:
            held = [held for held in self._recent or () if held.place.offset > self._cursor.offset][:max_entries]
            for segment in self._segments if self._recent is None else ():
                start = self._cursor.offset if segment.number == self._cursor.segment else 0
                held.extend(self._read(segment, start, max_entries - len(held)))
                if len(held) >= max_entries or (held and held[-1].place.offset < segment.size_bytes):
                    break
            if held:
                self._lent = held[-1].place.segment
                return held
            return [Held(entry, Place(-1, 0, i + 1)) for i, entry in enumerate(list(self._memory)[:max_entries])]

    def release(self) -> None:
        """Take lent entries back: they were not delivered."""
        self._lent = -1

    def acknowledge(self, place: Place) -> None:
        """Everything up to `place` (from the last `peek`) is delivered."""
        with self._lock:
            self._lent = -1
            if place.segment < 0:
                for _ in range(min(place.offset, len(self._memory))):
                    self._memory_bytes -= len(self._memory.popleft().value)
                return
            self._advance(place)

    def close(self) -> None:
        """Close the files; nothing is lost."""
        with self._lock:
            os.close(self._active)
            os.close(self._owner)

    # --- writing ---------------------------------------------------------------------------------------------------------

    def _write(self, frame: bytes) -> bool:
        segment = self._segments[-1]
        if segment.size_bytes and segment.size_bytes + len(frame) > self._segment_bytes and not self._roll():
            return False
        segment = self._segments[-1]
        try:
            written = os.write(self._active, frame)
            if written != len(frame):
                raise OSError(28, "short write")
        except OSError as error:
            logger.warning("spool %s takes nothing more: %s", self._directory, error)
            self._cut_active(segment.size_bytes)
            return False
        segment.size_bytes += len(frame)
        return True

    def _note_recent(self, entries: Sequence[Entry], frames: Sequence[bytes]) -> None:
        """Entries that were just written to the active segment."""
        segment = self._segments[-1]
        few = self._recent is not None and len(self._recent) + len(entries) <= RECENT_ENTRIES
        if self._recent is None or not few or segment.size_bytes > RECENT_BYTES or len(self._segments) > 1:
            self._recent = None
            return
        end = segment.size_bytes - sum(map(len, frames))
        for entry, frame in zip(entries, frames, strict=True):
            end += len(frame)
            self._recent.append(Held(entry, Place(segment.number, segment.level, end)))

    def _cut_active(self, size_bytes: int) -> None:
        try:
            os.ftruncate(self._active, size_bytes)
        except OSError as error:
            logger.error("spool %s: a torn entry stays until the next start: %s", self._directory, error)

    def _roll(self) -> bool:
        segment = _Segment(self._segments[-1].number + 1, 0, 0)
        try:
            descriptor = self._open_file(segment)
        except OSError as error:
            logger.warning("spool %s: no new segment: %s", self._directory, error)
            return False
        os.close(self._active)
        self._active = descriptor
        self._segments.append(segment)
        return True

    def _remember(self, entry: Entry) -> None:
        self._memory.append(entry)
        self._memory_bytes += len(entry.value)
        while self._memory_bytes > MEMORY_BYTES:
            worst = min(range(len(self._memory)), key=lambda i: (self._memory[i].value_class, i))
            dropped = self._memory[worst]
            del self._memory[worst]
            self._memory_bytes -= len(dropped.value)
            self._metrics.count("tw_spool_dropped_total", topic=dropped.topic)

    def _drain_memory(self) -> bool:
        while self._memory:
            if not self._write(_frame(self._memory[0])):
                return False
            self._recent = None
            self._memory_bytes -= len(self._memory.popleft().value)
        return True

    # --- reading ---------------------------------------------------------------------------------------------------------

    def _read(self, segment: _Segment, start: int, max_entries: int) -> Iterator[Held]:
        if start >= segment.size_bytes or max_entries <= 0:
            return
        path, size_bytes = self._directory / segment.name, segment.size_bytes - start
        found = list(_entries(_pread_file(path, start, min(size_bytes, READ_BYTES))))
        if not found and size_bytes > READ_BYTES:
            found = list(_entries(_pread_file(path, start, size_bytes)))
        for entry, end in found[:max_entries]:
            yield Held(entry, Place(segment.number, segment.level, start + end))

    def _advance(self, place: Place) -> None:
        while len(self._segments) > 1 and self._segments[0].number < place.segment:
            self._unlink(self._segments.pop(0))
        first = self._segments[0]
        if first.number != place.segment:
            return
        if place.offset >= first.size_bytes:
            self._finish(first)
        else:
            self._store_cursor(place)

    def _finish(self, segment: _Segment) -> None:
        """`segment` is delivered to its end: the active one is emptied, another deleted."""
        if len(self._segments) > 1:
            self._unlink(self._segments.pop(0))
            following = self._segments[0]
            self._cursor = Place(following.number, following.level, 0)
            return
        # The stored position goes before the bytes do: one that pointed into later entries would skip them after a crash.
        if (self._cursor.offset and not self._forget_cursor()) or not self._empty_active():
            # What is delivered stays on disk and comes again after a crash; in this life it must not.
            self._cursor = Place(segment.number, segment.level, segment.size_bytes)
            return
        self._cursor = Place(segment.number, segment.level, 0)
        segment.size_bytes = 0
        self._recent = []

    def _empty_active(self) -> bool:
        try:
            os.ftruncate(self._active, 0)
        except OSError as error:
            logger.warning("spool %s: cannot be emptied, entries may be sent twice: %s", self._directory, error)
            return False
        return True

    def _forget_cursor(self) -> bool:
        try:
            os.unlink(self._directory / "cursor")
        except FileNotFoundError:
            return True
        except OSError as error:
            logger.warning("spool %s: position not reset, entries may be sent twice: %s", self._directory, error)
            return False
        return True

    def _store_cursor(self, place: Place) -> None:
        self._cursor = place
        text = f"{place.segment} {place.level} {place.offset}"
        line = f"{text} {zlib.crc32(text.encode()):08x}\n".encode()
        try:
            _replace_file(self._directory / "cursor", line)
        except OSError as error:
            logger.warning("spool %s: position not stored, entries may be sent twice: %s", self._directory, error)

    # --- thinning --------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        while sum(s.size_bytes for s in self._segments) > self._limit_bytes * 7 // 8:
            closed = [s for s in self._segments[:-1] if s.number > self._lent]
            if not closed:
                return
            segment = min(closed, key=lambda s: (s.level, s.number))
            try:
                self._thin(segment)
            except OSError as error:
                logger.warning("spool %s: thinning failed, the oldest segment goes: %s", self._directory, error)
                self._drop(segment)

    def _thin(self, segment: _Segment) -> None:
        if segment.level >= ONLY_LOGS_LEVEL:
            self._drop(segment)
            return
        start = self._cursor.offset if segment.number == self._cursor.segment else 0
        data = _pread_file(self._directory / segment.name, start, segment.size_bytes - start)
        kept = list(self._keep(segment.level + 1, (entry for entry, _ in _entries(data))))
        thinned = _Segment(segment.number, segment.level + 1, sum(map(len, kept)))
        _replace_file(self._directory / thinned.name, b"".join(kept))
        self._segments[self._segments.index(segment)] = thinned
        if segment.number == self._cursor.segment:
            self._cursor = Place(thinned.number, thinned.level, 0)
        self._unlink(segment)

    def _keep(self, level: int, entries: Iterator[Entry]) -> Iterator[bytes]:
        ticks = 0
        for entry in entries:
            keep = entry.value_class >= (Value.LOG if level >= ONLY_LOGS_LEVEL else Value.STEP)
            if entry.value_class == Value.TICK and level < NO_TICKS_LEVEL:
                keep = ticks % 2 == 0
                ticks += 1
            if keep:
                yield _frame(entry)
            else:
                self._metrics.count("tw_spool_dropped_total", topic=entry.topic)

    def _drop(self, segment: _Segment) -> None:
        data = _pread_file(self._directory / segment.name, 0, segment.size_bytes)
        for entry, _ in _entries(data):
            self._metrics.count("tw_spool_dropped_total", topic=entry.topic)
        self._segments.remove(segment)
        self._unlink(segment)
        if segment.number == self._cursor.segment:
            self._cursor = Place(self._segments[0].number, self._segments[0].level, 0)

    # --- files -----------------------------------------------------------------------------------------------------------

    def _recover(self) -> list[_Segment]:
        """Segments found on disk: half-written files removed, the higher level of a twin kept, the torn tail cut."""
        found: dict[int, _Segment] = {}
        for path in sorted(self._directory.glob("*.tmp")):
            path.unlink()
        for path in sorted(self._directory.glob("*.seg")):
            number, level, _ = path.name.split(".")
            twin = found.get(int(number))
            if twin is not None and twin.level < int(level):
                self._unlink(twin)
            found[int(number)] = _Segment(int(number), int(level), path.stat().st_size)
        segments = [found[number] for number in sorted(found)]
        for segment in segments:
            self._cut_tail(segment)
        return segments or [_Segment(0, 0, 0)]

    def _cut_tail(self, segment: _Segment) -> None:
        path = self._directory / segment.name
        data = path.read_bytes()
        good = max((end for _, end in _entries(data)), default=0)
        if good < len(data):
            logger.warning("spool segment %s: %d torn bytes cut off", path, len(data) - good)
            os.truncate(path, good)
            segment.size_bytes = good

    def _open_active(self) -> int:
        last = self._segments[-1]
        if last.level > 0:
            last = _Segment(last.number + 1, 0, 0)
            self._segments.append(last)
        return self._open_file(last)

    def _open_file(self, segment: _Segment) -> int:
        path = self._directory / segment.name
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _load_cursor(self) -> Place:
        first = self._segments[0]
        start = Place(first.number, first.level, 0)
        try:
            text, _, check = (self._directory / "cursor").read_text(encoding="ascii").strip().rpartition(" ")
            if int(check, 16) != zlib.crc32(text.encode()):
                return start
            place = Place(*(int(word) for word in text.split()))
        except (OSError, ValueError, TypeError):
            return start
        fits = (place.segment, place.level) == (first.number, first.level) and place.offset <= first.size_bytes
        return place if fits else start

    def _unlink(self, segment: _Segment) -> None:
        try:
            os.unlink(self._directory / segment.name)
        except OSError as error:
            logger.warning("spool segment %s stays: %s", segment.name, error)


def _own(directory: Path) -> int:
    """Lock the directory for this process; it is freed by its end, however that comes."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"spool directory {directory} cannot be used ({error.strerror}): set collector.spool_directory"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UsageError(
            f"spool directory {directory} belongs to a running collector: give each node its own"
        ) from None
    return descriptor


def _frame(entry: Entry) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


_decoder = msgspec.msgpack.Decoder(Entry)


def _entries(data: bytes) -> Iterator[tuple[Entry, int]]:
    """Entries in `data` with the offset of their end, up to the first that is torn."""
    offset = 0
    view = memoryview(data)
    while offset + FRAME.size <= len(data):
        length, check = FRAME.unpack_from(data, offset)
        end = offset + FRAME.size + length
        body = view[offset + FRAME.size : end]
        if length > MAX_BODY_BYTES or end > len(data) or zlib.crc32(body) != check:
            return
        try:
            entry = _decoder.decode(body)
        except msgspec.MsgspecError:
            return  # zeros, as a power cut leaves them, are an entry of no bytes with the right check sum
        yield entry, end
        offset = end


def _pread_file(path: Path, start: int, size_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size_bytes, start)
    finally:
        os.close(descriptor)


def _replace_file(path: Path, content: bytes) -> None:
    scratch = path.with_name(f"{path.name}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, content) != len(content):
            raise OSError(28, "short write")
    finally:
        os.close(descriptor)
    os.rename(scratch, path)
