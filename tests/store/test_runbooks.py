"""Every query on a runbook is answered by the store as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streams.store.query import sql
from trainwarden.config import from_table

PAGES = sorted((Path(__file__).parents[2] / "docs/runbooks").glob("*.md"))
QUERY = re.compile(r'trainwarden sql (?:"(?P<text>[^"]+)"|(?P<saved>@\w+))')


def queries(page: Path) -> list[str]:
    return [match["text"] or match["saved"] for match in QUERY.finditer(page.read_text())]


def test_runbooks_ask_the_store() -> None:
    assert sum(len(queries(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", [page for page in PAGES if queries(page)], ids=lambda page: page.stem)
def test_the_queries_of_a_runbook_run(page: Path, store_url: str) -> None:
    config = from_table({"store": {"url": store_url}})
    for query in queries(page):
        sql(config, query)
