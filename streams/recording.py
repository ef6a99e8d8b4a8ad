"""Recordings of live topics: every message as it was, in segments that can be cut short and still be read.

A recording is a directory of ``segment-<n>.twr``: gzip members over a stream of length-framed messages. A recorder that is killed
loses at most what it had not flushed; the last, torn message is left out on reading.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from trainwarden.bus import Message
from trainwarden.errors import UsageError

MAGIC = b"TWR1"
SEGMENT_BYTES = 64 * 1024 * 1024
GZIP_WBITS = 31
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_Fields = tuple[str, int, int, int, bytes, bytes]


class Recorder:
    """Writes messages into a directory that must be new or empty.

    Raises
    ------
    UsageError
        The directory holds something, or cannot be written.
    """

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._segment = -1
        self._written = 0
        self.messages = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            occupied = any(directory.iterdir())
        except OSError as error:
            raise UsageError(f"{directory}: {error.strerror}: choose a directory that can be written") from None
        if occupied:
            raise UsageError(f"{directory}: is not empty: choose a new directory for the recording")
        self._file = self._next_segment()

    def write(self, message: Message) -> None:
        """Append one message."""
        fields = (message.topic, message.partition, message.offset, message.timestamp_ms, message.key, message.value)
        payload = self._encoder.encode(fields)
        if self._written + len(payload) > self._segment_bytes:
            self._file.close()
            self._file = self._next_segment()
        self._file.write(_LENGTH.pack(len(payload)) + payload)
        self._written += len(payload)
        self.messages += 1

    def flush(self) -> None:
        """Make everything written so far readable."""
        self._file.flush()

    def close(self) -> None:
        """End the last segment."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next_segment(self) -> gzip.GzipFile:
        self._segment, self._written = self._segment + 1, 0
        path = self._directory / f"segment-{self._segment:05d}.twr"
        file = gzip.GzipFile(path, "wb", compresslevel=3)
        file.write(MAGIC)
        return file


def segments(directory: Path) -> list[Path]:
    """Segment files of a recording, in order; empty when the directory is none."""
    return sorted(directory.glob("segment-*.twr"))


def read(directory: Path) -> Iterator[Message]:
    """Every whole message of a recording, in the order of writing.

    Raises
    ------
    UsageError
        No segments, or a file that is none of ours.
    """
    found = segments(directory)
    if not found:
        raise UsageError(f"{directory}: no segment-*.twr in it: expected a directory written by `trainwarden record`")
    decoder = msgspec.msgpack.Decoder(_Fields)
    for path in found:
        stream = io.BytesIO(_content(path))
        if stream.read(len(MAGIC)) != MAGIC:
            raise UsageError(f"{path}: does not begin with {MAGIC.decode()}: not a segment of a recording")
        for payload in _frames(stream):
            topic, partition, offset, timestamp_ms, key, value = decoder.decode(payload)
            yield Message(topic, partition, offset, key, value, timestamp_ms)


def _content(path: Path) -> bytes:
    """As much of a segment as can be had: a recorder that was killed leaves its end missing."""
    try:
        return zlib.decompressobj(wbits=GZIP_WBITS).decompress(path.read_bytes())
    except (OSError, zlib.error) as error:
        raise UsageError(f"{path}: {error}: not a segment of a recording") from None


def _frames(stream: io.BytesIO) -> Iterator[bytes]:
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        payload = stream.read(size)
        if size > MAX_MESSAGE_BYTES or len(payload) < size:
            return
        yield payload
