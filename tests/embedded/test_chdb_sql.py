from __future__ import annotations

import pytest

from streams.store.chdb_sql import (
    InsertHead,
    find_insert,
    output_format,
    reaches_outside,
    without_format,
    writes_a_file,
)


@pytest.mark.parametrize(
    ("text", "statement", "data_format", "data"),
    [
        (b"INSERT INTO t FORMAT Native\n\x01\x00\xff", "INSERT INTO t", "Native", b"\x01\x00\xff"),
        (b"insert into `a format b` (x, y) format CSV 1,2\n", "insert into `a format b` (x, y)", "CSV", b"1,2\n"),
        (b"/* format X */ INSERT INTO t -- format Y\n FORMAT TSV\r\n1", "/* format X */ INSERT INTO t", "TSV", b"1"),
        (
            b"INSERT INTO t SETTINGS a = 'format' FORMAT Arrow\n\n",
            "INSERT INTO t SETTINGS a = 'format'",
            "Arrow",
            b"\n",
        ),
        ("INSERT INTO t (`größe`) FORMAT CSV\nü".encode(), "INSERT INTO t (`größe`)", "CSV", "ü".encode()),
    ],
)
def test_an_insert_ends_where_its_data_begin(text: bytes, statement: str, data_format: str, data: bytes) -> None:
    head = find_insert(text)
    assert head is not None
    assert (head.statement, head.data_format, text[head.data_at :]) == (statement, data_format, data)


@pytest.mark.parametrize(
    "text",
    [
        b"SELECT 1 FORMAT CSV",
        b"INSERT INTO t VALUES ('x FORMAT CSV')",
        b"INSERT INTO t SELECT 1 FORMAT CSV",
        b"INSERT INTO t; DROP TABLE t FORMAT CSV",
        b"INSERT INTO t FORMAT",
        b"INSERT INTO t",
        b"",
        b"'never closed FORMAT CSV",
    ],
)
def test_everything_else_is_left_to_the_engine(text: bytes) -> None:
    assert find_insert(text) is None


def test_a_head_may_not_hide_behind_megabytes() -> None:
    assert find_insert(b"INSERT INTO t (" + b"a, " * 200_000 + b"b) FORMAT CSV\n1") is None


@pytest.mark.parametrize(
    ("sql", "name"),
    [
        ("select 1 format JSON", "JSON"),
        ("select 1\nFORMAT Native settings max_threads = 1", "Native"),
        ("select format from t", None),
        ("select * from (select 1 format CSV) where 1", None),
        ("select ' format CSV'", None),
        ("insert into t values ('a') format CSV", None),
        ("select 1", None),
    ],
)
def test_the_output_format_is_found(sql: str, name: str | None) -> None:
    found = output_format(sql)
    assert (found[2] if found else None) == name


@pytest.mark.parametrize("sql", ["select 1 format CSV", "select 1;", "select 1  ", "select 1 FORMAT CSV;"])
def test_a_query_without_its_format(sql: str) -> None:
    assert without_format(sql).strip() == "select 1"


def test_files_are_written_by_outfile_only() -> None:
    assert writes_a_file("select 1 INTO\n outfile 'x'")
    assert not writes_a_file("select ' into outfile ', `into` , outfile from t")


@pytest.mark.parametrize(
    ("sql", "outside"),
    [
        ("select * from file('/etc/passwd')", "the function file()"),
        ("select * from `url` ('http://x')", "the function `url`()"),
        ("select * from '/etc/passwd'", "the path '/etc/passwd'"),
        ('select * from default."/etc/passwd"', 'the path "/etc/passwd"'),
        ("describe table s3('x')", "the function s3()"),
        ("select {p:Identifier}.x from {p:Identifier}", "the path /etc/passwd"),
    ],
)
def test_reads_outside_the_store_are_named(sql: str, outside: str) -> None:
    assert reaches_outside(sql, {"p": "/etc/passwd"}) == outside


@pytest.mark.parametrize(
    "sql", ["select file, url from t where x in ('/dev/sda', 'a')", "select {p:String}", "select a/b from t"]
)
def test_ordinary_queries_stay_inside(sql: str) -> None:
    assert reaches_outside(sql, {"p": "/dev/sda"}) is None


def test_heads_are_values() -> None:
    assert find_insert(b"INSERT INTO t FORMAT CSV\n") == InsertHead("INSERT INTO t", "CSV", 25)
