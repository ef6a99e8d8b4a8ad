"""A tiny HTTP server for the operator's API and the status page: one router, typed handlers, the standard library only.

Reading is open to whoever reaches the address (loopback by default). Changing anything needs the token of the token file in a
header of our own: a browser never adds it to a request that another site started, so a form elsewhere cannot act. The `Host`
header must be one we answer to, else a name that resolves to loopback could read and act (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from trainwarden.addresses import host_of, is_address
from trainwarden.errors import TrainwardenError, UnavailableError, UsageError

LOG = logging.getLogger("trainwarden.actions.http")

TOKEN_HEADER = "X-Trainwarden-Token"
MAX_BODY_BYTES = 64 * 1024
SOCKET_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Request:
    """What a handler sees. `parameters` are the ``{name}`` parts of the pattern; `query` keeps the last of repeated keys."""

    method: str
    path: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object.

        Raises
        ------
        UsageError
            When the body is anything else.
        """
        if not self.body:
            return {}
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{self.method} {self.path}: the body is not JSON ({error}), expected one object"
            ) from None
        if not isinstance(value, dict):
            raise UsageError(f"{self.method} {self.path}: the body is a {type(value).__name__}, expected one object")
        return value


@dataclass(frozen=True)
class Response:
    """What a handler gives back. `chunks`, when set, are sent as they come (server-sent events) instead of `body`."""

    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: Iterable[bytes] | None = None


Handler = Callable[[Request], Response]


def json_response(value: object, status: int = HTTPStatus.OK) -> Response:
    """`value` as JSON."""
    body = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
    return Response(body, "application/json", status)


def error_response(status: int, reason: str) -> Response:
    """One sentence as JSON under the key ``error``."""
    return json_response({"error": reason}, status)


@dataclass(frozen=True)
class _Route:
    method: str
    parts: tuple[str, ...]
    handler: Handler
    needs_token: bool

    def match(self, parts: tuple[str, ...]) -> dict[str, str] | None:
        if len(parts) != len(self.parts):
            return None
        found: dict[str, str] = {}
        for pattern, part in zip(self.parts, parts, strict=True):
            if pattern.startswith("{"):
                found[pattern.strip("{}")] = part
            elif pattern != part:
                return None
        return found


class Router:
    """Patterns such as ``/v1/plans/{plan_id}/approve`` to handlers.

    Parameters
    ----------
    token
        Expected in `TOKEN_HEADER` on every route that changes something.
    hosts
        Names in `Host` that are answered beside ``localhost``, without port. Addresses always are: only a name can be made to
        resolve to something else.
    """

    def __init__(self, token: str, hosts: tuple[str, ...] = ()) -> None:
        self._token = token
        self._hosts = {"localhost", *hosts}
        self._routes: list[_Route] = []

    def get(self, pattern: str, handler: Handler) -> None:
        """Answer GET (and HEAD) on `pattern`; it must change nothing."""
        self._routes.append(_Route("GET", _parts(pattern), handler, needs_token=False))

    def post(self, pattern: str, handler: Handler) -> None:
        """Answer POST on `pattern`, only with the token."""
        self._routes.append(_Route("POST", _parts(pattern), handler, needs_token=True))

    def dispatch(self, request: Request) -> Response:
        """The answer to `request`; every mistake of the caller is one sentence, never a traceback."""
        if (refused := self._refuse_origin(request)) is not None:
            return refused
        parts, known = _parts(request.path), set[str]()
        for route in self._routes:
            if (parameters := route.match(parts)) is None:
                continue
            if route.method == ("GET" if request.method == "HEAD" else request.method):
                return self._call(route, _with_parameters(request, parameters))
            known.add(route.method)
        if known:
            return error_response(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.path} answers {', '.join(sorted(known))}, not {request.method}",
            )
        return error_response(HTTPStatus.NOT_FOUND, f"no such page: {request.path}")

    def _refuse_origin(self, request: Request) -> Response | None:
        host = host_of(request.headers.get("host", ""))
        if host not in self._hosts and not is_address(host):
            return error_response(HTTPStatus.MISDIRECTED_REQUEST, f"Host {host!r} is not a name of this service")
        origin = request.headers.get("origin", "")
        if request.method == "POST" and origin and urlsplit(origin).netloc != request.headers.get("host", ""):
            return error_response(HTTPStatus.FORBIDDEN, f"a page of {origin} may not change anything here")
        return None

    def _call(self, route: _Route, request: Request) -> Response:
        given = request.headers.get(TOKEN_HEADER.lower(), "")
        if route.needs_token and not hmac.compare_digest(given.encode(), self._token.encode()):
            return error_response(
                HTTPStatus.UNAUTHORIZED, f"{request.path} changes things: send the token in {TOKEN_HEADER}"
            )
        try:
            return route.handler(request)
        except UsageError as error:
            return error_response(HTTPStatus.BAD_REQUEST, str(error))
        except TrainwardenError as error:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            LOG.exception("%s %s failed", request.method, request.path)
            return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "the handler failed, see the action service's log")


def _parts(path: str) -> tuple[str, ...]:
    return tuple(unquote(part) for part in path.strip("/").split("/"))


def _with_parameters(request: Request, parameters: dict[str, str]) -> Request:
    return Request(request.method, request.path, parameters, request.query, request.headers, request.body)


class HttpServer:
    """Serves a `Router` on ``host:port`` in its own threads until `close`.

    Raises
    ------
    UsageError
        When `listen` is not ``host:port``.
    UnavailableError
        When the address is taken or not ours.
    """

    def __init__(self, listen: str, router: Router) -> None:
        host, port = parse_listen(listen)
        try:
            self._server = _Server((host, port), type("_RoutedHandler", (_Handler,), {"router": router}))
        except OSError as error:
            raise UnavailableError(
                f"actions.listen = {listen!r}: {error.strerror or error}; choose a free port"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="actions-http", daemon=True
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port in use (the real port when 0 was asked for)."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers under way end with their threads."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``host:port``."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UsageError(f"actions.listen = {listen!r}: expected host:port, for example 127.0.0.1:9480")
    return host, int(port)


def load_token(path: Path) -> str:
    """Token in `path`; made (mode 0600) when the file is not there.

    Raises
    ------
    UnavailableError
        When the file cannot be read or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UnavailableError(
            f"token file {path}: {error.strerror}; the action service must be able to write there"
        ) from None
    token = secrets.token_hex(24)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(token)
    return token


def read_token(path: Path) -> str:
    """Token in `path`; raises `UnavailableError` when it cannot be read or is too short."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise UnavailableError(
            f"token file {path}: {error.strerror}; only its owner may command the action service"
        ) from None
    if len(token) < 16:
        raise UnavailableError(
            f"token file {path} holds {len(token)} characters, expected at least 16: delete it and start again"
        )
    return token


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "trainwarden"
    sys_version = ""
    timeout = SOCKET_TIMEOUT_S
    router: ClassVar[Router]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        LOG.debug(format, *args)

    def _answer(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            self._send(
                error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body may have 0 to {MAX_BODY_BYTES} bytes")
            )
            return
        split = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(length) if length else b""
        self._send(
            self.router.dispatch(Request(self.command, split.path, {}, dict(parse_qsl(split.query)), headers, body))
        )

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.chunks is None:
            self.send_header("Content-Length", str(len(response.body)))
        else:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(response)

    def _send_body(self, response: Response) -> None:
        try:
            self.wfile.write(response.body)
            for chunk in response.chunks or ():
                self.wfile.write(chunk)
                self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            LOG.debug("the reader of %s went away", self.path)
            self.close_connection = True
