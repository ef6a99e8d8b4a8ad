"""The newest reading of something that is fetched off the shared thread, with its age: a page, or what a tool prints.

`sample` of a source must not wait. A `Feed` asks in a thread of its own and keeps the newest answer; the source takes it, or a reason
why there is none. Where an answer lies in a file it is read at once: no network, no wait.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from collectors.base import Context, Worker
from collectors.pages.fetch import PageClient, parse_address
from collectors.pages.text import MAX_PAGE_BYTES, Page, PageError, Reader
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError
from trainwarden.settings import option

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKOFF_MAX_S = 60.0
STALE_PERIODS = 2.5
FILE = "file:"


@dataclass(frozen=True)
class PageSettings:
    """Keys of every source that reads a page."""

    url: str = option("", "page to read, http://host:port/metrics or file:/path; empty = off")
    every_s: float = option(10.0, "cadence; exporters collect every 10 to 60 s, asking more often brings the same page")
    deadline_s: float = option(3.0, "longest wait for a whole page")
    stale_s: float = option(180.0, "a page whose values stand still for so long is stale: its exporter hangs")


@dataclass(frozen=True)
class Reading(Generic[T]):
    """An answer.

    Attributes
    ----------
    changed_ns
        When an answer with this content was first seen, monotonic.
    taken_ns
        When it was last seen.
    version
        Counts the changes of content: equal versions mean that there is nothing to work out again.
    trouble
        Reason code when the newest attempt failed and this is the answer before it; else empty.
    """

    value: T
    changed_ns: int
    taken_ns: int
    version: int
    trouble: str = ""


class Feed(Generic[T]):
    """Asks again and again, in a thread that the first question starts.

    Parameters
    ----------
    ask
        Gets the answer and what tells whether its content changed; raises `PageError`.
    wake
        Ends an `ask` that hangs.
    inline
        `ask` does not wait for anybody: no thread.
    """

    def __init__(
        self, context: Context, name: str, ask: Callable[[], tuple[T, object]], every_s: float, deadline_s: float,
        wake: Callable[[], None] = lambda: None, inline: bool = False,
    ) -> None:  # fmt: skip
        self._context = context
        self._name = name
        self._ask = ask
        self._wake = wake
        self._inline = inline
        self.every_s = every_s
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._reading: Reading[T] | None = None
        self._mark: object = None
        self._trouble: PageError | None = None
        self._failures = 0
        self._asked_ns: int | None = None
        self._asking = False
        self._worker: Worker | None = None

    def newest(self) -> Reading[T]:
        """The newest answer that is not too old.

        Raises
        ------
        PageError
            There is none: why the last attempt failed, ``starting``, or ``late``.
        """
        self._keep_going()
        now_ns = self._context.clock.monotonic_ns()
        with self._lock:
            reading, trouble = self._reading, self._trouble
        if reading is None:
            raise trouble or PageError("starting", f"{self._name}: nothing was read yet")
        if now_ns - reading.taken_ns > (STALE_PERIODS * self.every_s + self._deadline_s) * NS_PER_S:
            raise trouble or PageError("late", f"{self._name}: no answer for {STALE_PERIODS} periods")
        if trouble is None:
            return reading
        return Reading(reading.value, reading.changed_ns, reading.taken_ns, reading.version, trouble.reason)

    def turn(self) -> float:
        """Ask once; seconds to wait before the next time."""
        self._asked_ns, self._asking = self._context.clock.monotonic_ns(), True
        try:
            value, mark = self._ask()
        except PageError as error:
            return self._failed(error)
        finally:
            self._asking = False
        self._take(value, mark)
        return self.every_s

    def close(self) -> None:
        """End the thread."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(timeout_s=0.5, wake=self._wake)

    def _keep_going(self) -> None:
        now_ns, asked_ns = self._context.clock.monotonic_ns(), self._asked_ns
        if self._inline:
            if asked_ns is None or now_ns - asked_ns >= self.every_s * NS_PER_S:
                self.turn()
        elif self._worker is None:
            self._worker = Worker(f"tw-{self._name}", self._work, self._broken)
            self._worker.start()
        elif self._asking and asked_ns is not None and now_ns - asked_ns > 2 * self._deadline_s * NS_PER_S:
            self._wake()  # one byte now and then holds off every timeout of a socket

    def _work(self) -> None:
        wait_s = self.turn()
        if self._worker is not None:
            self._worker.wait(wait_s)

    def _take(self, value: T, mark: object) -> None:
        now_ns = self._context.clock.monotonic_ns()
        with self._lock:
            last = self._reading
            same = last is not None and mark == self._mark
            changed_ns, version = (
                (last.changed_ns, last.version) if last and same else (now_ns, last.version + 1 if last else 1)
            )
            self._reading = Reading(last.value if last and same else value, changed_ns, now_ns, version)
            self._mark, self._trouble, self._failures = mark, None, 0

    def _failed(self, error: PageError) -> float:
        with self._lock:
            if self._trouble is None or self._trouble.reason != error.reason:
                logger.warning("%s: %s", self._name, error)
            self._trouble = error
            self._failures += 1
        return min(self.every_s * 2.0 ** min(self._failures - 1, 8), max(BACKOFF_MAX_S, self.every_s))

    def _broken(self, error: Exception) -> None:
        logger.error("%s failed", self._name, exc_info=error)
        self._failed(PageError("error", f"{self._name}: {error}"))


