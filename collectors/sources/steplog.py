"""Steps of jobs without our hook, read from what the training framework prints."""

from __future__ import annotations

import glob
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from collectors.base import Context, Sample, Source, Worker
from collectors.logs.cri import Joiner
from collectors.logs.positions import Positions
from collectors.logs.prefix import unprefixed
from collectors.logs.steplines import GATE, parse
from collectors.logs.stepreader import Row, StepReader
from collectors.tail import Tail, text_of
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Gap, LogEvent, StepRow
from trainwarden.settings import option

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
SAVE_EVERY_NS = 5 * NS_PER_S
FIND_EVERY_NS = 10 * NS_PER_S
MOST_FILES = 64
MOST_RANKS = 1024
TELL_SKIPPED_NS = 60 * NS_PER_S


class Progress(msgspec.Struct):
    """How far the steps of one speaker were read."""

    attempt: int
    step: int


@dataclass
class Followed:
    """One file of a job."""

    job: str
    tail: Tail
    joiner: Joiner = field(default_factory=Joiner)


class StepLogSource(Source):
    """Reads the logs of jobs, in a thread of its own, and reports their steps as the hook would; silent for jobs that the hook reports.

    Notes
    -----
    Known: Megatron-LM, Megatron-DeepSpeed, DeepSpeed, NeMo, Lightning, Hugging Face Trainer, torchtitan, MLPerf, DLRover. A line that
    covers several steps gives one row, of the last of them, with the average time. Whoever prints is the rank in the launcher's prefix;
    without one it is `rank`. Start of a step is the time of reading minus its duration, where the line has no unix time of its own.
    """

    name: ClassVar[str] = "steplog"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.steplog]``."""

        files: dict[str, str] = option({}, "job = path of its log; with wildcards for a log per rank or attempt")
        rank: int = option(0, "who prints, where the lines do not say; Megatron-LM prints on the last rank")
        world: int = option(0, "number of ranks, 0 = unknown")
        from_start: bool = option(False, "read files that are already there at the first start from their beginning")
        poll_ms: int = option(1000, "cadence of looking")
        budget_ms: int = option(50, "time for one look")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._positions = Positions(context.state_directory / "steplog_positions.json")
        self._store = context.state_directory / "steplog_progress.json"
        self._progress = _load(self._store)
        self._followed: dict[str, Followed] = {}
        self._readers: dict[tuple[str, int], StepReader] = {}
        self._skipped: dict[tuple[str, int, int], int] = {}
        self._skipped_ns = 0
        self._found_ns = -FIND_EVERY_NS
        self._first = True
        self._saved_ns = 0
        self._spoke = False
        self._reasons: dict[str, str] = {}
        self._worker = Worker("tw-steplog", self._turn, self._failed)

    def start(self) -> None:
        """Begin to watch, if there is a log to watch."""
        if self.settings.files:
            self._worker.start()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        return Sample(gaps=tuple(Gap(self.name, reason) for reason in sorted(set(self._reasons.values()))))

    def close(self) -> None:
        if not self.settings.files:
            return
        self._worker.close()
        self._settle(last=True)
        self._save()
        for followed in self._followed.values():
            followed.tail.close()

    def poll(self) -> None:
        """Look at every log once."""
        clock = self.context.clock
        now_ns = clock.monotonic_ns()
        if now_ns - self._found_ns >= FIND_EVERY_NS:
            self._found_ns = now_ns
            self._find()
        waiting = dict(self._followed)
        while waiting:
            waiting = {name: followed for name, followed in waiting.items() if self._read(name, followed)}
            if clock.monotonic_ns() - now_ns >= self.settings.budget_ms * NS_PER_MS:
                break
        self._settle()
        if self._spoke or now_ns - self._saved_ns >= SAVE_EVERY_NS:
            self._spoke, self._saved_ns = False, now_ns
            self._save()

    def line(self, job: str, text: str) -> None:
        """Take in one line of a job."""
        said = unprefixed(text)
        told = parse(said.text)
        if told is None:
            return
        reader = self._reader(job, said.rank if said.rank >= 0 else self._rank(job, said.local_rank))
        if reader is not None:
            for row in reader[1].feed(told, self.context.clock.monotonic_ns()):
                self._report(job, reader[0], row)

    # --- rows -------------------------------------------------------------------------------------------------------------

    def _report(self, job: str, rank: int, row: Row) -> None:
        self._spoke = True
        if job in self.context.ranks.layouts():
            return  # the hook knows better
        line = row.line
        lasted_ns = int(line.duration_ms * NS_PER_MS) if line.duration_ms > 0 else 0
        ended_ns = line.wall_ns or self.context.clock.now_ns()
        step = StepRow(
            step=line.step, phase="first" if row.first else "train", started_at_ns=ended_ns - lasted_ns,
            duration_ms=line.duration_ms, loss=line.loss, grad_norm=line.grad_norm, finite=line.finite,
        )  # fmt: skip
        self.context.outlet.step(job, row.attempt, rank, self.settings.world, step)
        if row.skipped:
            key = (job, row.attempt, rank)
            self._skipped[key] = self._skipped.get(key, 0) + row.skipped

    def _settle(self, last: bool = False) -> None:
        now_ns = self.context.clock.monotonic_ns()
        for (job, rank), reader in self._readers.items():
            for row in reader.settle(now_ns, last):
                self._report(job, rank, row)
        if self._skipped and (last or now_ns - self._skipped_ns >= TELL_SKIPPED_NS):
            self._skipped_ns = now_ns
            for (job, attempt, rank), count in self._skipped.items():
                event = LogEvent(source=self.name, severity="info", code="skipped_steps", line=f"{count} steps were skipped",
                                 attributes={"count": str(count)}, job=job, attempt=attempt, rank=rank)  # fmt: skip
                self.context.outlet.log(event, urgent=False)
            self._skipped.clear()

    def _reader(self, job: str, rank: int) -> tuple[int, StepReader] | None:
        key = (job, rank)
        if key not in self._readers:
            if len(self._readers) >= MOST_RANKS:
                self._reasons["ranks"] = "over_limit"
                return None
            saved = self._progress.get(f"{job}|{rank}")
            self._readers[key] = StepReader(saved.attempt, saved.step) if saved else StepReader()
        return rank, self._readers[key]

    def _rank(self, job: str, local_rank: int) -> int:
        here = self.context.ranks.layouts().get(job, []) if local_rank >= 0 else []
        return next(
            (state.rank for state in here if state.local_rank == local_rank), self.settings.rank + max(0, local_rank)
        )

    # --- files ------------------------------------------------------------------------------------------------------------

    def _find(self) -> None:
        first, self._first = self._first, False
        for job, pattern in self.settings.files.items():
            paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
            for name in paths[-MOST_FILES:]:
                if name not in self._followed:
                    from_start = self.settings.from_start or not first  # a log that is new is read from its beginning
                    tail = Tail(Path(name), self._positions.of(name), from_start, carriage=True)
                    self._followed[name] = Followed(job, tail)
            self._reasons.pop(f"many:{job}", None)
            if len(paths) > MOST_FILES:
                self._reasons[f"many:{job}"] = "over_limit"

    def _read(self, name: str, followed: Followed) -> bool:
        try:
            block = followed.tail.block(CHUNK_BYTES)
        except OSError as error:
            self._reasons[name] = "permission" if isinstance(error, PermissionError) else "unreadable"
            return False
        self._reasons.pop(name, None)
        at = 0
        holds = followed.joiner.holds(block)
        while at < len(block):
            if not holds:
                found = GATE.search(block, at)
                if found is None:
                    break
                at = block.rfind(b"\n", at, found.start() + 1) + 1 or at
            end = block.find(b"\n", at)
            self._raw(followed, block[at:end])
            at = end + 1
        return len(block) > CHUNK_BYTES // 2

    def _raw(self, followed: Followed, raw: bytes) -> None:
        unwrapped = followed.joiner(raw)
        if unwrapped is not None:
            self.line(followed.job, text_of(unwrapped[1]))

    def _save(self) -> None:
        problem = self._positions.save({name: followed.tail.position() for name, followed in self._followed.items()})
        progress = {f"{job}|{rank}": Progress(r.attempt, r.step) for (job, rank), r in self._readers.items()}
        scratch = self._store.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode({**self._progress, **progress}))
            os.replace(scratch, self._store)
        except OSError as error:
            problem = "positions_unsaved"
            logger.warning("progress of steps %s not stored: %s", self._store, error.strerror)
        self._reasons.pop("positions", None)
        if problem:
            self._reasons["positions"] = problem

    def _turn(self) -> None:
        self.poll()
        self._worker.wait(self.settings.poll_ms / 1000)

    def _failed(self, error: Exception) -> None:
        logger.exception("watching step logs: %s", error)
        self._reasons["thread"] = "error"


def _load(path: Path) -> dict[str, Progress]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Progress])
    except (OSError, msgspec.DecodeError):
        return {}
