from __future__ import annotations

import http.client
import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from actions.api import _number
from actions.http import TOKEN_HEADER, HttpServer, Request, Response, Router, json_response, load_token, parse_listen
from trainwarden.errors import UnavailableError, UsageError

TOKEN = "t" * 32


@pytest.fixture
def server() -> Iterator[HttpServer]:
    router = Router(TOKEN)
    router.get(
        "/v1/plans/{plan_id}", lambda request: json_response({"plan": request.parameters["plan_id"], **request.query})
    )
    router.post("/v1/plans/{plan_id}/approve", lambda request: json_response(request.json()))
    router.get(
        "/events", lambda _: Response(content_type="text/event-stream", chunks=(b"data: %d\n\n" % i for i in range(3)))
    )
    router.get("/broken", lambda _: json_response(1 / 0))
    served = HttpServer("127.0.0.1:0", router)
    served.start()
    yield served
    served.close()


def ask(server: HttpServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers=named)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_parameters_and_query_reach_the_handler(server: HttpServer) -> None:
    status, body = ask(server, "GET", "/v1/plans/a%2Fb?full=1")
    assert (status, json.loads(body)) == (200, {"plan": "a/b", "full": "1"})


def test_changing_needs_the_token(server: HttpServer) -> None:
    assert ask(server, "POST", "/v1/plans/p/approve", b"{}")[0] == 401
    assert ask(server, "POST", "/v1/plans/p/approve", b"{}", X_Trainwarden_Token="wrong")[0] == 401
    assert ask(server, "POST", "/v1/plans/p/approve", b'{"reason":"ok"}', X_Trainwarden_Token=TOKEN) == (
        200,
        b'{"reason":"ok"}',
    )


def test_another_sites_page_and_a_foreign_host_are_refused(server: HttpServer) -> None:
    assert (
        ask(server, "POST", "/v1/plans/p/approve", b"{}", X_Trainwarden_Token=TOKEN, Origin="http://evil.example")[0]
        == 403
    )
    assert ask(server, "GET", "/v1/plans/p", Host="evil.example")[0] == 421


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff", b"[" * 50_000])
def test_a_body_that_is_no_object_is_one_sentence(server: HttpServer, body: bytes) -> None:
    status, answer = ask(server, "POST", "/v1/plans/p/approve", body, X_Trainwarden_Token=TOKEN)
    assert status == 400
    assert "expected one object" in json.loads(answer)["error"]


def test_wrong_method_unknown_page_and_a_broken_handler(server: HttpServer) -> None:
    assert ask(server, "POST", "/events", b"", X_Trainwarden_Token=TOKEN)[0] == 405
    assert ask(server, "GET", "/nowhere")[0] == 404
    status, body = ask(server, "GET", "/broken")
    assert status == 500
    assert b"ZeroDivision" not in body


def test_a_body_that_is_too_long_is_not_read(server: HttpServer) -> None:
    assert ask(server, "POST", "/v1/plans/p/approve", b"x" * 70_000, X_Trainwarden_Token=TOKEN)[0] == 413


def test_chunks_are_sent_as_they_come(server: HttpServer) -> None:
    assert ask(server, "GET", "/events") == (200, b"data: 0\n\ndata: 1\n\ndata: 2\n\n")


def test_a_taken_port_is_one_sentence(server: HttpServer) -> None:
    host, port = server.address
    with pytest.raises(UnavailableError, match="choose a free port"):
        HttpServer(f"{host}:{port}", Router(TOKEN))


@pytest.mark.parametrize("listen", ["9480", "host:", ":9480", "host:99999", "host:x", "host:²", "host:" + "9" * 5000])
def test_listen_must_be_host_and_port(listen: str) -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        parse_listen(listen)


def test_the_token_file_is_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run" / "actions.token"
    token = load_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token(path) == token
    path.write_text("short")
    with pytest.raises(UnavailableError, match="expected at least 16"):
        load_token(path)


def test_a_token_in_the_query_does_not_count() -> None:
    router = Router(TOKEN)
    router.post("/x", lambda _: Response())
    request = Request("POST", "/x", query={TOKEN_HEADER: TOKEN}, headers={"host": "localhost:1"})
    assert router.dispatch(request).status == 401


@pytest.mark.parametrize("text", ["²", "-1", "x", "", "9" * 5000, "101"])
def test_a_number_in_the_query_that_is_none_is_one_sentence(text: str) -> None:
    request = Request("GET", "/v1/plans", query={"limit": text})
    with pytest.raises(UsageError, match="expected a number from 0 to 100"):
        _number(request, "limit", 50, 100)
