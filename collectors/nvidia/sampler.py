"""What the child does each second: read every GPU that answers, say what changed, pack the rows."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collectors.crew import Crew, Job
from collectors.nvidia import abi, fields, wire
from collectors.nvidia.decode import NAN
from collectors.nvidia.driver import Driver, Found
from collectors.nvidia.events import EventWatch
from collectors.nvidia.fields import FAST, MEDIUM, SLOW
from collectors.nvidia.gpu import Gpu, Identity, Layout, LostError, ReopenError, Spans
from collectors.nvidia.instances import Instance, Instances
from collectors.nvidia.library import Library

ANNOUNCE_TICKS = 60
HUNG_PERIODS = 3
TURN_SHARE = 0.5
SLOW_READ_NS = 100 * 10**6
"""A GPU that takes longer than this for the values of every second is asked every other second: asking holds up somebody."""
MEDIUM_COLUMNS = ("memory_clock_mhz", "fb_total_bytes", "fb_used_bytes", "fb_reserved_bytes", "fb_used_ratio", "temp_margin_c",
                  "pcie_link_gen", "pcie_link_width", "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")  # fmt: skip
XID_COLUMNS = ("xid_last", "xid_count")
FAST_COLUMNS = (
    "sm_clock_mhz",
    "temp_c",
    "clocks_event_reasons",
    "gpu_util_ratio",
    "memory_util_ratio",
    "power_w",
)


@dataclass(frozen=True)
class Options:
    """What the parent wants."""

    columns: Sequence[str]
    part_columns: Sequence[str]
    spans: Spans = field(default_factory=Spans)
    events: bool = True
    names: Mapping[str, str] = field(default_factory=dict)


def tiers_of(columns: Sequence[str]) -> dict[int, list[int]]:
    """Column numbers by the tier that fills them."""
    at = {name: index for index, name in enumerate(columns)}
    named = {tier: {reading.column for reading in fields.READINGS if reading.tier == tier} for tier in (FAST, MEDIUM)}
    fast, medium = named[FAST] | set(FAST_COLUMNS), named[MEDIUM] | set(MEDIUM_COLUMNS)
    slow = set(columns) - fast - medium - set(XID_COLUMNS)
    return {
        tier: [at[name] for name in names if name in at]
        for tier, names in ((FAST, fast), (MEDIUM, medium), (SLOW, slow))
    }


class GpuJob:
    """One GPU's part of a turn."""

    def __init__(self, gpu: Gpu, parts: Instances, stagger: float) -> None:
        self.gpu = gpu
        self.parts = parts
        self.busy_since_ns = 0
        self.lost = False
        self.reopen: int | None = None
        self.parts_changed = False
        self.hung = False
        self.answered = False
        self.reset_told = False
        self.support: dict[str, str] = {}
        self.shown_parts: tuple[Instance, ...] = ()
        self._stagger = stagger
        self._rests = False

    def run(self) -> None:
        """Read what is due. What goes wrong is noted for the main thread."""
        now_ns = time.monotonic_ns()
        if self._rests:
            self._rests = False
            return
        try:
            self._read(now_ns)
        except LostError:
            self.lost = True
        except ReopenError as error:
            self.reopen = error.code

    def _read(self, now_ns: int) -> None:
        gpu = self.gpu
        medium, slow = gpu.due(MEDIUM, now_ns), gpu.due(SLOW, now_ns)
        gpu.read(now_ns)
        if slow:
            self.parts_changed = self.parts.refresh() or self.parts_changed
            self.support = gpu.support()
        if medium:
            self.parts.read()
        self._rests = not (medium or slow) and time.monotonic_ns() - now_ns > SLOW_READ_NS
        if not self.answered:
            gpu.spread(self._stagger)
        self.answered = True


class DriverJob:
    """Opening the driver and looking for GPUs: both may hang as well."""

    def __init__(self, driver: Driver, every_ns: int) -> None:
        self.driver = driver
        self.busy_since_ns = 0
        self.found: list[Found] | None = None
        self.opened = False
        self.look = False
        self.missing = False
        self._every_ns = every_ns
        self.looked_ns = 0
        self._count = 0

    def run(self) -> None:
        """Open when closed; look again when the number of GPUs changed or one is missed."""
        now_ns = time.monotonic_ns()
        if self.driver.ensure_open(now_ns):
            self.opened = self.look = True
        if not self.driver.open:
            return
        due = now_ns - self.looked_ns >= self._every_ns
        if self.look or (due and (self.missing or self._moved())):
            self.looked_ns, self.look = now_ns, False
            self.found = self.driver.find()
            self._count = len(self.found or ())
        elif due:
            self.looked_ns = now_ns

    def _moved(self) -> bool:
        library = self.driver.library
        return (
            library.number("DeviceGetCount_v2" if library.has("DeviceGetCount_v2") else "DeviceGetCount") != self._count
        )


