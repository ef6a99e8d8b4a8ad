"""Sampling with a deadline: one thread asks the sources in turn; where one hangs, others take over, and the tick goes out without it.

A thread for each source would be woken for each source: on a node that trains, every waking is paid in cold caches. So one hand does
all the work as long as nobody hangs, and a source that does costs itself and a moment's patience.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from collectors.base import Sample, Source, SourceError
from trainwarden.records import Gap
from trainwarden.selfmetrics import Metrics

logger = logging.getLogger(__name__)

SKIP_MAX_TICKS = 60
PATIENCE_SHARE = 0.2
TIMES_PER_OBSERVATION = 10


class Standing:
    """How a source has answered lately.

    A source that misses the deadline is not asked again until it has come back; then it rests for 1, 2, 4, ... up to 60 ticks, until it is
    in time again. Its late answer is thrown away.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.busy = False
        self._skip = 0
        self._penalty = 0
        self._rests = 0
        self._last = Sample()
        self._took_ms = 0.0
        self._times = 0

    def refuses(self) -> str | None:
        """A reason code when the source is not to be asked in this tick."""
        if self.busy:
            return "hung"
        if self._skip > 0:
            self._skip -= 1
            return "backoff"
        return None

    def missed(self) -> None:
        """The deadline passed without an answer."""
        self._penalty = min(max(1, self._penalty * 2), SKIP_MAX_TICKS)
        self._skip = self._penalty

    def answered(self, sample: Sample) -> None:
        """The answer came in time; it stands for `every_ticks` of its source."""
        self._penalty = 0
        self._last, self._rests = sample, self.source.every_ticks - 1

    def standing(self) -> Sample | None:
        """The last answer of a source that is not due yet."""
        if self._rests <= 0:
            return None
        self._rests -= 1
        return self._last

    def timed(self, now_ns: int, metrics: Metrics) -> Sample:
        """One sample. How long it took is told once for several: a word in the metrics costs as much as a cheap source."""
        started = time.perf_counter()
        sample = take(self.source, now_ns)
        self._took_ms += (time.perf_counter() - started) * 1000
        self._times += 1
        if self._times >= TIMES_PER_OBSERVATION:
            metrics.observe_ms("tw_source_ms", self._took_ms, self._times, source=self.source.name)
            self._took_ms, self._times = 0.0, 0
        return sample


class Turn:
    """The sources of one tick: those still to be asked, and the answers. The asker is woken once, by the last answer."""

    def __init__(self, now_ns: int, asked: Sequence[Standing]) -> None:
        self.now_ns = now_ns
        self._waiting = deque(asked)
        self._expected = len(asked)
        self._changed = threading.Condition()
        self._samples: dict[Standing, Sample] = {}
        self.not_begun: frozenset[Standing] = frozenset()

    def take(self) -> Standing | None:
        """The next source to ask; ``None`` when all are taken."""
        with self._changed:
            if not self._waiting:
                return None
            standing = self._waiting.popleft()
            standing.busy = True
            return standing

    def answer(self, standing: Standing, sample: Sample) -> None:
        """Take an answer in."""
        standing.busy = False
        with self._changed:
            self._samples[standing] = sample
            if len(self._samples) == self._expected:
                self._changed.notify()

    def wait(self, timeout_s: float, take_over: Callable[[int], None]) -> dict[Standing, Sample]:
        """The answers that came in time.

        Parameters
        ----------
        take_over
            Called with the number of sources that nobody has begun to ask, when the answers take long.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while len(self._samples) < self._expected and (left_s := end_s - time.monotonic()) > 0:
                in_time = self._changed.wait(min(left_s, timeout_s * PATIENCE_SHARE))
                if not in_time and self._waiting:
                    take_over(len(self._waiting))
            # whoever comes back later is not to begin what nobody waits for
            self.not_begun = frozenset(self._waiting)
            self._waiting.clear()
            return dict(self._samples)


class Hand:
    """A daemon thread that asks the sources of a turn one after the other; one that never comes back dies with the agent."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._turns: SimpleQueue[Turn | None] = SimpleQueue()
        self.busy = False
        threading.Thread(target=self._serve, name="tw-sources", daemon=True).start()

    def give(self, turn: Turn) -> None:
        """Begin a turn."""
        self.busy = True
        self._turns.put(turn)

    def dismiss(self) -> None:
        """End after what is at hand."""
        self._turns.put(None)

    def _serve(self) -> None:
        while (turn := self._turns.get()) is not None:
            while (standing := turn.take()) is not None:
                turn.answer(standing, standing.timed(turn.now_ns, self._metrics))
            self.busy = False


class Round:
    """All sources, asked once per tick."""

    def __init__(self, sources: Sequence[Source], metrics: Metrics, deadline_s: float) -> None:
        self._standings = [Standing(source) for source in sources if not source.inline]
        self._inline = [Standing(source) for source in sources if source.inline]
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._hand: Hand | None = None

    def collect(self, now_ns: int) -> list[Sample]:
        """One sample per source; a gap with its reason for each that is late or not asked."""
        settled = {standing: standing.standing() for standing in self._standings}
        reasons = {standing: standing.refuses() for standing, sample in settled.items() if sample is None}
        asked = [standing for standing, reason in reasons.items() if reason is None]
        turn = Turn(now_ns, asked)
        # first what takes no time: two threads that run at once would wait for each other's interpreter lock
        samples = [self._here(standing, now_ns) for standing in self._inline]
        self._free_hand().give(turn)
        answers = turn.wait(self._deadline_s, lambda count: self._take_over(turn, count))
        samples += [sample for sample in settled.values() if sample is not None]
        samples += [self._outcome(turn, standing, reason, answers) for standing, reason in reasons.items()]
        for gap in (gap for sample in samples for gap in sample.gaps):
            self._metrics.count("tw_source_gaps_total", source=gap.source, reason=gap.reason)
        return samples

    def _here(self, standing: Standing, now_ns: int) -> Sample:
        """A source that only looks at memory, asked in this thread."""
        sample = standing.standing()
        if sample is None:
            sample = standing.timed(now_ns, self._metrics)
            standing.answered(sample)
        return sample

    def close(self) -> None:
        """Let the thread end; one that hangs is left alone."""
        hand, self._hand = self._hand, None
        if hand is not None:
            hand.dismiss()

    def _free_hand(self) -> Hand:
        if self._hand is not None and self._hand.busy:
            self.close()
        if self._hand is None:
            self._hand = Hand(self._metrics)
        return self._hand

    def _take_over(self, turn: Turn, count: int) -> None:
        """One more hand for each source that waits behind the one that hangs: some of them may hang as well."""
        for _ in range(count):
            extra = Hand(self._metrics)
            extra.give(turn)
            extra.dismiss()

    def _outcome(self, turn: Turn, standing: Standing, refusal: str | None, answers: dict[Standing, Sample]) -> Sample:
        if refusal is not None:
            return _gap(standing.source, refusal)
        if standing in answers:
            standing.answered(answers[standing])
            return answers[standing]
        if standing not in turn.not_begun:
            standing.missed()
        return _gap(standing.source, "deadline")


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
