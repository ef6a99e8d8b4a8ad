"""The body of a request to the store: length or chunks on the wire, perhaps compressed, perhaps a multipart form."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any, BinaryIO

CHUNK_BYTES = 256 * 1024
MAX_LENGTH_DIGITS = 15
_MAX_LINE_BYTES = 1024
ENCODINGS = ("identity", "gzip", "deflate", "lz4", "zstd")


class BodyError(ValueError):
    """The body is not what its headers say; the connection is of no more use.

    Parameters
    ----------
    status
        HTTP status that fits.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def read_body(stream: BinaryIO, length: str | None, transfer_encoding: str) -> Iterator[bytes]:
    """Yield the raw body in pieces of at most `CHUNK_BYTES`.

    Raises
    ------
    BodyError
        A length or a chunk that is none, or the peer hung up in the middle.
    """
    if transfer_encoding.lower() == "chunked":
        return _read_chunks(stream)
    if transfer_encoding:
        raise BodyError(
            501, f"Transfer-Encoding {transfer_encoding!r} is not offered, expected chunked or a Content-Length"
        )
    if length is not None and not (length.isdecimal() and len(length) <= MAX_LENGTH_DIGITS):
        raise BodyError(400, f"Content-Length {length!r} is no number")
    return _read_sized(stream, int(length or 0))


def _read_sized(stream: BinaryIO, left_bytes: int) -> Iterator[bytes]:
    while left_bytes > 0:
        piece = stream.read(min(left_bytes, CHUNK_BYTES))
        if not piece:
            raise BodyError(400, f"the request ended {left_bytes} bytes before its Content-Length")
        left_bytes -= len(piece)
        yield piece


def _read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while True:
        line = stream.readline(_MAX_LINE_BYTES).split(b";")[0].strip()
        try:
            size_bytes = int(line, 16)
        except ValueError:
            raise BodyError(400, f"chunk size {line[:20]!r} is no hexadecimal number") from None
        if size_bytes == 0:
            while stream.readline(_MAX_LINE_BYTES).strip():
                pass  # trailers mean nothing here
            return
        yield from _read_sized(stream, size_bytes)
        stream.readline(_MAX_LINE_BYTES)


def decompress(pieces: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Undo a Content-Encoding.

    Raises
    ------
    BodyError
        An encoding that is not offered (415), or bytes that are not of it (400).
    """
    if encoding in ("", "identity"):
        return iter(pieces)
    return _decompressed(pieces, encoding, *_decoder(encoding))


def _decompressed(
    pieces: Iterable[bytes], encoding: str, decode: Callable[[bytes], bytes], complete: Callable[[], bool]
) -> Iterator[bytes]:
    for piece in pieces:
        try:
            plain = decode(piece)
        # each library has an error of its own: zlib.error, RuntimeError of lz4, ZstdError, EOFError behind the end
        except Exception as error:
            raise BodyError(400, f"the body is not {encoding}: {error}") from error
        if plain:
            yield plain
    if not complete():
        raise BodyError(400, f"the {encoding} body ends in the middle")


def _decoder(encoding: str) -> tuple[Callable[[bytes], bytes], Callable[[], bool]]:
    if encoding in ("gzip", "deflate"):
        inflater = zlib.decompressobj(47)  # 32 + 15: gzip and zlib headers are told apart by themselves
        return inflater.decompress, lambda: bool(inflater.eof)
    if encoding in ("lz4", "zstd"):
        try:
            frames = _frame_decoder(encoding)
        except ImportError as error:
            raise BodyError(
                415, f"Content-Encoding {encoding} needs a package that is not installed ({error})"
            ) from error
        return frames
    raise BodyError(415, f"Content-Encoding {encoding!r} is not offered, expected one of {', '.join(ENCODINGS)}")


def _frame_decoder(encoding: str) -> tuple[Callable[[bytes], bytes], Callable[[], bool]]:
    if encoding == "lz4":
        make = importlib.import_module("lz4.frame").LZ4FrameDecompressor
    else:
        make = importlib.import_module("backports.zstd").ZstdDecompressor
    frames = _Frames(make)
    return frames.decode, frames.complete


class _Frames:
    """Concatenated frames: the client compresses each block into a frame of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        self._make = make
        self._decoder: object | None = None

    def decode(self, piece: bytes) -> bytes:
        out = bytearray()
        while piece:
            decoder = self._decoder or self._make()
            out += decoder.decompress(piece)  # type: ignore[attr-defined]
            ended = bool(decoder.eof)  # type: ignore[attr-defined]
            piece = decoder.unused_data or b"" if ended else b""  # type: ignore[attr-defined]
            self._decoder = None if ended else decoder
        return bytes(out)

    def complete(self) -> bool:
        return self._decoder is None


def parse_form(content_type: str, body: bytes) -> dict[str, str]:
    """Fields of a multipart form.

    Raises
    ------
    BodyError
        The form carries a file (external data, which chDB cannot take), or is no form.
    """
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n" + body
    )
    if not message.is_multipart():
        raise BodyError(400, "the body is not the multipart form that its Content-Type announces")
    fields: dict[str, str] = {}
    for part in message.iter_parts():  # type: ignore[attr-defined]
        name = part.get_param("name", header="content-disposition")
        if part.get_filename() is not None:
            raise BodyError(
                501, f"external data ({name}) is not offered by the embedded store: insert it into a table first"
            )
        content: Any = part.get_payload(decode=True) or b""
        fields[str(name)] = content.decode()
    return fields