class PageFeed:
    """A page as a feed, with a verdict on pages that stand still.

    Parameters
    ----------
    wanted
        Metrics to read.
    key
        Name of the table of settings, for messages.
    """

    def __init__(self, context: Context, settings: PageSettings, wanted: frozenset[str], key: str) -> None:
        self._context = context
        self._settings = settings
        self._name = key.rpartition(".")[2]
        self._reader = Reader(wanted)
        self._body = b""
        self._page: Page | None = None
        self._client: PageClient | None = None
        inline = settings.url.startswith(FILE)
        self._fetch: Callable[[], bytes]
        if inline:
            self._fetch = path_reader(context, settings.url, f"{key}.url")
        else:
            self._client = PageClient(parse_address(settings.url, f"{key}.url"), settings.deadline_s)
            self._fetch = self._client.get
        self._feed: Feed[Page] = Feed(
            context, self._name, self._ask, settings.every_s, settings.deadline_s,
            wake=self._client.abort if self._client else lambda: None, inline=inline,
        )  # fmt: skip

    def newest(self) -> Reading[Page]:
        """The newest page; raises `PageError`, with ``stale`` for one whose values stand still."""
        reading = self._feed.newest()
        standing_s = (self._context.clock.monotonic_ns() - reading.changed_ns) / NS_PER_S
        if standing_s > self._settings.stale_s:
            raise PageError("stale", f"{self._name}: no value of the page has changed for {standing_s:.0f} s")
        return reading

    def turn(self) -> float:
        """Fetch once now."""
        return self._feed.turn()

    def close(self) -> None:
        """End."""
        self._feed.close()

    def _ask(self) -> tuple[Page, object]:
        body = self._fetch()
        if self._page is None or body != self._body:
            self._page, self._body = self._read(body), body
        return self._page, self._page.points

    def _read(self, body: bytes) -> Page:
        page = self._reader.read(body)
        if page.truncated:
            raise PageError("truncated", f"{self._name}: the page ends in the middle of a line")
        if not page.points:
            raise PageError(
                "no_metrics", f"{self._name}: the page has none of the metrics that are read here; {page.first_fault}"
            )
        if page.fault_count:
            self._context.metrics.count("tw_source_gaps_total", page.fault_count, source=self._name, reason="bad_line")
            logger.warning("%s: %d lines of the page left out, %s", self._name, page.fault_count, page.first_fault)
        return page


def path_reader(context: Context, url: str, key: str, max_bytes: int = MAX_PAGE_BYTES) -> Callable[[], bytes]:
    """Reads a ``file:/path`` under the configured root; such files are renamed into place, so each time they are opened anew.

    Raises
    ------
    ConfigError
        The path is not absolute.
    """
    path = url.removeprefix(FILE).removeprefix("//")
    if not path.startswith("/"):
        raise ConfigError(f"{key}: {url!r} needs an absolute path, such as file:/run/metrics/page.prom")
    return lambda: read_file(context.files.path(path), max_bytes)


def read_file(path: str, max_bytes: int) -> bytes:
    """A regular file's content; raises `PageError`."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            content = file.read(max_bytes + 1) or b""
    except FileNotFoundError:
        raise PageError("missing", f"{path} does not exist") from None
    except OSError as error:
        reason = "permission" if isinstance(error, PermissionError) else "unreadable"
        raise PageError(reason, f"{path} cannot be read ({error.strerror})") from None
    if len(content) > max_bytes:
        raise PageError("too_large", f"{path} has more than {max_bytes} bytes")
    return content


def _without_waiting(path: str, flags: int) -> int:
    """A pipe in the place of a file must not be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
