"""ClickHouse's HTTP form over one chDB engine: requests, credentials and responses; see `streams.store.chdb_server`."""

from __future__ import annotations

import base64
import hmac
import json
import logging
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from streams.store.chdb_body import BodyError, decompress, parse_form, read_body
from streams.store.chdb_engine import Answer, ChdbEngine, QueryError, Session, Statement
from streams.store.chdb_sql import HEAD_LIMIT_BYTES, InsertHead, find_insert, output_format, tokens
from trainwarden.addresses import host_of, is_address
from trainwarden.embedded.ports import bind_failure
from trainwarden.errors import UnavailableError

log = logging.getLogger("trainwarden.store.http")

_MAX_QUERY_BYTES = 64 << 20
_MAX_SKIM_BYTES = 256 << 20
_SKIM_S = 0.2
_STREAMED = frozenset({"Native", "TabSeparated", "TSV", "CSV", "RowBinary", "JSONEachRow"})
_IDLE_S = 120.0
_NOT_SETTINGS = frozenset(
    {
        "query",
        "database",
        "default_format",
        "user",
        "password",
        "quota_key",
        "query_id",
        "role",
        "stacktrace",
        "readonly",
    }
    | {
        "session_id",
        "session_timeout",
        "session_check",
        "close_session",
        "client_protocol_version",
        "wait_end_of_query",
    }
    | {"compress", "decompress", "enable_http_compression", "network_compression_method", "buffer_size"}
    | {"send_progress_in_http_headers", "http_headers_progress_interval_ms", "add_http_cors_header"}
    | {"cancel_http_readonly_queries_on_client_close"}
)
_STATUS_OF = {
    **dict.fromkeys((60, 81, 218, 46, 50), 404),
    **dict.fromkeys((62, 47, 36, 27, 6, 16, 41, 53, 70, 72, 115, 117, 386, 456, 457, 164), 400),
    **dict.fromkeys((192, 193, 516), 403),
    202: 503,
    48: 501,
    159: 408,
}
_CONTENT_TYPE = {
    "JSON": "application/json; charset=UTF-8",
    "JSONCompact": "application/json; charset=UTF-8",
    "JSONEachRow": "application/x-ndjson; charset=UTF-8",
    "CSV": "text/csv; charset=UTF-8; header=absent",
    "CSVWithNames": "text/csv; charset=UTF-8; header=present",
    "TabSeparated": "text/tab-separated-values; charset=UTF-8",
    "TSV": "text/tab-separated-values; charset=UTF-8",
    "Arrow": "application/vnd.apache.arrow.file",
    "ArrowStream": "application/vnd.apache.arrow.stream",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a port.

    Parameters
    ----------
    user, password
        Asked of every request when a password is set; without one everybody on this host may connect.
    readonly
        Nothing can be written through the port.
    """

    user: str = "default"
    password: str = ""
    readonly: bool = False

    def allows(self, user: str, password: str) -> bool:
        """Whether these credentials are right, in constant time."""
        same_user = hmac.compare_digest(user.encode(), self.user.encode())
        return not self.password or (hmac.compare_digest(password.encode(), self.password.encode()) and same_user)


class Activity:
    """Requests in flight, so that a stop can wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self.stopping = False

    def __enter__(self) -> None:
        with self._changed:
            if self.stopping:
                raise QueryError.make(202, "TOO_MANY_SIMULTANEOUS_QUERIES", "the store is stopping")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self.stopping = True

    def drained(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)


class Listener(ThreadingHTTPServer):
    """One port: accepts connections, a thread each."""

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True

    def __init__(self, host: str, port: int, engine: ChdbEngine, access: Access, activity: Activity) -> None:
        self.engine = engine
        self.access = access
        self.activity = activity
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UnavailableError(bind_failure(host, port, "the store", error)) from error

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """End the connections that clients keep open."""
        with self._open_lock:
            connections = list(self._open)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:  # the client was faster
                log.debug("hang up: %s", error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("connection of %s broke", client_address, exc_info=True)


class _Reply(Exception):
    """Ends a request with a ready response."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class _Request:
    """What a request asks, after form fields have joined the URL's."""

    fields: Mapping[str, str]
    readonly: bool
    query_id: str

    def statement(self, sql: str | bytes) -> Statement:
        settings = {name: value for name, value in self.fields.items() if self._is_setting(name)}
        parameters = {name[6:]: value for name, value in self.fields.items() if name.startswith("param_")}
        return Statement(sql, self.fields.get("database", ""), settings, parameters, self.readonly)

    @staticmethod
    def _is_setting(name: str) -> bool:
        return name not in _NOT_SETTINGS and not name.startswith("param_")


class _Handler(BaseHTTPRequestHandler):
    """One connection. Each response leaves in one write, else delayed acknowledgement costs 40 ms a request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    timeout = _IDLE_S
    server: Listener
    server_version = "trainwarden-store"
    _started = False
    _body_read = False

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def handle_expect_100(self) -> bool:
        done = super().handle_expect_100()
        self.wfile.flush()
        return done

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)

    def _answer(self) -> None:
        self._started = False
        self._body_read = False
        query_id = str(uuid.uuid4())
        try:
            self._dispatch(query_id)
        except _Reply as reply:
            self._send(reply.status, reply.body.encode(), {})
        except BodyError as error:
            self.close_connection = True  # what is left of the body would be taken for the next request
            self._fail(error.status, 1, f"Code: 1. DB::Exception: {error}. (UNSUPPORTED_METHOD)", query_id)
        except QueryError as error:
            self._fail(_STATUS_OF.get(error.code, 500), error.code, str(error), query_id)
        except (ConnectionError, TimeoutError) as error:
            self.close_connection = True
            log.debug("client %s went away: %s", self.client_address, error)

    def _dispatch(self, query_id: str) -> None:
        url = urlsplit(self.path)
        fields = dict(parse_qsl(url.query, keep_blank_values=True))
        body = self._body()
        if url.path in ("/ping", "/replicas_status"):
            raise _Reply(200, "Ok.\n")
        if url.path not in ("", "/"):
            raise _Reply(404, f"There is no handler {url.path}: this is a store, ask for / or /ping\n")
        self._refuse_foreign_pages()
        self._authenticate(fields)
        if fields.get("compress", "0") not in ("0", "") or fields.get("decompress", "0") not in ("0", ""):
            raise QueryError.make(
                48, "NOT_IMPLEMENTED", "Block compression is not offered by the embedded store: turn it off"
            )
        with self.server.activity:
            self._query(fields, body, query_id)

    def _body(self) -> Iterator[bytes]:
        raw = read_body(self.rfile, self.headers.get("Content-Length"), self.headers.get("Transfer-Encoding", ""))  # type: ignore[arg-type]
        return decompress(self._noting_the_end(raw), self.headers.get("Content-Encoding", ""))

    def _noting_the_end(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        yield from pieces
        self._body_read = True

    def _refuse_foreign_pages(self) -> None:
        # A web page may ask 127.0.0.1 from the browser of whoever sits here. Browsers say where a request to elsewhere comes from;
        # a page whose own name was made to lead here is no other place for them, but that name (one with a dot) stands in Host.
        if self.server.access.password:
            return
        host = host_of(self.headers.get("Host", "localhost"))
        if self.headers.get("Origin") is not None or ("." in host and not is_address(host)):
            self.close_connection = True
            raise _Reply(403, "Requests of web pages are refused where no password is set\n")

    def _authenticate(self, fields: Mapping[str, str]) -> None:
        user, password = self._credentials(fields)
        if not self.server.access.allows(user, password):
            self.close_connection = True
            raise QueryError.make(
                516,
                "AUTHENTICATION_FAILED",
                f"{user}: Authentication failed: password is incorrect, or there is no such user",
            )

    def _credentials(self, fields: Mapping[str, str]) -> tuple[str, str]:
        basic = self.headers.get("Authorization", "")
        if basic.startswith("Basic "):
            try:
                user, _, password = base64.b64decode(basic[6:], validate=True).decode().partition(":")
            except ValueError:
                raise QueryError.make(516, "AUTHENTICATION_FAILED", "the Authorization header is not Basic") from None
            return user or "default", password
        user = self.headers.get("X-ClickHouse-User") or fields.get("user") or "default"
        return user, self.headers.get("X-ClickHouse-Key") or fields.get("password", "")

    def _query(self, fields: dict[str, str], body: Iterator[bytes], query_id: str) -> None:
        content_type = self.headers.get("Content-Type", "")
        if content_type.startswith("multipart/form-data"):
            fields |= parse_form(content_type, _whole(body))
            body = iter(())
        readonly = self.server.access.readonly or self.command != "POST" or fields.get("readonly", "0") != "0"
        request = _Request(fields, readonly, fields.get("query_id") or query_id)
        text, rest = _head(fields.get("query", ""), body)
        insert = find_insert(text)
        if insert is not None:
            self._insert(request, insert, chain(filter(None, (text[insert.data_at :],)), rest))
            return
        sql = text + _whole(rest)
        if not sql.strip():
            self._empty(request)
        self._read_or_command(request, sql)

    def _empty(self, request: _Request) -> None:
        if self.command == "POST" or request.fields.get("query") is not None:
            raise QueryError.make(62, "SYNTAX_ERROR", "Empty query")
        raise _Reply(200, "Ok.\n")

    def _insert(self, request: _Request, head: InsertHead, data: Iterable[bytes]) -> None:
        settings = request.statement(head.statement)
        with self.server.engine.insert(settings) as session:
            answer = session.insert(head.data_format, data)
        self._send(200, b"", self._headers(request, head.data_format, answer))

    def _read_or_command(self, request: _Request, sql: bytes) -> None:
        named = output_format(sql.decode(errors="replace"))
        data_format = named[2] if named else request.fields.get("default_format") or "TabSeparated"
        with self.server.engine.read_or_command(request.statement(sql)) as session:
            buffered = request.fields.get("wait_end_of_query", "0") != "0"
            if session.reads and data_format in _STREAMED and not buffered and _streams(sql):
                self._stream(request, session, data_format)
                return
            answer = session.run(data_format)
            body = answer.body
            if not body and data_format == "Native" and session.reads:
                body = session.native_header()
        self._send(200, body, self._headers(request, data_format, answer))

    def _stream(self, request: _Request, session: Session, data_format: str) -> None:
        tag = uuid.uuid4().hex[:16]
        with closing(session.stream(data_format)) as blocks:
            first = next(blocks, b"")  # an error before the first block still gets a status of its own
            if not first and data_format == "Native":
                first = session.native_header()
            headers = self._headers(request, data_format, Answer())
            self._begin(200, headers | {"Transfer-Encoding": "chunked", "X-ClickHouse-Exception-Tag": tag})
            try:
                for block in chain((first,), blocks):
                    self._chunk(block)
                self._chunk(b"", last=True)
            except QueryError as error:
                # The status is long gone: ClickHouse's own form for an error behind data, which clients look for.
                text = str(error)
                self._chunk(
                    f"\r\n__exception__\r\n{tag}\r\n{text}\n{len(text) + 1} {tag}\r\n__exception__\r\n".encode()
                )
                self._chunk(b"", last=True)
                self.close_connection = True

    def _headers(self, request: _Request, data_format: str, answer: Answer) -> dict[str, str]:
        summary = {
            "read_rows": str(answer.read_rows),
            "read_bytes": str(answer.read_bytes),
            "written_rows": str(answer.written_rows),
            "written_bytes": str(answer.written_bytes),
            "elapsed_ns": str(answer.elapsed_ns),
        }
        return {
            "Content-Type": _CONTENT_TYPE.get(data_format, "application/octet-stream"),
            "X-ClickHouse-Format": data_format,
            "X-ClickHouse-Query-Id": request.query_id,
            "X-ClickHouse-Timezone": self.server.engine.timezone,
            "X-ClickHouse-Summary": json.dumps(summary, separators=(",", ":")),
        }

    def _fail(self, status: int, code: int, text: str, query_id: str) -> None:
        if self._started:  # half a response is out: hanging up is all that is left to say
            self.close_connection = True
            log.warning("a response broke off: %s", text)
            return
        headers = {"X-ClickHouse-Exception-Code": str(code), "X-ClickHouse-Query-Id": query_id}
        self._send(status, f"{text} (version {self.server.engine.version})\n".encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._leave_no_body()
        self._begin(status, {"Content-Type": "text/plain; charset=UTF-8", **headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _leave_no_body(self) -> None:
        # Bytes of an unread body would be taken for the next request, and hanging up on them resets the client before it
        # has read why.
        announced = self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding") is not None
        if announced and not self._body_read:
            self.close_connection = True
            self.wfile.flush()
            self._skim(_MAX_SKIM_BYTES)

    def _skim(self, left_bytes: int) -> None:
        self.connection.settimeout(_SKIM_S)
        try:
            while left_bytes > 0 and (piece := self.rfile.read1(1 << 16)):  # type: ignore[attr-defined]
                left_bytes -= len(piece)
        except OSError:
            pass  # nothing more comes: that is what was wanted

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        self.send_response(status)
        self.send_header("X-ClickHouse-Server-Display-Name", "trainwarden-chdb")
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _chunk(self, data: bytes, last: bool = False) -> None:
        if data:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        if last:
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


def _head(query: str, body: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The text that holds a statement's beginning, and the body that is left behind it."""
    if query:
        return query.encode() + b"\n", body
    text = bytearray()
    while len(text) < HEAD_LIMIT_BYTES and (piece := next(body, b"")):
        text += piece
    return bytes(text), body


def _whole(pieces: Iterable[bytes], limit_bytes: int = _MAX_QUERY_BYTES) -> bytes:
    whole = bytearray()
    for piece in pieces:
        whole += piece
        if len(whole) > limit_bytes:
            raise BodyError(
                413, f"the query is longer than {limit_bytes >> 20} MiB: insert data with a FORMAT clause instead"
            )
    return bytes(whole)


def _streams(sql: bytes) -> bool:
    """Whether the engine can hand out the result block by block: selects only."""
    first = next(tokens(sql[:HEAD_LIMIT_BYTES].decode(errors="replace")), None)
    return first is not None and first.text.upper() in ("SELECT", "WITH", "FROM", "(")
