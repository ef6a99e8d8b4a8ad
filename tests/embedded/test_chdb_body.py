from __future__ import annotations

import gzip
import io
import zlib

import lz4.frame  # type: ignore[import-untyped]
import pytest
from backports import zstd

from streams.store.chdb_body import BodyError, decompress, parse_form, read_body

TEXT = b"INSERT INTO t FORMAT CSV\n" + b"1,2\n" * 5000


def whole(raw: bytes, length: str | None = None, transfer: str = "") -> bytes:
    return b"".join(read_body(io.BytesIO(raw), length, transfer))


def test_a_sized_body_ends_at_its_length() -> None:
    assert whole(b"select 1GET /", "8") == b"select 1"
    assert whole(b"GET /", None) == b""


def test_a_chunked_body_ends_at_its_last_chunk() -> None:
    stream = io.BytesIO(b"6;ext=1\r\nselect\r\n2\r\n 1\r\n0\r\nTrailer: x\r\n\r\nGET /")
    assert b"".join(read_body(stream, None, "chunked")) == b"select 1"
    assert stream.read() == b"GET /"


@pytest.mark.parametrize(
    ("raw", "length", "transfer", "says"),
    [
        (b"abc", "5", "", "ended 2 bytes before"),
        (b"", "x", "", "'x' is no number"),
        (b"", "²", "", "'²' is no number"),
        (b"", "9" * 5000, "", "is no number"),
        (b"zz\r\n", None, "chunked", "no hexadecimal number"),
        (b"", None, "gzip", "is not offered"),
        (b"5\r\nab", None, "chunked", "ended 3 bytes before"),
    ],
)
def test_a_broken_body_is_told(raw: bytes, length: str | None, transfer: str, says: str) -> None:
    with pytest.raises(BodyError, match=says):
        whole(raw, length, transfer)


@pytest.mark.parametrize(
    ("encoding", "raw"),
    [
        ("", TEXT),
        ("identity", TEXT),
        ("gzip", gzip.compress(TEXT, mtime=0)),
        ("deflate", zlib.compress(TEXT)),
        ("lz4", lz4.frame.compress(TEXT)),
        ("zstd", zstd.compress(TEXT)),
        ("lz4", lz4.frame.compress(TEXT[:100]) + lz4.frame.compress(TEXT[100:])),
        ("zstd", zstd.compress(TEXT[:100]) + zstd.compress(TEXT[100:])),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1000, 1 << 20])
def test_encodings_are_undone_however_the_pieces_fall(encoding: str, raw: bytes, piece_bytes: int) -> None:
    pieces = [raw[at : at + piece_bytes] for at in range(0, len(raw), piece_bytes)]
    assert b"".join(decompress(pieces, encoding)) == TEXT


@pytest.mark.parametrize("encoding", ["gzip", "lz4", "zstd"])
def test_bytes_of_no_encoding_and_torn_ones_are_told(encoding: str) -> None:
    with pytest.raises(BodyError, match=f"the body is not {encoding}"):
        list(decompress([b"INSERT INTO t FORMAT CSV"], encoding))
    raw = {"gzip": gzip.compress, "lz4": lz4.frame.compress, "zstd": zstd.compress}[encoding](TEXT)
    with pytest.raises(BodyError, match="ends in the middle"):
        list(decompress([raw[:-6]], encoding))


def test_an_encoding_that_is_not_offered_is_refused() -> None:
    with pytest.raises(BodyError, match="'br' is not offered") as caught:
        decompress([b""], "br")
    assert caught.value.status == 415


def form(*parts: str) -> bytes:
    return "".join(f"--B\r\nContent-Disposition: form-data; {part}\r\n" for part in parts).encode() + b"--B--\r\n"


def test_a_form_becomes_fields() -> None:
    body = form('name="query"\r\n\r\nselect {x:String}', 'name="param_x"\r\n\r\nü')
    assert parse_form("multipart/form-data; boundary=B", body) == {"query": "select {x:String}", "param_x": "ü"}


def test_files_in_a_form_are_refused() -> None:
    with pytest.raises(BodyError, match="external data"):
        parse_form("multipart/form-data; boundary=B", form('name="t"; filename="t"\r\n\r\n1'))
    with pytest.raises(BodyError, match="not the multipart form"):
        parse_form("multipart/form-data", b"select 1")
