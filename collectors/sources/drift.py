"""Drift: what the node runs, told when it changes; the same facts stand in its topology, so that it can be compared with its peers."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from collectors.asking import Answer, Question
from collectors.base import Context, Sample, Source
from collectors.files import Files
from collectors.machine import inventory
from collectors.network import ethtool
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

ENVIRONMENT_BYTES_MAX = 1 << 20
NET = "/sys/class/net"
GRAVE = ("clock_source", "memory_gib")


@dataclass(frozen=True)
class Seen:
    """One look: items of the machine, and those of each job that runs here."""

    machine: dict[str, str]
    jobs: dict[str, dict[str, str]]


class _Saved(msgspec.Struct):
    machine: dict[str, str]
    job: dict[str, str]


class DriftSource(Source):
    """Publishes no numbers: an event `drift:<item>` with the value before and after for each change, also for those that happened while
    the agent was away, and one event `drift:inventory` when it starts. The image of a job is what a variable of its ranks says, else what
    Kubernetes says of their pods. Of the environment of training processes only variables of the communication libraries are kept.
    """

    name: ClassVar[str] = "drift"
    every_ticks: ClassVar[int] = 5

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.drift]``."""

        every_s: float = option(60.0, "how often versions and settings are looked at; new processes at once")
        image_variables: list[str] = option(
            ["TRAINWARDEN_IMAGE", "SLURM_CONTAINER"], "environment variables of a rank that name its container image"
        )

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self.ask: ethtool.Ask | None = ethtool.Kernel() if context.files.live else None
        self._files = Files(Path(context.files.root or "/"), context.clock)
        self._path = context.state_directory / "drift.json"
        self._question = Question("drift", context.clock, settings.every_s, self._look)
        self._pids: tuple[tuple[str, int], ...] = ()
        self._handled: Answer[Seen] | None = None
        self._known: _Saved | None = None
        self._jobs: dict[str, dict[str, str]] = {}
        self._images: dict[str, str] = {}
        self._begun = False
        self._keeps = False

    def start(self) -> None:
        self._keeps = True  # a single look for a person writes nothing

    def sample(self, now_ns: int) -> Sample:
        pids = tuple((s.job, s.pid) for s in self.context.ranks.all() if s.pid and not s.ended_monotonic_ns)
        if pids != self._pids:
            self._pids = pids
            self._question.soon()
        self._images = {job: self._image(job) for job in dict.fromkeys(job for job, _ in pids)}
        answer = self._question.newest()
        if answer is not None and answer is not self._handled:
            self._handled = answer
            self._take(answer.value, now_ns)
        hung = self._question.waiting_s > 2 * self.settings.every_s
        failed = self._question.error is not None
        return Sample(gaps=(Gap(self.name, "hung" if hung else "error"),) if hung or failed else ())

    def settle(self, timeout_s: float) -> bool:
        """Wait for the look that was begun."""
        return self._question.settle(timeout_s)

    def explain(self) -> str:
        known = self._known
        if known is None:
            return "versions and settings have not been read yet"
        return f"{len(known.machine)} items of the machine, {len(known.job)} of running jobs: {', '.join([*known.machine, *known.job])}"

    def close(self) -> None:
        if isinstance(self.ask, ethtool.Kernel):
            self.ask.close()

    def _look(self) -> Seen:
        """In the thread of the question: the environment of a process may hang with it."""
        machine = {**inventory.machine_items(self._files), **self._adapters()}
        by_job: dict[str, list[dict[str, str]]] = {}
        for job, pid in self._pids:
            found = self._environment(pid)
            if found or self._images.get(job):
                by_job.setdefault(job, []).append({"image": self._images.get(job, ""), **found})
        self._files.close()  # looked at once a minute: no reason to keep thirty descriptors
        return Seen(machine, {job: inventory.over_ranks(found) for job, found in by_job.items()})

    def _image(self, job: str) -> str:
        """Images of the job's pods, by the source `kubernetes`; while that knows nothing yet what was known last."""
        claim = self.context.facts.board.merged(f"job:{job}").get("k8s_image")
        known = self._known.job.get("image", "") if self._known is not None else ""
        return inventory.clean(claim.value) if claim is not None else known

    def _environment(self, pid: int) -> dict[str, str]:
        try:
            descriptor = os.open(self._files.path(f"/proc/{pid}/environ"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return {}  # gone, or not ours to read
        try:
            content = os.read(descriptor, ENVIRONMENT_BYTES_MAX)
        except OSError:
            return {}
        finally:
            os.close(descriptor)
        return inventory.environment(content, self.settings.image_variables)

    def _adapters(self) -> dict[str, str]:
        """Drivers and firmware of network adapters, by their own word, and their packet sizes."""
        names = [name for name in self._files.names(NET) if self._files.names(f"{NET}/{name}/device")]
        found = {"mtu": inventory.summary(self._files.text(f"{NET}/{name}/mtu") for name in names)}
        drivers = [driver for name in names if (driver := self._driver(name)) is not None]
        found["driver.nic"] = inventory.summary(f"{driver.name} {driver.version}".strip() for driver in drivers)
        found["firmware.ethernet"] = inventory.summary(driver.firmware for driver in drivers)
        return {item: inventory.clean(value) for item, value in found.items() if value}

    def _driver(self, name: str) -> ethtool.Driver | None:
        if self.ask is None:
            return None
        try:
            return ethtool.driver(self.ask, name)
        except OSError:
            return None

    # --- what was seen -------------------------------------------------------------------------------------------------------------

    def _take(self, seen: Seen, now_ns: int) -> None:
        known = self._known or self._load() or _Saved({}, {})
        first = not (known.machine or known.job)
        news = inventory.changes(known.machine, seen.machine)
        for job, items in seen.jobs.items():
            if not first:
                # a job not seen before is compared with the one before it
                before = self._jobs.get(job, known.job)
                # the cluster tells of images when it answers first: that is no change
                self._tell_all([news for news in inventory.changes(before, items) if news[:2] != ("image", "")], job)
        self._jobs = seen.jobs
        merged = _Saved({**known.machine, **seen.machine}, inventory.over_ranks(seen.jobs.values()) or known.job)
        if not first:
            self._tell_all(news, "")
        if merged != known or self._known is None:
            self._known = merged
            if self._keeps:
                self._save(merged)
            self.context.facts.board.tell("node", self.name, "discovered", {**merged.machine, **merged.job}, now_ns)
        if not self._begun:
            self._begun = True
            self._tell_inventory(merged)

    def _tell_all(self, news: list[tuple[str, str, str]], job: str) -> None:
        for item, before, after in news:
            line = f"{item} is {after!r} now, was {before!r}" if before else f"{item} is {after!r} now, was not set"
            event = LogEvent(source=self.name, severity="warning" if item in GRAVE else "info", code=f"drift:{item}", line=line,
                             attributes={"item": item, "before": before, "after": after}, job=job)  # fmt: skip
            self.context.outlet.log(event, urgent=False)
        if news:
            self.context.outlet.topology_changed()

    def _tell_inventory(self, known: _Saved) -> None:
        line = f"kernel {known.machine.get('kernel', 'unknown')}, {len(known.machine) + len(known.job)} items known"
        event = LogEvent(source=self.name, severity="info", code="drift:inventory", line=line,
                         attributes={**known.machine, **known.job})  # fmt: skip
        self.context.outlet.log(event, urgent=False)

    def _load(self) -> _Saved | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Saved)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be used, changes since the last run stay unknown: %s", self._path, error)
            return None

    def _save(self, known: _Saved) -> None:
        scratch = self._path.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(known))
            os.replace(scratch, self._path)
        except OSError as error:
            logger.warning("%s cannot be written, changes over a restart will stay unknown: %s", self._path, error)
