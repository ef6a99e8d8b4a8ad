"""The agent on this very machine for as long as wanted: what each source gave, what it could not and why, and what that cost."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.collector.cost import agent, shares
from benchmarks.collector.processes import footprint
from benchmarks.collector.surroundings import surrounded
from trainwarden import topics
from trainwarden.bus import Message
from trainwarden.records import Catalog, LogEvent, Tick, decode

WARM_UP_S = 15.0
SLACK_TICKS = 2
"""The page with the count of those missed is read a moment before the last tick."""


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """Figures of `seconds`; ok when every tick came or was counted as missed, and the costs are within their bars."""
    with surrounded(folder) as around:
        with agent(around, "", {}) as process:
            time.sleep(WARM_UP_S)
            begun, before = time.monotonic(), footprint(process.pid)
            time.sleep(seconds)
            elapsed_s, after, page = time.monotonic() - begun, footprint(process.pid), around.page()
        told = report(around.messages())
    missed = sum(value for name, value in page.items() if name.startswith("tw_ticks_missed_total"))
    # on a machine that is busy with other things a tick may be slept through; what must not be is one that nobody counted
    silent = max(0.0, told["span_ticks"] - told["ticks"] - missed - SLACK_TICKS)
    figures = {**shares(before, after, elapsed_s), **told, "ticks_missed": missed, "ticks_lost_in_silence": silent}
    return {**figures, "ok": figures["cpu_ok"] and figures["pss_ok"] and not silent and not told["dead_letters"]}


def report(messages: Iterable[Message]) -> dict[str, Any]:
    """What the messages say: ticks, values present by family and column, gaps by source and reason, events by code."""
    ticks, catalogs, codes, dead = [], {}, Counter[str](), 0
    for message in messages:
        record = decode(message.value)
        if isinstance(record, Tick):
            ticks.append(record)
        elif isinstance(record, Catalog):
            catalogs[record.catalog_id] = record
        elif isinstance(record, LogEvent):
            codes[f"{record.source}:{record.code}"] += 1
        dead += message.topic == topics.DEAD.name
    gaps = Counter(f"{gap.source}: {gap.reason}" for tick in ticks for gap in tick.gaps)
    return {
        "ticks": len(ticks),
        "span_ticks": span_ticks(ticks),
        "families": {catalog.family: _family(ticks, catalog) for catalog in catalogs.values()},
        "gaps": dict(gaps.most_common()),
        "events": dict(codes.most_common()),
        "dead_letters": dead,
    }


def span_ticks(ticks: list[Tick]) -> int:
    """Ticks that there should be from the first to the last."""
    if not ticks:
        return 0
    times = [tick.observed_at_ns for tick in ticks]
    return round((max(times) - min(times)) / (ticks[0].interval_ms * 1e6)) + 1


def _family(ticks: list[Tick], catalog: Catalog) -> dict[str, Any]:
    """Ticks with rows, devices, and in how many of the rows each column had a value; columns that never had one by name."""
    present: Counter[str] = Counter()
    devices: set[str] = set()
    with_rows = rows = 0
    for block in (block for tick in ticks for block in tick.blocks if block.catalog_id == catalog.catalog_id):
        with_rows += 1
        for device, values in block.rows():
            devices.add(device)
            rows += 1
            present.update(m.name for m, value in zip(catalog.metrics, values, strict=True) if not math.isnan(value))
    absent = [metric.name for metric in catalog.metrics if not present[metric.name]] if rows else []
    return {
        "source": catalog.source,
        "ticks_with_rows": with_rows,
        "devices": sorted(devices)[:16],
        "columns_with_values": len(present),
        "columns": len(catalog.metrics),
        "values_present_ratio": round(sum(present.values()) / (rows * len(catalog.metrics)), 3) if rows else 0.0,
        "never": absent,
    }
