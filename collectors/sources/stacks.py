"""Stacks on demand, when a hang is suspected: where each rank's process is, what NCCL recorded, and who is not there. One event."""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source
from collectors.logs import flight, ras
from collectors.logs.secrets import redact
from collectors.logs.threads import Alike, Place, ThreadError, alike, from_kernel, from_py_spy, with_kernel_state
from collectors.logs.unpickle import PickleError
from collectors.ranks import RankState
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

MAX_DUMPS = 64
MAX_DUMP_BYTES = 32 * 1024 * 1024
MAX_PIECE_CHARS = 2000
MAX_LINE_CHARS = 500
FRAMES_SAID = 8
MAX_REASON_CHARS = 200
STOPPED = {"T": "are stopped (a signal, a debugger or a frozen group)", "t": "are held by a debugger", "Z": "have died"}
WAITING_FILES = re.compile(r"\((threading|selectors|queue|socket|subprocess|connection|popen_fork)\.py:")
"""Frames of the library in which a thread waits: what it waits for stands behind them."""
OF_A_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)


def where(group: Alike) -> str:
    """The innermost frame that tells something; the state where there are no frames."""
    telling = (frame for frame in group.frames if not WAITING_FILES.search(frame))
    return next(telling, group.frames[0] if group.frames else f"state {group.state}")


def together(problems: list[str]) -> list[str]:
    """The same problem of several ranks as one."""
    ranks: dict[str, list[int]] = {}
    others = []
    for problem in problems:
        found = OF_A_RANK.fullmatch(problem)
        if found is None:
            others.append(problem)
        else:
            ranks.setdefault(found[2], []).append(int(found[1]))
    return [*others, *(f"rank{'s' * (len(of) > 1)} {flight.ranks_text(of)}: {text}" for text, of in ranks.items())]


@dataclass
class Findings:
    """What was collected for one request; `problems` says what could not be."""

    stalls: list[flight.Stall] = field(default_factory=list)
    dumps: int = 0
    status: ras.Status | None = None
    groups: list[Alike] = field(default_factory=list)
    ranks: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """What is most telling of it."""
        stopped = [group for group in self.groups if group.state in STOPPED]
        if stopped and len(stopped) < len(self.groups):
            first = stopped[0]
            return f"ranks {flight.ranks_text(first.ranks)} {STOPPED[first.state]}, at {where(first)}; the others run or wait"
        if self.stalls:
            return self.stalls[0].text()
        if self.status is not None and self.status.text():
            return self.status.text()
        inside = [rank for group in self.groups if group.collective for rank in group.ranks]
        outside = [rank for group in self.groups if not group.collective for rank in group.ranks]
        if inside and outside:
            at = where(next(group for group in self.groups if not group.collective))
            return f"ranks {flight.ranks_text(inside)} wait in a collective, ranks {flight.ranks_text(outside)} do not: at {at}"
        if self.groups:
            return f"ranks {flight.ranks_text(self.groups[0].ranks)} are at {where(self.groups[0])}"
        return "nothing could be read: " + ("; ".join(together(self.problems)[:3]) or "no ranks are known on this node")

    def attributes(self) -> dict[str, str]:
        """Everything, each piece bounded."""
        stack_texts = [
            f"ranks {flight.ranks_text(g.ranks)} [{g.state}]: " + " < ".join(g.frames[:FRAMES_SAID])
            for g in self.groups
        ]
        missing = sorted({r for stall in self.stalls for r in (*stall.missing, *(rank for rank, _ in stall.others))})
        waiting = sorted({r for stall in self.stalls for r in stall.waiting})
        pieces = {
            "collectives": "; ".join(stall.text() for stall in self.stalls[:8]),
            "frame": self.stalls[0].frame if self.stalls else "", "waiting_ranks": flight.ranks_text(waiting),
            "missing_ranks": flight.ranks_text(missing), "flight_records": str(self.dumps) if self.dumps else "",
            "ras": self.status.text() if self.status else "", "stacks": "\n".join(stack_texts),
            "ranks": flight.ranks_text(self.ranks), "problems": "; ".join(together(self.problems)),
        }  # fmt: skip
        return {name: redact(text[:MAX_PIECE_CHARS])[:MAX_PIECE_CHARS] for name, text in pieces.items() if text}


