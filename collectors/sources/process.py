"""The training processes: alive or not, state, processor time, memory, input and output, throttling by their control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import Context, Family, Rates, Sample, Source, family, highest
from collectors.files import line_value, to_number
from collectors.ranks import RankState
from trainwarden.clock import NS_PER_S
from trainwarden.records import Gap
from trainwarden.settings import option

STATES = {"R": 1.0, "S": 2.0, "D": 3.0, "T": 4.0, "t": 4.0, "Z": 5.0}
PHASES = {"": 0.0, "first": 1.0, "train": 2.0, "eval": 3.0, "checkpoint": 4.0}
OTHER_STATE = 6.0
ANCESTORS = 6
SELDOM_NS = 5 * NS_PER_S

PROCESS = family(
    "process", "process",
    ("alive", "bool", "state", "1 while the process exists and is no zombie"),
    ("state", "enum", "state", "0 none, 1 running, 2 sleeping, 3 uninterruptible, 4 stopped, 5 zombie, 6 other"),
    ("cpu_cores", "cores", "counter", "processor seconds per second"),
    ("rss_bytes", "bytes", "gauge", "resident memory"),
    ("threads_count", "threads", "gauge", "threads"),
    ("read_bytes_per_s", "bytes/s", "counter", "read from disks"),
    ("write_bytes_per_s", "bytes/s", "counter", "written to disks"),
    ("throttled_ratio", "ratio", "counter", "throttled seconds per second, the worst of its control groups"),
    ("voluntary_switches_per_s", "1/s", "counter", "times the main thread went to sleep by itself"),
    ("last_step", "step", "state", "number of the newest step that it reported"),
    ("step_age_s", "s", "gauge", "time since then, by the agent's clock"),
    ("phase", "enum", "state", "0 none, 1 first, 2 train, 3 eval, 4 checkpoint"),
)  # fmt: skip


class ProcessSource(Source):
    """One row per rank that the hook told of. A process that vanished is reported as not alive until a new generation says hello, or
    for `report_gone_s`; one that ended by itself (exit code 0, or after its goodbye) is no news and disappears at once.
    """

    name: ClassVar[str] = "process"
    families: ClassVar[tuple[Family, ...]] = (PROCESS,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.process]``."""

        report_gone_s: float = option(30.0, "how long a vanished process is reported as not alive")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._rates = Rates(context.clock)
        self._groups = Cgroups(context)
        self._ticks_per_s = float(os.sysconf("SC_CLK_TCK"))
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._pids: set[int] = set()
        self._unreadable = 0
        self._seldom: dict[int, tuple[int, dict[str, float]]] = {}

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        rows: dict[str, dict[str, float]] = {}
        states = self.context.ranks.all()
        self._groups.begin()
        self._unreadable = 0
        for state in states:
            row = self._row(state)
            if row is not None:
                # two jobs on one node may both have a rank of this number
                device = state.device if state.device not in rows else f"{state.job}/{state.device}"
                rows[device] = {**row, **self._progress(state)}
        self._forget_others({state.pid for state in states})
        return Sample(PROCESS.block(rows), (Gap(self.name, "unreadable"),) if self._unreadable else ())

    def _row(self, state: RankState) -> dict[str, float] | None:
        """Numbers of one process; None when its end is no news."""
        if state.pid == 0:
            return {}
        try:
            stat = self.context.files.read(f"/proc/{state.pid}/stat").decode("utf-8", "replace")
        except (FileNotFoundError, ProcessLookupError):
            return self._gone(state)
        except OSError:
            # it is there and does not let itself be read: that is no death
            self._unreadable += 1
            return {}
        fields = stat_fields(stat)
        if len(fields) < 22 or fields[0] == "X":
            return self._gone(state)
        if fields[0] == "Z":
            self._note_end(state)
        return {**self._from_stat(state.pid, fields), **self._from_others(state.pid)}

    def _gone(self, state: RankState) -> dict[str, float] | None:
        now_ns = self.context.clock.monotonic_ns()
        ended_ns = self._note_end(state)
        if state.leaving or now_ns - ended_ns > self.settings.report_gone_s * NS_PER_S:
            self.context.ranks.forget(state.job, state.rank)
            return None
        return {"alive": 0.0, "state": 0.0, "cpu_cores": 0.0}

    def _note_end(self, state: RankState) -> int:
        if not state.ended_monotonic_ns:
            now_ns = max(1, self.context.clock.monotonic_ns())
            self.context.ranks.ended(state.job, state.generation, state.rank, now_ns, clean=False)
            return now_ns
        return state.ended_monotonic_ns

    def _from_stat(self, pid: int, fields: list[str]) -> dict[str, float]:
        busy_s = (float(fields[11]) + float(fields[12])) / self._ticks_per_s
        return {
            "alive": 0.0 if fields[0] == "Z" else 1.0,
            "state": STATES.get(fields[0], OTHER_STATE),
            "cpu_cores": self._rates.per_second((str(pid), "cpu"), busy_s),
            "threads_count": float(fields[17]),
            "rss_bytes": float(fields[21]) * self._page_bytes,
        }

    def _from_others(self, pid: int) -> dict[str, float]:
        """What the kernel has to put together at some cost is read every five seconds and repeated between."""
        now_ns = self.context.clock.monotonic_ns()
        known = self._seldom.get(pid)
        if known is None or now_ns - known[0] >= SELDOM_NS:
            # the first time not all at once: the ranks of a job start together
            at_ns = now_ns if known is not None else now_ns - pid % 5 * NS_PER_S
            self._seldom[pid] = known = (at_ns, self._from_io_and_status(pid))
        return {**known[1], "throttled_ratio": self._groups.throttled_ratio(pid)}

    def _from_io_and_status(self, pid: int) -> dict[str, float]:
        files, rate = self.context.files, self._rates.per_second
        io, status = files.text(f"/proc/{pid}/io"), files.text(f"/proc/{pid}/status")
        return {
            "read_bytes_per_s": rate((str(pid), "read"), to_number(line_value(io, "read_bytes"))),
            "write_bytes_per_s": rate((str(pid), "write"), to_number(line_value(io, "write_bytes"))),
            "voluntary_switches_per_s": rate(
                (str(pid), "vol"), to_number(line_value(status, "voluntary_ctxt_switches"))
            ),
        }

    def _progress(self, state: RankState) -> dict[str, float]:
        if state.last_step < 0:
            return {"phase": 0.0}
        age_s = (self.context.clock.monotonic_ns() - state.seen_monotonic_ns) / NS_PER_S
        phase = PHASES.get(state.phase, 0.0)
        return {"last_step": float(state.last_step), "step_age_s": age_s, "phase": phase}

    def _forget_others(self, pids: set[int]) -> None:
        for pid in self._pids - pids:
            self.context.files.forget(f"/proc/{pid}")
        if pids != self._pids:
            self._seldom = {pid: seldom for pid, seldom in self._seldom.items() if pid in pids}
            self._groups.keep(pids)
        self._pids = pids
        known = {str(pid) for pid in pids}
        self._rates.keep(lambda key: key[0] in known)


