"""Step reports as one table: a column at a time, not a row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streams.store.rows import sample_ms
from streams.store.words import Owners, Words
from trainwarden.clock import NS_PER_MS
from trainwarden.records import StepReport, StepRow

STEPS = "steps"
_REALS = (
    "duration_ms", "data_ms", "forward_ms", "backward_ms", "wait_ms", "optimizer_ms", "checkpoint_ms", "cpu_ms", "loss",
    "grad_norm_local", "grad_norm", "param_checksum",
)  # fmt: skip
_WORDS = ("cluster", "job", "node", "boot_id")
_NUMBERS = (("attempt", pa.uint32()), ("rank", pa.int32()), ("world", pa.uint32()), ("seq", pa.uint64()))
_KEY = ("job", "attempt", "step", "rank", "ts")


def fits(report: StepReport) -> bool:
    """Whether every whole number has room in its column. One that has none makes a dead letter, which is found row by row (`rows_of`)."""
    heads = 0 <= report.attempt < 1 << 32 and -(1 << 31) <= report.rank < 1 << 31 and 0 <= report.world < 1 << 32
    return heads and report.seq >= 0 and all(row.step >= 0 and 0 <= row.samples < 1 << 32 for row in report.rows)


class StepTable:
    """Collects step reports that fit and gives them back as an Arrow table."""

    def __init__(self, schema: Any, owners: Owners) -> None:
        self._schema = schema
        self._owners = owners
        self._reports: list[StepReport] = []
        self._arrived_ms: list[int] = []

    def add(self, report: StepReport, arrived_ms: int) -> None:
        """Take a report in, whole or not at all.

        Raises
        ------
        DecodeError
            When the time of one of its steps cannot be true.
        """
        for row in report.rows:
            sample_ms(row.started_at_ns, arrived_ms)
        if report.rows:
            self._reports.append(report)
            self._arrived_ms.append(arrived_ms)

    def table(self) -> Any | None:
        """All steps in the order of the table's key; None when there is none."""
        if not self._reports:
            return None
        rows = [row for report in self._reports for row in report.rows]
        columns = self._heads() | _of_rows(rows, self._owners.words)
        order = np.lexsort([_sortable(columns[name]) for name in reversed(_KEY)])
        names = [name for name in self._schema.names if name in columns]
        return pa.table({name: _arrow(columns[name], order, self._schema.field(name).type) for name in names})

    def _heads(self) -> dict[str, Any]:
        counts = [len(report.rows) for report in self._reports]
        words, found = self._owners.words, dict[str, Any]()
        for name in _WORDS:
            codes = [words.code(getattr(report, name)) for report in self._reports]
            found[name] = words.ranked(np.repeat(np.array(codes, dtype=np.int64), counts))
        for name, kind in _NUMBERS:
            values = [getattr(report, name) for report in self._reports]
            found[name] = np.repeat(np.array(values, dtype=kind.to_pandas_dtype()), counts)
        return found | {"arrived_at": np.repeat(np.array(self._arrived_ms, dtype=np.int64), counts)}


def _of_rows(rows: Sequence[StepRow], words: Words) -> dict[str, Any]:
    began_ns, handed_ns = (_whole([getattr(row, name) for row in rows]) for name in ("started_at_ns", "arrived_at_ns"))
    handed = handed_ns > 0
    found: dict[str, Any] = {
        "ts": began_ns // 1000,
        "step": np.array([row.step for row in rows], dtype=np.uint64),
        "phase": words.ranked(_whole([words.code(row.phase) for row in rows])),
        "local_ms": np.where(handed, (handed_ns - np.where(handed, began_ns, 0)) / NS_PER_MS, np.nan).astype(np.float32),
        "handed_over_at": np.ma.MaskedArray(handed_ns // 1000, mask=~handed),
        "samples": np.array([row.samples for row in rows], dtype=np.uint32),
        "finite": np.array([row.finite for row in rows], dtype=np.bool_),
    }  # fmt: skip
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite there
        return found | {
            name: np.array([getattr(row, name) for row in rows], dtype=np.float64).astype(np.float32) for name in _REALS
        }


def _whole(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _sortable(column: Any) -> Any:
    return getattr(column, "places", column)


def _arrow(column: Any, order: NDArray[np.intp], kind: Any) -> Any:
    if hasattr(column, "places"):
        return column.taken(order).column()
    values = column[order]
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, mask=np.asarray(values.mask)).cast(kind)
    absent = np.isnan(values) if values.dtype == np.float32 else None
    return pa.array(values, mask=absent).cast(kind)
