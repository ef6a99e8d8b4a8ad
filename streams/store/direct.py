"""A client whose inserts go straight to the engine that runs in the same process.

Through HTTP on loopback every byte of a batch is packed, copied through a socket in pieces, and unpacked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from streams.store.chdb_engine import ChdbEngine, QueryError, Statement, quote_name


class DirectClient:
    """An ordinary client of the store in this process, but for `insert_arrow`."""

    def __init__(self, client: Any, engine: ChdbEngine) -> None:
        self._client = client
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def insert_arrow(self, table: str, arrow_table: Any, settings: Mapping[str, Any] | None = None) -> None:
        """Insert an Arrow table; it is written when this returns.

        Raises
        ------
        StoreError
            The engine refused it.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, arrow_table.schema) as writer:
            writer.write_table(arrow_table)
        columns = ", ".join(map(quote_name, arrow_table.schema.names))
        asked = {name: str(value) for name, value in (settings or {}).items()}
        statement = Statement(f"INSERT INTO {quote_name(table)} ({columns})", self._client.database, asked)
        try:
            with self._engine.insert(statement) as session:
                session.insert("ArrowStream", [sink.getvalue()])
        except RuntimeError as error:  # chDB's own kind, of a connection that it could not make
            raise QueryError.of(error) from error
