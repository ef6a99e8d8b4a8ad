"""Self-observation: every metric name is a member of one Literal, so a typo is a type error; one Prometheus page per process."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, get_args

MetricName = Literal[
    # counters ---------------------------------------------------------------------------------------------------------
    "tw_dead_letters_total",  # records nobody could read, by topic
    "tw_records_total",  # records handled, by topic
    "tw_ticks_late_total",  # ticks that came after their grid tick had closed, by node
    "tw_duplicates_total",  # records seen before, by topic
    "tw_summaries_late_total",  # summaries that came after their grid point had closed in the second stage, by block
    "tw_records_hurried_total",  # steps and logs that did not wait for their grid point, since too many waited
    "tw_ticks_skewed_total",  # ticks moved on the grid because the clock of their node is off, by node
    "tw_topology_conflicts_total",  # topology events that contradict what is known, by origin
    "tw_ticks_shed_total",  # grid points that detectors of levels and trends were not shown, since the worker was behind
    "tw_worker_stood_still_total",  # times a leading worker was frozen for longer than its group waits
    "tw_cuts_total",  # frames cut, by phase (live, replayed)
    "tw_verdicts_ignored_total",  # verdicts that the correlator put aside, by reason
    "tw_verdicts_kept_back_total",  # opinions that the risk budget did not let open an incident, by detector
    "tw_verdicts_total",  # verdicts, by detector and kind
    "tw_incident_revisions_total",  # incident revisions published, by kind
    "tw_detector_errors_total",  # exceptions of a detector, by detector
    "tw_source_gaps_total",  # ticks in which a source had nothing, by source and reason
    "tw_spooled_records_total",  # records that went to disk because Kafka was away
    "tw_spool_dropped_total",  # records thinned or lost by a full spool, by topic
    "tw_ticks_missed_total",  # grid ticks that the agent slept through
    "tw_hook_dropped_total",  # datagrams that the training hook could not send, as it says itself
    "tw_bad_datagrams_total",  # hook datagrams that were no JSON of ours
    "tw_events_demoted_total",  # events of a code that a node says too often: they go with the plain log lines
    "tw_log_lines_dropped_total",  # log lines over the rate limit, by file
    "tw_probe_refused_total",  # probes that the responder did not answer, by reason
    "tw_control_orders_total",  # orders to this collector, by outcome (taken, refused, ended)
    "tw_actions_total",  # ledger rows, by verb and status
    "tw_rail_refusals_total",  # plans refused, by rail
    "tw_deliveries_total",  # notification attempts, by receiver and status
    "tw_store_rows_total",  # rows written, by table
    "tw_store_batches_total",  # batches written or retried, by outcome
    # gauges -----------------------------------------------------------------------------------------------------------
    "tw_up",  # 1 while the component runs
    "tw_spool_bytes",  # bytes waiting on disk
    "tw_open_incidents",  # incidents not closed
    "tw_tick_at_seconds",  # unix time of the collector's newest tick: its age is the agent's liveness
    "tw_tick_interval_seconds",  # the collector's present sampling interval: longer when ordered, or while the spool is filling
    "tw_process_cpu_seconds",  # processor time of this process so far
    "tw_process_resident_bytes",  # its resident memory
    "tw_process_open_files",  # its open descriptors
    "tw_tick_age_seconds",  # age of the newest closed tick
    "tw_event_age_seconds",  # while log events with a code wait on the broker: age of the last that was read
    "tw_log_age_seconds",  # while log lines wait on the broker: age of the last that was read
    "tw_keep_every",  # one in so many grid points is shown to detectors of levels and trends: more than 1 while the worker is behind
    "tw_lag_records",  # records on the broker that are in no frame yet, by topic
    "tw_store_behind_seconds",  # how long ago the store writer last had everything that was on the broker
    "tw_snapshot_bytes",  # size of a worker's state before it is packed
    "tw_judged_ratio",  # share of what a detector follows that it judges; the rest warms up; by detector and part (a family, jobs, pairs)
    # sums with count: <name>_sum and <name>_count ------------------------------------------------------------------------
    "tw_frame_ms",  # time to run all detectors over a frame
    "tw_detector_ms",  # time of one detector per frame, by detector
    "tw_source_ms",  # time to read one source, by source
    "tw_insert_ms",  # time of one insert, by table
    "tw_decision_ms",  # incident seen to plan decided
    "tw_snapshot_ms",  # time to capture and pack a worker's state
    "tw_tick_delay_ms",  # grid point of a tick to its frame's verdicts on the topic, also in buckets
]

NAMES: frozenset[str] = frozenset(get_args(MetricName))
_SECTION = re.compile(r"    # (counter|gauge|sum)s\b")
_ENTRY = re.compile(r'    "(tw_\w+)",  # (.+)')

BUCKETS_MS = (
    50,
    100,
    200,
    300,
    400,
    500,
    600,
    800,
    1000,
    1250,
    1500,
    2000,
    2500,
    3000,
    4000,
    6000,
    10_000,
    30_000,
    120_000,
    math.inf,
)

IDLE_S = 3600.0
_Key = tuple[str, tuple[tuple[str, str], ...]]


def meanings() -> Iterator[tuple[str, str, str]]:
    """(name, kind, meaning) of every metric: what the comments in `MetricName` say. Kind is counter, gauge or sum."""
    kind = ""
    for line in inspect.getsource(sys.modules[__name__]).splitlines():
        if section := _SECTION.match(line):
            kind = section[1]
        elif entry := _ENTRY.fullmatch(line):
            yield entry[1], kind, entry[2]


class Metrics:
    """Counters, gauges and sums of one component. Thread-safe; an update costs a dictionary write.

    Examples
    --------
    >>> metrics = Metrics("worker")
    >>> metrics.count("tw_records_total", topic="tw.ticks")
    >>> "tw_records_total{component=\\"worker\\",topic=\\"tw.ticks\\"} 1" in metrics.page()
    True
    """

    def __init__(self, component: str) -> None:
        self._component = component
        self._values: dict[_Key, float] = {}
        self._lock = threading.Lock()

    def count(self, name: MetricName, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self._add(name, by, labels)

    def set(self, name: MetricName, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[self._key(name, labels)] = value

    def forget(self, *names: MetricName) -> None:
        """Drop gauges of something that is over: what stands still on a page is taken for the present."""
        with self._lock:
            self._values = {key: value for key, value in self._values.items() if key[0] not in names}

    def observe_ms(self, name: MetricName, value_ms: float, times: int = 1, **labels: str) -> None:
        """Add the duration of so many `times` to a sum, and these to its count."""
        self._add(f"{name}_sum", value_ms, labels)
        self._add(f"{name}_count", times, labels)

    def observe_spread_ms(self, name: MetricName, value_ms: float, **labels: str) -> None:
        """Add a duration to a sum, its count, and the Prometheus buckets (`BUCKETS_MS`) that it falls into."""
        self.observe_ms(name, value_ms, 1, **labels)
        for limit_ms in BUCKETS_MS:
            if value_ms <= limit_ms:
                self._add(f"{name}_bucket", 1, {**labels, "le": "+Inf" if math.isinf(limit_ms) else f"{limit_ms:g}"})

    def value(self, name: str, **labels: str) -> float:
        """Present value, 0 when never touched."""
        return self._values.get(self._key(name, labels), 0.0)

    def total(self, name: str) -> float:
        """Sum over all labels, 0 when never touched."""
        with self._lock:
            return sum(value for (known, _), value in self._values.items() if known == name)

    def page(self) -> str:
        """Everything in Prometheus text form."""
        with self._lock:
            values = sorted(self._values.items())
        return "".join(f"{name}{{{_labels(labels)}}} {value:g}\n" for (name, labels), value in values)

    def _add(self, name: str, by: float, labels: Mapping[str, str]) -> None:
        key = self._key(name, labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + by

    def _key(self, name: str, labels: Mapping[str, str]) -> _Key:
        ordered = sorted(labels.items()) if len(labels) > 1 else labels.items()
        return name, (("component", self._component), *ordered)


def quantile_ms(buckets: Mapping[float, float], share: float) -> float | None:
    """The duration that `share` of all stay under, between the limits of a bucket in proportion; None where nothing was counted.

    Examples
    --------
    >>> quantile_ms({100.0: 50, 200.0: 100, math.inf: 100}, 0.75)
    150.0
    """
    wanted, low_ms, below = share * buckets.get(math.inf, 0.0), 0.0, 0.0
    for limit_ms, count in sorted(buckets.items()):
        if wanted and count >= wanted:
            part = (wanted - below) / (count - below) if count > below else 1.0
            return round(low_ms + part * (limit_ms - low_ms), 1) if math.isfinite(limit_ms) else limit_ms
        low_ms, below = limit_ms, count
    return None


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def serve(
    metrics: Metrics,
    host: str,
    port: int,
    sick: Callable[[], str] = str,
    more: Callable[[], str] = str,
) -> ThreadingHTTPServer:
    """Serve ``/metrics`` and ``/healthz`` from a daemon thread; the caller shuts the server down.

    Parameters
    ----------
    sick
        One sentence when the component is not well (``/healthz`` then answers 503), else empty.
    more
        Further lines of the metrics page.
    """

    class Page(BaseHTTPRequestHandler):
        """The two pages."""

        def do_GET(self) -> None:
            known = self.path in ("/metrics", "/healthz")
            problem = sick() if self.path == "/healthz" else ""
            page = metrics.page() + more() if self.path == "/metrics" else ""
            body = page or (f"{problem}\n" if problem else "ok\n" if known else "not found\n")
            self.send_response(503 if problem else 200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = _Server((host, port), Page)
    threading.Thread(target=server.serve_forever, args=(IDLE_S,), name="metrics", daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    """Sleeps until somebody asks. The library's own looks twice a second whether it is to end."""

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):  # it was shut down before
            self.socket.shutdown(socket.SHUT_RDWR)
        super().shutdown()