class Sampler:
    """All GPUs of a node. `tick` returns in bounded time whatever the driver does."""

    def __init__(self, library: Library, options: Options) -> None:
        self._library = library
        self._options = options
        self._layout = Layout({name: index for index, name in enumerate(options.columns)})
        self._part_at = {name: index for index, name in enumerate(options.part_columns)}
        self._tiers = tiers_of(options.columns)
        self._driver = Driver(library, options.names)
        self._driver_job = DriverJob(self._driver, options.spans.every_ns[SLOW])
        self._driver_hung = False
        self._crew = Crew()
        self._watch = EventWatch(library)
        self._jobs: dict[str, GpuJob] = {}
        self._known: dict[str, Identity] = {}
        self._lost: dict[str, Identity] = {}
        self._said: dict[str, Any] = {}
        self._out: deque[bytes] = deque()
        self._generation = 0
        self._support_at = 0
        self.finished = False

    @property
    def busy(self) -> bool:
        """Whether some call has not come back."""
        jobs: list[Job] = [*self._jobs.values(), self._driver_job]
        return any(job.busy_since_ns for job in jobs)

    def tick(self) -> list[bytes]:
        """Read, and return the messages to send: what changed first, then the frame."""
        timeout_s = self._options.spans.every_ns[FAST] / 1e9 * TURN_SHARE
        jobs = list(self._jobs.values()) if self._driver.open and not self._driver_job.busy_since_ns else []
        look = not self._driver.open or self._driver_due()
        todo: list[Job] = [*jobs, *([self._driver_job] if look else [])]
        self._crew.turn(todo, timeout_s)
        now_ns = time.monotonic_ns()
        self._settle(now_ns)
        for facts in self._watch.take():
            self._out.append(wire.event(self._named(facts)))
        frame = self._frame(now_ns)
        messages = [*self._out, frame.pack()]
        self._out.clear()
        return messages

    # --- what happened ------------------------------------------------------------------------------------------------------------

    def _driver_due(self) -> bool:
        job = self._driver_job
        return job.look or time.monotonic_ns() - job.looked_ns >= self._options.spans.every_ns[SLOW]

    def _settle(self, now_ns: int) -> None:
        job = self._driver_job
        changed = self._adopt(job) if not job.busy_since_ns else False
        self._driver_hung = self._late(job, now_ns)
        for key, gpu_job in list(self._jobs.items()):
            changed = self._settle_gpu(key, gpu_job, now_ns) or changed
        reopen = next((j.reopen for j in self._jobs.values() if j.reopen is not None), None)
        if reopen is not None:
            self._reopen(reopen)
        self._support_at -= 1
        if changed or self._support_at <= 0:
            self._announce()

    def _adopt(self, job: DriverJob) -> bool:
        """Take over what the driver found."""
        found, job.found = job.found, None
        if found is None:
            return False
        uuids = {identity.uuid for _, identity in found}
        for identity in [identity for uuid, identity in self._known.items() if uuid not in uuids]:
            self._jobs.pop(identity.uuid, None)
            self._lose(identity)
        self._known.update({identity.uuid: identity for _, identity in found})
        if job.opened:
            job.opened = False
            self._drop_all()
        fresh = [(handle, identity) for handle, identity in found if identity.uuid not in self._jobs]
        for index, (handle, identity) in enumerate(fresh):
            self._jobs[identity.uuid] = self._job(handle, identity, index / max(1, len(fresh)))
        self._jobs = dict(sorted(self._jobs.items(), key=lambda item: int(item[1].gpu.identity.name[3:])))
        if self._options.events and fresh:
            self._listen()
        return True

    def _listen(self) -> None:
        """Have the driver report events of all GPUs; one that does has had no Xid so far."""
        self._watch.register(
            {job.gpu.identity.name: (job.gpu.handle, job.gpu.identity.pci) for job in self._jobs.values()}
        )
        for job in self._jobs.values():
            if job.gpu.identity.name in self._watch.registered:
                for name in XID_COLUMNS:
                    job.gpu.row[self._layout.at[name]] = 0.0

    def _job(self, handle: Any, identity: Identity, stagger: float) -> GpuJob:
        gpu = Gpu(self._library, handle, identity, self._layout, self._options.spans)
        return GpuJob(gpu, Instances(self._library, gpu, self._part_at, self._options.spans.gpm), stagger)

    def _settle_gpu(self, key: str, job: GpuJob, now_ns: int) -> bool:
        identity = job.gpu.identity
        hung, job.hung = job.hung, self._late(job, now_ns)
        if hung != job.hung:
            waited_s = (now_ns - job.busy_since_ns) / 1e9 if job.hung else 0.0
            self._say("gpu_hung" if job.hung else "gpu_answers", identity, waited_s=f"{waited_s:.1f}")
        if job.lost:
            del self._jobs[key]
            self._lose(identity)
            return True
        if job.gpu.reset_required and not job.reset_told:
            job.reset_told = True
            self._say("gpu_reset_required", identity)
        if job.answered and key in self._lost:
            del self._lost[key]
            self._driver_job.missing = bool(self._lost)
            self._say("gpu_back", identity)
            return True
        if job.busy_since_ns or not job.parts_changed:
            return False
        job.parts_changed, job.shown_parts = False, tuple(job.parts.present.values())
        return True

    def _lose(self, identity: Identity) -> None:
        """A GPU that is gone is said once, not at every look."""
        self._driver_job.missing = True
        if identity.uuid not in self._lost:
            self._lost[identity.uuid] = identity
            self._say("gpu_lost", identity)

    def _reopen(self, code: int) -> None:
        """The driver went away, with all that was allocated in it."""
        if code == abi.LIB_RM_VERSION_MISMATCH:
            self.finished = (
                True  # the library in memory is that of the former driver: only a new process loads the present one
            )
        self._drop_all()
        self._driver.lost(code)
        self._announce()

    def _drop_all(self) -> None:
        self._jobs = {key: job for key, job in self._jobs.items() if job.busy_since_ns}

    def _late(self, job: GpuJob | DriverJob, now_ns: int) -> bool:
        return (
            bool(job.busy_since_ns) and now_ns - job.busy_since_ns > HUNG_PERIODS * self._options.spans.every_ns[FAST]
        )

    # --- messages -----------------------------------------------------------------------------------------------------------------

    def _shown(self) -> list[GpuJob]:
        """GPUs with a row; one that was lost has none until it answers again."""
        return [job for key, job in self._jobs.items() if key not in self._lost]

    def _named(self, facts: dict[str, Any]) -> dict[str, Any]:
        job = next((j for j in self._jobs.values() if j.gpu.identity.name == facts["gpu"]), None)
        return {**facts, "uuid": job.gpu.identity.uuid if job else ""}

    def _say(self, code: str, identity: Identity, **more: str) -> None:
        facts = {
            "code": code,
            "gpu": identity.name,
            "uuid": identity.uuid,
            "pci": identity.pci,
            "at_ns": time.time_ns(),
            **more,
        }
        self._out.append(wire.event(facts))

    def _announce(self) -> None:
        """The inventory: what the rows of the frames to come belong to, and why columns are empty."""
        shown = self._shown()
        self._support_at = ANNOUNCE_TICKS if all(job.answered for job in shown) else 1
        gpus = [{**vars(job.gpu.identity), "support": job.support, "events": job.gpu.identity.name in self._watch.registered}
                for job in shown]  # fmt: skip
        parts = [
            {"name": part.name, "uuid": part.uuid, "profile": part.profile} for job in shown for part in job.shown_parts
        ]
        facts = {"driver": self._driver.version, "gpus": gpus, "parts": parts, "names": dict(self._driver.names)}
        if facts == self._said:
            return
        self._said = facts
        self._generation += 1
        self._out.append(wire.inventory(self._generation, facts))

    def _frame(self, now_ns: int) -> wire.Frame:
        shown = self._shown()
        rows = [self._row(job.gpu, now_ns) for job in shown]
        parts = [part.row.tobytes() for job in shown for part in job.shown_parts]
        hung = wire.hung_mask([bool(job.busy_since_ns) for job in shown])
        took_us = sum(job.gpu.took_us for job in shown)
        cpu_ms = int(time.process_time() * 1000)
        return wire.Frame(
            self._status(),
            self._generation,
            len(rows),
            len(parts),
            now_ns,
            hung,
            took_us,
            cpu_ms,
            b"".join(rows + parts),
        )

    def _row(self, gpu: Gpu, now_ns: int) -> bytes:
        """The GPU's row, without what is older than two and a half of its periods."""
        row, spans = gpu.row, self._options.spans
        for tier in (FAST, MEDIUM, SLOW):
            if now_ns - gpu.read_ns[tier] > spans.stale_periods * spans.every_ns[tier]:
                row = array("f", row)
                for column in self._tiers[tier]:
                    row[column] = NAN
        return row.tobytes()

    def _status(self) -> int:
        if self.finished:
            return wire.OLD_DRIVER
        if self._driver_hung:
            return wire.HUNG
        if self._driver.open:
            return wire.RUNNING if self._jobs or not self._driver_job.busy_since_ns else wire.STARTING
        if self._driver_job.busy_since_ns:
            return wire.STARTING
        return wire.NO_PERMISSION if self._driver.code == abi.NO_PERMISSION else wire.NO_DRIVER
