"""Arrow tables shaped like the store's own tables: the store's columns decide, so a migration needs no change here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

_PLAIN: dict[str, Any] = {
    "String": pa.string(),
    "Bool": pa.bool_(),
    "Float32": pa.float32(),
    "Float64": pa.float64(),
    "DateTime": pa.timestamp("s", "UTC"),
    **{f"UInt{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
    **{f"Int{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
}
_UNITS = {"0": "s", "3": "ms", "6": "us", "9": "ns"}
_WRAPPED = re.compile(r"(LowCardinality|Nullable|Array|Map|SimpleAggregateFunction)\((.*)\)")
_TIME = re.compile(r"DateTime64\((\d)(?:, *'UTC')?\)")
BINARY_COLUMNS = frozenset({"payload", "key_bytes"})
"""String columns that hold bytes of any kind."""


def arrow_type(store_type: str) -> Any:
    """Arrow type of a ClickHouse type.

    Examples
    --------
    >>> str(arrow_type("Nullable(DateTime64(3, 'UTC'))"))
    'timestamp[ms, tz=UTC]'
    """
    if store_type in _PLAIN:
        return _PLAIN[store_type]
    if match := _TIME.fullmatch(store_type):
        return pa.timestamp(_UNITS[match.group(1)], "UTC")
    if store_type.startswith("DateTime("):
        return pa.timestamp("s", "UTC")
    match = _WRAPPED.fullmatch(store_type)
    if match is None:
        raise ValueError(f"no Arrow type is known for the store's {store_type}")
    return _wrapped_type(match.group(1), match.group(2))


def _wrapped_type(wrapper: str, inner: str) -> Any:
    if wrapper == "Array":
        return pa.list_(arrow_type(inner))
    if wrapper == "Map":
        key, _, value = inner.rpartition(", ")
        return pa.map_(arrow_type(key), arrow_type(value))
    if wrapper == "SimpleAggregateFunction":
        return arrow_type(inner.partition(", ")[2])
    return arrow_type(inner)


def schemas_of(client: Any, tables: Sequence[str]) -> dict[str, Any]:
    """Arrow schema of each table as it is in the store now."""
    rows = client.query(
        "SELECT table, name, type FROM system.columns WHERE database = currentDatabase() AND default_kind IN ('', 'DEFAULT') "
        "ORDER BY table, position"
    ).result_rows
    fields: dict[str, list[Any]] = {}
    for table, name, store_type in rows:
        if table in tables:
            binary = name in BINARY_COLUMNS
            fields.setdefault(table, []).append(pa.field(name, pa.binary() if binary else arrow_type(store_type)))
    return {table: pa.schema(columns) for table, columns in fields.items()}


def table_of(schema: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Arrow table of `rows` (all with the same keys); columns that the rows do not name keep the store's default.

    Raises
    ------
    pa.ArrowException, TypeError, ValueError, OverflowError
        When a value does not fit its column.
    """
    names = [name for name in schema.names if name in rows[0]]
    arrays = [pa.array([row[name] for row in rows], schema.field(name).type) for name in names]
    return pa.table(arrays, schema=pa.schema([schema.field(name) for name in names]))
