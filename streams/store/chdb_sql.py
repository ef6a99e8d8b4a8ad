"""The little that the store's HTTP form must know of SQL text: where an INSERT ends and its data begin, what reaches outside.

Everything else is the engine's business; nothing here parses a query.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HEAD_LIMIT_BYTES = 256 * 1024
"""An INSERT's statement, without its data, is never longer than this."""

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*(?:\n|$)|\#[!\ ][^\n]*(?:\n|$)|/\*.*?\*/)
  | (?P<string>'(?:[^'\\]|\\.|'')*')
  | (?P<name>`(?:[^`\\]|\\.)*`|"(?:[^"\\]|\\.)*")
  | (?P<word>\w+)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_IDENTIFIER_PARAMETER = re.compile(r"\{\s*(\w+)\s*:\s*Identifier\s*\}")

# Functions that read or run something outside the store; a reader of a read-only port has no business with them.
_OUTSIDE = frozenset(
    [
        "file",
        "url",
        "s3",
        "s3cluster",
        "gcs",
        "hdfs",
        "hdfscluster",
        "remote",
        "remotesecure",
        "mysql",
        "postgresql",
        "mongodb",
        "redis",
        "sqlite",
        "odbc",
        "jdbc",
        "executable",
        "azureblobstorage",
        "iceberg",
        "deltalake",
        "hudi",
        "python",
        "urlcluster",
        "filecluster",
        "input",
        "cluster",
        "clusterallreplicas",
        "ytsaurus",
        "arrowflight",
        "paimon",
    ]
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of SQL text and where it ends."""

    kind: str
    text: str
    end: int


@dataclass(frozen=True, slots=True)
class InsertHead:
    """An INSERT statement that is followed by data.

    Parameters
    ----------
    statement
        The INSERT up to its FORMAT clause.
    data_format
        Name in the FORMAT clause.
    data_at
        Offset in bytes at which the data begin.
    """

    statement: str
    data_format: str
    data_at: int


def tokens(sql: str) -> Iterator[Token]:
    """Pieces of `sql` without spaces and comments. A quote that never closes ends as single characters."""
    for match in _TOKEN.finditer(sql):
        if match.lastgroup and match.lastgroup != "space":
            yield Token(match.lastgroup, match.group(), match.end())


def find_insert(text: bytes) -> InsertHead | None:
    """Split an INSERT with a FORMAT clause from the bytes behind it.

    Parameters
    ----------
    text
        The statement, perhaps followed by data in any encoding.

    Returns
    -------
    InsertHead or None
        None for everything else: other statements, INSERT ... SELECT, INSERT ... VALUES (the engine takes those whole).
    """
    sql = text[:HEAD_LIMIT_BYTES].decode("latin-1")  # one character per byte: offsets stay those of the bytes
    stream = tokens(sql)
    if _upper(next(stream, None)) != "INSERT":
        return None
    start = 0
    for token in stream:
        word = _upper(token)
        if token.text == ";" or word in ("SELECT", "VALUES", "WITH", "WATCH"):
            return None
        if word == "FORMAT":
            return _with_format(text, sql, start, next(stream, None))
        start = token.end
    return None


def _with_format(text: bytes, sql: str, statement_end: int, name: Token | None) -> InsertHead | None:
    if name is None or name.kind != "word":
        return None
    at = name.end
    # The data begin after the line's end, or after one space where they stand on the same line.
    while at < len(sql) and sql[at] in " \t\r":
        at += 1
    if at < len(sql) and sql[at] == "\n":
        at += 1
    return InsertHead(text[:statement_end].decode(errors="replace"), name.text, at)


def _upper(token: Token | None) -> str:
    return token.text.upper() if token is not None and token.kind == "word" else ""


def output_format(sql: str) -> tuple[int, int, str] | None:
    """Start, end and name of the last FORMAT clause that is followed only by settings, or None."""
    if "format" not in sql.lower() or _upper(next(tokens(sql), None)) == "INSERT":
        return None
    found: tuple[int, int, str] | None = None
    previous = ""
    for token in tokens(sql):
        word = _upper(token)
        if word in ("FROM", "WHERE", "SELECT") or token.text == ")":
            found = None  # FORMAT was a column's or table's name
        elif previous == "FORMAT" and token.kind == "word":
            found = (token.end - len(token.text), token.end, token.text)
        previous = word
    return found


def without_format(sql: str) -> str:
    """`sql` without its FORMAT clause and closing semicolon."""
    found = output_format(sql)
    if found is not None:
        keyword = sql.upper().rindex("FORMAT", 0, found[0])
        sql = sql[:keyword] + sql[found[1] :]
    return sql.rstrip().rstrip(";")


def writes_a_file(sql: str) -> bool:
    """Whether the text holds INTO OUTFILE, which chDB, unlike a server, would carry out itself."""
    if "outfile" not in sql.lower():
        return False
    previous = ""
    for token in tokens(sql):
        word = _upper(token)
        if previous == "INTO" and word == "OUTFILE":
            return True
        previous = word
    return False


def reaches_outside(sql: str, parameters: Mapping[str, str]) -> str | None:
    """Name what a statement would read outside the store's tables, or None.

    chDB's default database also reads files by their path, and table functions reach files and the network; this refuses
    the known ways. It is a fence for honest readers, no sandbox.
    """
    for name in _IDENTIFIER_PARAMETER.findall(sql):
        if "/" in parameters.get(name, ""):
            return f"the path {parameters[name]}"
    previous = Token("other", "", 0)
    for token in tokens(sql):
        if token.text == "(" and previous.text.strip('`"').lower() in _OUTSIDE:
            return f"the function {previous.text}()"
        if token.kind == "name" and "/" in token.text:
            return f"the path {token.text}"
        if token.kind == "string" and _upper(previous) in ("FROM", "JOIN", "TABLE"):
            return f"the path {token.text}"
        previous = token
    return None