class Cgroups:
    """Throttled time of a process's control groups, version 1, 2 or both; the worst of the group and those above it."""

    ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    V1_ROOTS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")

    def __init__(self, context: Context) -> None:
        self._files = context.files
        self._clock = context.clock
        self._rates = Rates(context.clock)
        self._stats: dict[str, list[str]] = {}
        self._members: dict[int, tuple[int, str]] = {}
        self._throttled_s: dict[str, float | None] = {}

    def begin(self) -> None:
        """A new tick: the ranks of a pod share their groups, which are read once for all of them."""
        self._throttled_s = {}

    def keep(self, pids: set[int]) -> None:
        """Forget processes that are gone."""
        self._members = {pid: member for pid, member in self._members.items() if pid in pids}

    def throttled_ratio(self, pid: int) -> float:
        """Throttled seconds per second; NaN when no group says."""
        membership = self._membership(pid)
        if membership not in self._stats:
            self._stats = {**dict(list(self._stats.items())[-64:]), membership: self._find(membership)}
        rate = self._rates.per_second
        return highest([rate((str(pid), path), self._throttled(path)) for path in self._stats[membership]])

    def _membership(self, pid: int) -> str:
        now_ns = self._clock.monotonic_ns()
        known = self._members.get(pid)
        if known is None or now_ns - known[0] >= SELDOM_NS:
            known = self._members[pid] = (now_ns, self._files.text(f"/proc/{pid}/cgroup"))
        return known[1]

    def _throttled(self, path: str) -> float | None:
        if path not in self._throttled_s:
            self._throttled_s[path] = throttled_s(self._files.text(path))
        return self._throttled_s[path]

    def _find(self, membership: str) -> list[str]:
        """``cpu.stat`` files of the groups that a process is in, where they exist and count throttling."""
        wanted = [f"{root}{group}/cpu.stat" for root, group in self._groups(membership)]
        return [path for path in dict.fromkeys(wanted) if throttled_s(self._files.text(path)) is not None]

    def _groups(self, membership: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for line in membership.splitlines():
            number, controllers, path = (*line.split(":", 2), "", "")[:3]
            roots = (
                self.ROOTS
                if number == "0" and not controllers
                else self.V1_ROOTS
                if "cpu" in controllers.split(",")
                else ()
            )
            found.extend((root, group) for root in roots for group in ancestors(path))
        return found


def ancestors(path: str) -> list[str]:
    """A group and those above it, without the root.

    Examples
    --------
    >>> ancestors("/job/rank2")
    ['/job/rank2', '/job']
    """
    found: list[str] = []
    while path.strip("/") and ".." not in path and len(found) < ANCESTORS:
        found.append(path.rstrip("/"))
        path = path.rstrip("/").rpartition("/")[0]
    return found


def throttled_s(cpu_stat: str) -> float | None:
    """Throttled seconds: ``throttled_time`` of version 1 counts nanoseconds, ``throttled_usec`` of version 2 microseconds."""
    values = dict(line.split(" ", 1) for line in cpu_stat.splitlines() if " " in line)
    for name, per_s in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
        count = to_number(values.get(name, ""))
        if count is not None:
            return count / per_s
    return None


def stat_fields(stat: str) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the name before it may hold blanks and brackets."""
    return stat.rpartition(")")[2].split()
