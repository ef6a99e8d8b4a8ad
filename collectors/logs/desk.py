"""The desk where lines of all log sources end: known ones and failures become events, folded, limited and without secrets.

Of a hundred thousand lines hardly one is known: a block of lines is searched as a whole for the few literals that a known line must
contain, and only lines around such a place are looked at one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from collectors import patterns
from collectors.base import Context
from collectors.logs.folding import Folder
from collectors.logs.prefix import Said, unprefixed
from collectors.logs.secrets import redact
from collectors.logs.traceback import HEADS, Failure, FailureReader
from collectors.tail import text_of
from trainwarden.records import LogEvent

logger = logging.getLogger(__name__)

LINE_CHARS = 500
MAX_RANK_DIGITS = 8
URGENT = "critical"
FAILURE_CODES = {"python": "traceback", "cpp": "native_abort", "interpreter": "native_abort"}

Unwrap = Callable[[bytes], tuple[str, bytes] | None]
"""From a line as it stands in a file to its stream and text; None for a line that is not complete yet."""


@dataclass
class Channel:
    """Where lines come from, and what is open there.

    Attributes
    ----------
    labels
        Attributes of each event (namespace, pod, container).
    unwrap
        Takes off what a container runtime puts in front; None for plain lines.
    holds
        Whether a block must be taken line by line, because pieces of lines in it belong together.
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    unwrap: Unwrap | None = None
    holds: Callable[[bytes], bool] | None = None
    pairs: dict[str, patterns.PairMemory] = field(default_factory=dict)
    failures: FailureReader = field(default_factory=FailureReader)

    @property
    def is_open(self) -> bool:
        """Whether the next line may belong to one before it."""
        return self.failures.is_open or any(memory.is_open for memory in self.pairs.values())


