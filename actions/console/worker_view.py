"""What the stream worker says of itself on its metrics page: is it in time, and can it read what it gets."""

from __future__ import annotations

import http.client
import math
import re
from collections import defaultdict

from actions.console.model import Part
from trainwarden.selfmetrics import quantile_ms

_LINE = re.compile(r"(tw_\w+)\{([^}]*)\} (\S+)")
_LE = re.compile(r'le="([^"]+)"')
_JUDGED = re.compile(r'detector="([^"]+)".*part="([^"]+)"')
LATE_SHARE = 0.95
WARM_SHARE = 0.9
"""A detector that judges this much of what it follows counts as warm: new ranks, pairs and series come all the time."""
MOST_NAMED = 4
WORST = frozenset({"tw_tick_age_seconds", "tw_keep_every"})
"""A worker of several that share the work says these once for each of its units: the worst counts."""


def read_page(listen: str, timeout_s: float = 0.5) -> str:
    """The metrics page served at `listen` (host:port); raises `OSError` when nobody answers."""
    host, _, port = listen.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"answers no HTTP: {error!r}") from None
    finally:
        connection.close()


def look_at_worker(listen: str, late_s: float, timeout_s: float = 0.5) -> Part:
    """The worker as a part of the system; without an address nobody asked for a page, and nothing is said against it."""
    if not listen.rpartition(":")[2].isdigit():
        return Part("worker", True, "has no page (streams.web_listen)")
    try:
        page = read_page(listen, timeout_s)
    except (OSError, ValueError) as error:
        return Part(
            "worker",
            False,
            f"nobody answers at {listen} (streams.web_listen): {getattr(error, 'strerror', None) or error}",
        )
    return part_of(page, late_s)


def part_of(page: str, late_s: float) -> Part:
    """The part that a metrics page describes; detectors that are warming up are named, the coldest first.

    Examples
    --------
    >>> part_of('tw_tick_age_seconds{component="worker"} 1.5', 15.0).detail
    'newest tick looked at 1.5 s ago, 0 records unread, 0 refused'
    >>> part_of('tw_tick_age_seconds{unit="block/0"} 9\\ntw_tick_age_seconds{unit="block/1"} 8', 15.0).detail
    'newest tick looked at 9.0 s ago, 0 records unread, 0 refused'
    """
    sums: dict[str, float] = defaultdict(float)
    buckets: dict[float, float] = {}
    cold: dict[tuple[str, str], float] = {}
    for name, labels, value in _LINE.findall(page):
        sums[name] = max(sums[name], float(value)) if name in WORST else sums[name] + float(value)
        if name == "tw_tick_delay_ms_bucket" and (limit := _LE.search(labels)):
            buckets[math.inf if limit[1] == "+Inf" else float(limit[1])] = float(value)
        if name == "tw_judged_ratio" and float(value) < WARM_SHARE and (whose := _JUDGED.search(labels)):
            cold[whose[1], whose[2]] = min(float(value), cold.get((whose[1], whose[2]), 1.0))
    if "tw_tick_age_seconds" not in sums:
        return Part("worker", True, "stands by, or has seen no tick yet")
    age_s = sums["tw_tick_age_seconds"]
    words = [
        f"newest tick looked at {age_s:.1f} s ago",
        f"{sums['tw_lag_records']:.0f} records unread",
        f"{sums['tw_dead_letters_total']:.0f} refused",
    ]
    if (late_ms := quantile_ms(buckets, LATE_SHARE)) is not None:
        words.append(f"{LATE_SHARE:.0%} of ticks judged within {late_ms / 1000:.1f} s")
    if (keep := sums["tw_keep_every"]) > 1:
        words.append(f"sheds: levels and trends see one second in {keep:.0f}")
    if broken := sums["tw_detector_errors_total"]:
        words.append(f"{broken:.0f} detector errors")
    if cold:
        words.append(f"warming up: {_named(cold)}")
    return Part("worker", age_s <= late_s, ", ".join(words), "is late")


def _named(cold: dict[tuple[str, str], float]) -> str:
    """Who warms up at what, the coldest first.

    Examples
    --------
    >>> _named({("dynamic_threshold", "gpu"): 0.25, ("straggler", "jobs"): 0.0})
    'straggler (jobs 0%), dynamic_threshold (gpu 25%)'
    """
    ordered = sorted(cold.items(), key=lambda item: (item[1], item[0]))
    told = [f"{detector} ({part} {share:.0%})" for (detector, part), share in ordered[:MOST_NAMED]]
    return ", ".join(told) + (f" and {len(ordered) - MOST_NAMED} more" if len(ordered) > MOST_NAMED else "")
