"""Sampling with a deadline: each source runs in a thread of its own, and the tick goes out without whoever is late."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Sequence

from collectors.base import Sample, Source, SourceError
from trainwarden.records import Gap
from trainwarden.selfmetrics import Metrics

logger = logging.getLogger(__name__)

SKIP_MAX_TICKS = 60


class Runner:
    """One source and its thread.

    A source that misses the deadline is not asked again until it has come back; then it rests for 1, 2, 4, ... up to 60 ticks, until it is
    in time again. Its late answer is thrown away. The thread of a source that never comes back is a daemon and dies with the agent.
    """

    def __init__(self, source: Source, metrics: Metrics) -> None:
        self.source = source
        self._metrics = metrics
        self._requests: queue.SimpleQueue[tuple[int, int, queue.SimpleQueue[tuple[Runner, int, Sample]]]] = queue.SimpleQueue()
        self._busy = False
        self._skip = 0
        self._penalty = 0
        self._thread = threading.Thread(target=self._serve, name=f"tw-{source.name}", daemon=True)
        self._thread.start()

    def ask(self, ticket: int, now_ns: int, answers: queue.SimpleQueue[tuple[Runner, int, Sample]]) -> str | None:
        """Request a sample; a reason code when the source is not asked this time."""
        if self._busy:
            return "hung"
        if self._skip > 0:
            self._skip -= 1
            return "backoff"
        self._busy = True
        self._requests.put((ticket, now_ns, answers))
        return None

    def missed(self) -> None:
        """The deadline passed without an answer."""
        self._penalty = min(max(1, self._penalty * 2), SKIP_MAX_TICKS)
        self._skip = self._penalty

    def answered(self) -> None:
        """The answer came in time."""
        self._penalty = 0

    def _serve(self) -> None:
        while True:
            ticket, now_ns, answers = self._requests.get()
            started = time.perf_counter()
            sample = take(self.source, now_ns)
            self._metrics.observe_ms("tw_source_ms", (time.perf_counter() - started) * 1000, source=self.source.name)
            self._busy = False
            answers.put((self, ticket, sample))


class Round:
    """All sources, asked once per tick."""

    def __init__(self, sources: Sequence[Source], metrics: Metrics, deadline_s: float) -> None:
        self._runners = [Runner(source, metrics) for source in sources]
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._ticket = 0
        self._answers: queue.SimpleQueue[tuple[Runner, int, Sample]] = queue.SimpleQueue()

    def collect(self, now_ns: int) -> list[Sample]:
        """Samples of those who answered in time, in the order of the sources; a gap for each of the others."""
        self._ticket += 1
        samples: dict[Runner, Sample] = {}
        waiting: set[Runner] = set()
        for runner in self._runners:
            reason = runner.ask(self._ticket, now_ns, self._answers)
            if reason is None:
                waiting.add(runner)
            else:
                samples[runner] = _gap(runner.source, reason)
        self._gather(waiting, samples)
        for runner in waiting:
            runner.missed()
            samples[runner] = _gap(runner.source, "deadline")
        ordered = [samples[runner] for runner in self._runners]
        for gap in (gap for sample in ordered for gap in sample.gaps):
            self._metrics.count("tw_source_gaps_total", source=gap.source, reason=gap.reason)
        return ordered

    def _gather(self, waiting: set[Runner], samples: dict[Runner, Sample]) -> None:
        deadline = time.monotonic() + self._deadline_s
        while waiting:
            try:
                runner, ticket, sample = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if ticket == self._ticket and runner in waiting:
                waiting.remove(runner)
                runner.answered()
                samples[runner] = sample


def take(source: Source, now_ns: int) -> Sample:
    """One sample; whatever goes wrong becomes a gap with a reason code."""
    try:
        return source.sample(now_ns)
    except SourceError as error:
        return _gap(source, error.reason)
    except OSError as error:
        return _gap(source, _os_reason(error))
    except Exception:
        logger.exception("source %s failed", source.name)
        return _gap(source, "error")


def _gap(source: Source, reason: str) -> Sample:
    return Sample(gaps=(Gap(source.name, reason),))


def _os_reason(error: OSError) -> str:
    known = {errno.EACCES: "permission", errno.EPERM: "permission", errno.ENOENT: "missing"}
    return known.get(error.errno or 0) or errno.errorcode.get(error.errno or 0, "os_error").lower()