class StacksSource(Source):
    """Waits for a request, a file or a call of `request`, and answers it in a thread of its own, one at a time.

    Notes
    -----
    Cheapest first: flight records and RAS need nobody's leave and stop nothing; the kernel's word on each thread is next; py-spy, where
    it is installed, looks without stopping the process. Nothing is ever attached without a request, and requests closer together than
    `spacing_s` are answered by the one before. Dumps come from user jobs and are read as plain data only.
    """

    name: ClassVar[str] = "stacks"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.stacks]``."""

        request_file: str = option(
            "", "a file whose appearance asks for stacks, its text is the reason; empty = stacks.request in run_dir"
        )
        spacing_s: float = option(60.0, "no two collections closer together")
        flight_prefix: str = option(
            "/tmp/nccl_trace_rank_", "beginning of the names of flight records, as TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        )
        flight_age_s: float = option(3600.0, "older records belong to another hang")
        ras_address: str = option("127.0.0.1:28028", "where NCCL's RAS service listens; empty = do not ask")
        py_spy: str = option("py-spy", "program that reads stacks of Python; empty = only the kernel's word")
        deadline_s: float = option(5.0, "for RAS, and for each process looked at")
        total_s: float = option(20.0, "for everything")

    def __init__(self, context: Context, settings: Any, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(context, settings)
        self._clock_s = clock_s
        self._file = settings.request_file or str(context.run_directory / f"stacks.{context.node}.request")
        self._thread: threading.Thread | None = None
        self._last_ns = -int(settings.spacing_s * NS_PER_S)
        self._problem = ""

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if os.path.exists(self._file):
            self._from_file()
        return Sample(gaps=(Gap(self.name, self._problem),) if self._problem else ())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(1.0)

    def request(self, reason: str, ranks: tuple[int, ...] = ()) -> bool:
        """Collect now, in another thread; false when one is under way or was moments ago.

        Parameters
        ----------
        ranks
            Ranks to look at; empty = all of this node.
        """
        now_ns = self.context.clock.monotonic_ns()
        busy = self._thread is not None and self._thread.is_alive()
        if busy or now_ns - self._last_ns < self.settings.spacing_s * NS_PER_S:
            return False
        self._last_ns = now_ns
        self._thread = threading.Thread(target=self._collect, args=(reason, ranks), name="tw-stacks", daemon=True)
        self._thread.start()
        return True

    def collect(self, ranks: tuple[int, ...] = ()) -> Findings:
        """Everything that can be had within the time. Takes seconds."""
        findings, end_s = Findings(), self._clock_s() + self.settings.total_s
        self._flight(findings)
        self._ras(findings)
        self._threads(findings, ranks, end_s)
        return findings

    def _from_file(self) -> None:
        try:
            reason = Path(self._file).read_text(encoding="utf-8", errors="replace")[:MAX_REASON_CHARS].strip()
            os.unlink(self._file)
        except OSError as error:
            if self._problem != "request_stays":
                logger.warning("request for stacks %s cannot be taken away: %s", self._file, error.strerror)
            self._problem = "request_stays"
            return
        self._problem = ""
        if not self.request(reason or "asked by file"):
            logger.info("stacks were collected moments ago: this request is answered by them")

    def _collect(self, reason: str, ranks: tuple[int, ...]) -> None:
        try:
            findings = self.collect(ranks)
        except Exception as error:
            logger.exception("collecting stacks failed")
            findings = Findings(problems=[f"{type(error).__name__}: {error}"])
        layouts = self.context.ranks.layouts()
        job = next(iter(layouts)) if len(layouts) == 1 else ""
        event = LogEvent(
            source=self.name, severity="info", code="stacks", line=redact(findings.sentence())[:MAX_LINE_CHARS],
            attributes={"reason": redact(reason[:MAX_REASON_CHARS]), **findings.attributes()}, job=job,
            attempt=layouts[job][0].generation if job else 0,
        )  # fmt: skip
        self.context.outlet.log(event, urgent=True)

    # --- what NCCL says -----------------------------------------------------------------------------------------------------

    def _flight(self, findings: Findings) -> None:
        records = []
        for name in self._dumps():
            rank = int(name[len(self.settings.flight_prefix) :])
            try:
                records.append(flight.read(_plain_content(name), rank))
            except (OSError, PickleError) as error:
                findings.problems.append(f"flight record of rank {rank}: {error}")
        findings.dumps = len(records)
        findings.stalls = flight.stalls(records)

    def _dumps(self) -> list[str]:
        prefix, now_s = self.settings.flight_prefix, self.context.clock.now_ns() / NS_PER_S
        if not prefix:
            return []
        names = [name for name in glob.glob(glob.escape(prefix) + "*") if re.fullmatch(r"\d{1,8}", name[len(prefix) :])]
        fresh = [name for name in names if _regular_age_s(name, now_s) <= self.settings.flight_age_s]
        return sorted(fresh)[:MAX_DUMPS]

    def _ras(self, findings: Findings) -> None:
        host, _, port = self.settings.ras_address.rpartition(":")
        if not host or not port.isdecimal():
            return
        try:
            findings.status = ras.parse(ras.ask((host, int(port)), self.settings.deadline_s, self._clock_s))
        except ConnectionRefusedError:
            return  # no job with RAS here
        except OSError as error:
            findings.problems.append(f"RAS at {self.settings.ras_address}: {error.strerror or error}")

    # --- where the threads are ----------------------------------------------------------------------------------------------

    def _threads(self, findings: Findings, ranks: tuple[int, ...], end_s: float) -> None:
        here = [s for layout in self.context.ranks.layouts().values() for s in layout]
        asked = [s for s in here if s.pid > 0 and not s.ended_monotonic_ns and (not ranks or s.rank in ranks)]
        findings.ranks = tuple(state.rank for state in asked)
        by_rank: dict[int, list[Place]] = {}
        program = shutil.which(self.settings.py_spy) if self.settings.py_spy else None
        for state in asked:
            if self._clock_s() >= end_s:
                findings.problems.append(f"rank {state.rank} and those after it: no time left")
                break
            try:
                by_rank[state.rank] = self._of(state, program, end_s, findings)
            except ThreadError as error:
                findings.problems.append(f"rank {state.rank}: {error}")
        findings.groups = alike(by_rank)

    def _of(self, state: RankState, program: str | None, end_s: float, findings: Findings) -> list[Place]:
        if program is not None:
            try:
                places = self._spy(program, state.pid, min(self.settings.deadline_s, end_s - self._clock_s()))
                return with_kernel_state(places, state.pid, self.context.files.root)
            except ThreadError as error:
                findings.problems.append(f"rank {state.rank}: {error}")
        return from_kernel(state.pid, self.context.files.root)

    def _spy(self, program: str, pid: int, timeout_s: float) -> list[Place]:
        command = [program, "dump", "--pid", str(pid), "--json", "--nonblocking"]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=max(0.1, timeout_s), check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ThreadError(f"py-spy: {type(error).__name__}") from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
            raise ThreadError(f"py-spy ended with {done.returncode}: {said[:150]}")
        return from_py_spy(done.stdout)


def _regular_age_s(name: str, now_s: float) -> float:
    """Age of a plain file; infinite for what is none."""
    try:
        found = os.lstat(name)
    except OSError:
        return float("inf")
    return now_s - found.st_mtime if stat.S_ISREG(found.st_mode) else float("inf")


def _plain_content(name: str) -> bytes:
    """A file of a directory that everybody writes to: neither a link nor a pipe is opened in its place."""
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_DUMP_BYTES:
            raise PickleError(f"no plain file of at most {MAX_DUMP_BYTES} bytes")
        return file.read(MAX_DUMP_BYTES)
