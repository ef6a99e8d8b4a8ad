"""The journal export format: fields of entries, text or binary, as `journalctl -o export` writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_FIELD_BYTES = 64 * 1024
MAX_ENTRY_FIELDS = 512
SIZE_BYTES = 8
NAME = re.compile(rb"[A-Z_][A-Z0-9_]{0,63}")
BELIEVED_BYTES = 1 << 32
"""A field that claims to be longer is a broken stream, not a field."""


@dataclass
class Entry:
    """One entry of the journal; fields longer than 64 KiB are cut."""

    fields: dict[str, bytes] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A field as text, empty when it is not there."""
        return self.fields.get(name, b"").decode("utf-8", "replace")

    @property
    def cursor(self) -> str:
        """Where in the journal this entry is."""
        return self.text("__CURSOR")

    @property
    def realtime_us(self) -> int:
        """Wall clock of the entry, 0 when unknown."""
        stamp = self.text("__REALTIME_TIMESTAMP")
        return int(stamp) if stamp.isdecimal() and len(stamp) < 20 else 0


class JournalReader:
    """Entries of a stream that comes in pieces. Whatever the bytes are, memory stays bounded.

    Attributes
    ----------
    broken
        Places where the stream was not in the export format; reading goes on after the next empty line.
    """

    def __init__(self) -> None:
        self.broken = 0
        self._buffer = b""
        self._entry = Entry()
        self._binary: str | None = None
        self._wanted = -1
        self._skip = 0
        self._lost = False

    def feed(self, data: bytes) -> list[Entry]:
        """Entries that `data` completes."""
        self._buffer += data
        entries: list[Entry] = []
        while self._step(entries):
            pass
        return entries

    def _step(self, entries: list[Entry]) -> bool:
        """Take one thing off the buffer; false when more bytes are needed."""
        if self._skip:
            taken = min(self._skip, len(self._buffer))
            self._buffer, self._skip = self._buffer[taken:], self._skip - taken
            return self._skip == 0 and taken > 0
        if self._binary is not None:
            return self._binary_value()
        end = self._buffer.find(b"\n")
        if end < 0:
            return self._long_line()
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        if line:
            self._line(line)
        else:
            self._end_of_entry(entries)
        return True

    def _long_line(self) -> bool:
        """A field that goes on and on: its beginning is kept."""
        if len(self._buffer) > MAX_FIELD_BYTES:
            self._buffer = self._buffer[:MAX_FIELD_BYTES]
        return False

    def _line(self, line: bytes) -> None:
        if self._lost:
            return
        name, equals, value = line.partition(b"=")
        if not NAME.fullmatch(name) or len(self._entry.fields) >= MAX_ENTRY_FIELDS:
            self._broken()
        elif equals:
            self._entry.fields[name.decode("ascii")] = value[:MAX_FIELD_BYTES]
        else:
            self._binary, self._wanted = name.decode("ascii"), -1

    def _binary_value(self) -> bool:
        if self._wanted < 0:
            if len(self._buffer) < SIZE_BYTES:
                return False
            self._wanted = int.from_bytes(self._buffer[:SIZE_BYTES], "little")
            self._buffer = self._buffer[SIZE_BYTES:]
            if self._wanted > BELIEVED_BYTES:
                self._binary = None
                self._broken()
                return True
        keep = min(self._wanted, MAX_FIELD_BYTES)
        if len(self._buffer) < keep:
            return False
        if self._binary is not None:
            self._entry.fields[self._binary] = self._buffer[:keep]
        # the rest of a huge value, and the newline behind it
        self._buffer, self._skip, self._binary = self._buffer[keep:], self._wanted - keep + 1, None
        return True

    def _end_of_entry(self, entries: list[Entry]) -> None:
        if self._entry.fields and not self._lost:
            entries.append(self._entry)
        self._entry, self._lost = Entry(), False

    def _broken(self) -> None:
        self.broken += 1
        self._entry, self._lost = Entry(), True
