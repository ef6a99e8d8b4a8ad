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


class Tally:
    """Answers of one tick. The asker is woken once, by the last answer, not by each."""

    def __init__(self, expected: int) -> None:
        self._lock = threading.Lock()
        self._expected = expected
        self._all_in = threading.Event()
        self._samples: dict[Runner, Sample] = {}

    def answer(self, runner: Runner, sample: Sample) -> None:
        """Take an answer in."""
        with self._lock:
            self._samples[runner] = sample
            complete = len(self._samples) == self._expected
        if complete:
            self._all_in.set()

    def wait(self, timeout_s: float) -> dict[Runner, Sample]:
        """What came in time."""
        if self._expected:
            self._all_in.wait(timeout_s)
        with self._lock:
            return dict(self._samples)


class Runner:
    """One source and its thread.

    A source that misses the deadline is not asked again until it has come back; then it rests for 1, 2, 4, ... up to 60 ticks, until it is
    in time again. Its late answer is thrown away. The thread of a source that never comes back is a daemon and dies with the agent.
    """

    def __init__(self, source: Source, metrics: Metrics) -> None:
        self.source = source
        self._metrics = metrics
        self._requests: queue.SimpleQueue[tuple[int, Tally]] = queue.SimpleQueue()
        self._busy = False
        self._skip = 0
        self._penalty = 0
        self._thread = threading.Thread(target=self._serve, name=f"tw-{source.name}", daemon=True)
        self._thread.start()

    def refuses(self) -> str | None:
        """A reason code when the source is not to be asked in this tick."""
        if self._busy:
            return "hung"
        if self._skip > 0:
            self._skip -= 1
            return "backoff"
        return None

    def ask(self, now_ns: int, tally: Tally) -> None:
        """Request a sample."""
        self._busy = True
        self._requests.put((now_ns, tally))

    def missed(self) -> None:
        """The deadline passed without an answer."""
        self._penalty = min(max(1, self._penalty * 2), SKIP_MAX_TICKS)
        self._skip = self._penalty

    def answered(self) -> None:
        """The answer came in time."""
        self._penalty = 0

    def _serve(self) -> None:
        while True:
            now_ns, tally = self._requests.get()
            sample = timed(self.source, now_ns, self._metrics)
            self._busy = False
            tally.answer(self, sample)


class Round:
    """All sources, asked once per tick."""

    def __init__(self, sources: Sequence[Source], metrics: Metrics, deadline_s: float) -> None:
        self._runners = [Runner(source, metrics) for source in sources if not source.inline]
        self._inline = [source for source in sources if source.inline]
        self._metrics = metrics
        self._deadline_s = deadline_s

    def collect(self, now_ns: int) -> list[Sample]:
        """One sample per source; a gap with its reason for each that is late or not asked."""
        reasons = {runner: runner.refuses() for runner in self._runners}
        asked = [runner for runner, reason in reasons.items() if reason is None]
        tally = Tally(len(asked))
        for runner in asked:
            runner.ask(now_ns, tally)
        samples = [timed(source, now_ns, self._metrics) for source in self._inline]
        answers = tally.wait(self._deadline_s)
        samples += [self._outcome(runner, reason, answers) for runner, reason in reasons.items()]
        for gap in (gap for sample in samples for gap in sample.gaps):
            self._metrics.count("tw_source_gaps_total", source=gap.source, reason=gap.reason)
        return samples

    def _outcome(self, runner: Runner, refusal: str | None, answers: dict[Runner, Sample]) -> Sample:
        if refusal is not None:
            return _gap(runner.source, refusal)
        if runner not in answers:
            runner.missed()
            return _gap(runner.source, "deadline")
        runner.answered()
        return answers[runner]


def timed(source: Source, now_ns: int, metrics: Metrics) -> Sample:
    """One sample, its duration observed."""
    started = time.perf_counter()
    sample = take(source, now_ns)
    metrics.observe_ms("tw_source_ms", (time.perf_counter() - started) * 1000, source=source.name)
    return sample


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