class Desk:
    """Turns lines into events. Not thread-safe: each source has its own.

    Parameters
    ----------
    origin
        Name of the source, for dead letters.
    """

    def __init__(self, context: Context, table: patterns.PatternTable, folder: Folder, origin: str) -> None:
        self._context = context
        self._table = table
        self._folder = folder
        self._origin = origin
        self._gate = table.gate(HEADS)
        self.spoke = False

    def block(self, channel: Channel, block: bytes) -> None:
        """Take in complete lines, each with its newline."""
        each = channel.holds is not None and channel.holds(block)
        at, size = 0, len(block)
        while at < size:
            if not (each or channel.is_open):
                found = self._gate.search(block, at)
                if found is None:
                    return
                at = block.rfind(b"\n", at, found.start() + 1) + 1 or at
            end = block.find(b"\n", at)
            end = size if end < 0 else end
            self.raw(channel, block[at:end])
            at = end + 1

    def raw(self, channel: Channel, raw: bytes) -> None:
        """One line. One that nobody thought of must not take the rest of the look along: the file is not read again."""
        try:
            unwrapped = channel.unwrap(raw) if channel.unwrap is not None else ("", raw)
            if unwrapped is not None:
                self.line(channel, text_of(unwrapped[1]), unwrapped[0])
        except Exception as error:
            logger.exception("a line of log file %s could not be taken in", channel.name)
            reason = f"a pattern failed on it: {type(error).__name__}: {error}"
            payload = redact(text_of(raw).strip()[: 2 * LINE_CHARS])[:LINE_CHARS].encode()
            self._context.outlet.dead(f"{self._origin}:{channel.name}", reason, payload)

    def line(self, channel: Channel, line: str, stream: str = "", extra: dict[str, str] | None = None) -> None:
        """One line of text."""
        said = unprefixed(line)
        speaker = f"{stream}\x1f{said.key}"
        over, current = channel.failures.feed(speaker, said.text, self._context.clock.monotonic_ns())
        if over is not None:
            self._failure(channel, over)
        hit = self._pair(channel, speaker, line) or self._table.match(line)
        if current is not None:
            if hit is not None and hit.severity == URGENT and not current.told:
                current.told = True
                self._publish(channel, current.text(), hit, said, extra)
            return
        if hit is not None:
            self._publish(channel, said.text.strip(), hit, said, extra)

    def settle(self, channels: list[Channel], last: bool = False) -> None:
        """Publish what is over: repeats, and failures that nobody goes on telling; at the end (`last`) all of them."""
        now_ns = self._context.clock.monotonic_ns()
        for channel in channels:
            if channel.failures.is_open:
                for failure in channel.failures.rest() if last else channel.failures.overdue(now_ns):
                    self._failure(channel, failure)
        for event in self._folder.settle(now_ns):
            self._context.outlet.log(event, urgent=False)

    def _pair(self, channel: Channel, speaker: str, line: str) -> patterns.Hit | None:
        if not self._table.pairs:
            return None
        memory = channel.pairs.get(speaker)
        if memory is None:
            if not self._table.opens_pair(line):
                return None
            memory = channel.pairs[speaker] = patterns.PairMemory(self._table)
        hit = memory.feed(line)
        if not memory.is_open:
            del channel.pairs[speaker]
        return hit

    def _failure(self, channel: Channel, failure: Failure) -> None:
        if failure.told:
            return
        said = unprefixed(failure.prefix)
        known = self._table.match(failure.last) if failure.last else None
        code = FAILURE_CODES[failure.kind]
        said_of = {"exception": failure.exception, "message": failure.message[:200], "frame": failure.frame[-200:]}
        attributes = {**(known.attributes if known else {}), **said_of, "lines": str(failure.lines)}
        key = known.fold_key if known else "\x1f".join((code, failure.exception, failure.frame))
        hit = patterns.Hit(known.name if known else code, known.code if known else code,
                           known.severity if known else "warning", {k: v for k, v in attributes.items() if v}, key)  # fmt: skip
        self._publish(channel, failure.text(), hit, said, None)

    def _publish(
        self, channel: Channel, text: str, hit: patterns.Hit, said: Said, extra: dict[str, str] | None
    ) -> None:
        if hit.code.startswith("xid:") and self._told(hit):
            return
        key, now_ns = f"{channel.name}\x1f{hit.fold_key}", self._context.clock.monotonic_ns()
        self.spoke = True
        if not self._folder.holds(key, channel.name, hit.code, now_ns):
            event = self._folder.admit(key, self._event(channel, text, hit, said, extra or {}), now_ns)
            self._context.outlet.log(event, urgent=hit.severity == URGENT)

    def _told(self, hit: patterns.Hit) -> bool:
        """Whether the GPU source told this Xid a moment ago, by the driver's word."""
        pci, now_ns = hit.attributes.get("pci", ""), self._context.clock.monotonic_ns()
        return bool(pci) and not self._context.facts.xids.by_kernel(pci, hit.code, now_ns)

    def _event(self, channel: Channel, text: str, hit: patterns.Hit, said: Said, extra: dict[str, str]) -> LogEvent:
        layouts = self._context.ranks.layouts()
        job = next(iter(layouts)) if len(layouts) == 1 else ""
        attributes = {**channel.labels, **dict(said.attributes), **extra, **hit.attributes}
        return LogEvent(
            source=channel.name, severity=hit.severity, code=hit.code, template_id=hit.name, job=job,
            line=redact(text[: 2 * LINE_CHARS])[:LINE_CHARS],
            attributes={name: redact(value) for name, value in attributes.items()},
            attempt=layouts[job][0].generation if job else 0, rank=self._rank(job, hit, said),
        )  # fmt: skip

    def _rank(self, job: str, hit: patterns.Hit, said: Said) -> int:
        named = hit.attributes.get("rank", "")
        if named.isdecimal() and len(named) <= MAX_RANK_DIGITS:
            return int(named)
        if said.rank >= 0 or said.local_rank < 0 or not job:
            return said.rank
        here = self._context.ranks.layouts()[job]
        return next((state.rank for state in here if state.local_rank == said.local_rank), -1)


def refused(context: Context) -> Callable[[str], None]:
    """Counts a line over the rate."""
    return lambda file: context.metrics.count("tw_log_lines_dropped_total", file=file)
