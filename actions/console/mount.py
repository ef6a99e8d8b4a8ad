"""The page on the action service's HTTP server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actions.console.page import POLICY, render_live, render_page, title_of
from actions.console.service_view import through
from actions.console.status import Console, as_table
from actions.console.store_view import StoreView
from actions.console.text import render_text
from actions.http import Request, Response, Router, json_response

if TYPE_CHECKING:
    from actions.service import ActionService

_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}


def mount(router: Router, service: ActionService) -> None:
    """Add ``/``, ``/v1/status.json`` and ``/v1/status.txt`` to the service's router."""
    mount_console(
        router,
        Console(service.config, service.clock, through(router), StoreView(service.config.store.url, service.clock)),
    )


def mount_console(router: Router, console: Console) -> None:
    """Add the pages of `console`."""

    def page(request: Request) -> Response:
        body = render_page(console.status(), request.query.get("incident", ""))
        return Response(body.encode(errors="replace"), "text/html; charset=utf-8", headers=_HEADERS)

    def data(request: Request) -> Response:
        status = console.status()
        rendered = {"html": render_live(status, request.query.get("incident", "")), "title": title_of(status)}
        return json_response({**as_table(status), **rendered})

    router.get("/", page)
    router.get("/v1/status.json", data)
    router.get("/v1/status.txt", lambda _: Response(render_text(console.status()).encode(errors="replace")))
