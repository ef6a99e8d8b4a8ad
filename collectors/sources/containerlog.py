"""Logs of containers, where the kubelet puts them: known lines and failures become events with namespace, pod and container."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from collectors import patterns
from collectors.base import Context, Sample, Source, Worker
from collectors.logs.cri import Joiner, labels_of, resolved
from collectors.logs.desk import Channel, Desk, refused
from collectors.logs.folding import Folder
from collectors.logs.positions import Positions
from collectors.tail import Tail
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Gap
from trainwarden.settings import option

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
SAVE_EVERY_NS = 5 * NS_PER_S
LOOK_FOR_NS = 60 * NS_PER_S


@dataclass
class Followed:
    """One container's log."""

    tail: Tail
    channel: Channel


class ContainerLogSource(Source):
    """Finds the logs every few seconds and reads what was added, in a thread of its own. Costs nothing on a node without containers.

    Notes
    -----
    A container's first lines are read from their beginning when its log appears while the agent runs; what was there before the first
    start is read from its end. When a log is deleted with its pod the open file is still read to its end. Compressed rotated files are
    not read.
    """

    name: ClassVar[str] = "containerlog"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.containerlog]``."""

        globs: list[str] = option(["/var/log/pods/*/*/*.log"], "where the logs lie; links are followed")
        exclude: list[str] = option(
            ["kube-system/*", "*/trainwarden*"],
            "namespace/pod patterns left out; our own log quotes lines that it found",
        )
        limit: int = option(256, "logs followed at most; those beyond it are a gap")
        find_every_s: float = option(10.0, "cadence of looking for new logs")
        poll_ms: int = option(1000, "cadence of looking for new lines")
        bytes_per_poll: int = option(8 * 1024 * 1024, "read in one look at most")
        budget_ms: int = option(25, "time for one look: a flood of lines waits in its file")
        fold_s: float = option(5.0, "identical lines within this time are one event with a count")
        burst: float = option(20.0, "events of one code and container at once")
        per_s: float = option(2.0, "events of one code and container per second after a burst")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        folder = Folder(settings.fold_s, settings.burst, settings.per_s, refused(context))
        self._desk = Desk(context, patterns.load(), folder, self.name)
        self._positions = Positions(context.state_directory / "container_positions.json")
        self._followed: dict[str, Followed] = {}
        self._reasons: dict[str, str] = {}
        self._found_ns = -int(settings.find_every_s * NS_PER_S)
        self._looked_ns = -LOOK_FOR_NS
        self._first = True
        self._started = self._running = False
        self._worker = Worker("tw-containerlog", self._turn, self._failed)

    def start(self) -> None:
        """Begin as soon as there is a place with logs."""
        self._started = True
        self._begin()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        if self._started and not self._running:
            self._begin()
        return Sample(gaps=tuple(Gap(self.name, reason) for reason in sorted(set(self._reasons.values()))))

    def close(self) -> None:
        if self._running:
            self._worker.close()
            self._desk.settle(self._channels(), last=True)
            self._save()
        for followed in self._followed.values():
            followed.tail.close()

    def poll(self) -> None:
        """Look for logs when it is time, and at every log once; those with much to say take turns until the time is up."""
        clock = self.context.clock
        now_ns = clock.monotonic_ns()
        if now_ns - self._found_ns >= self.settings.find_every_s * NS_PER_S:
            self._found_ns = now_ns
            self._find()
        self._read(now_ns + self.settings.budget_ms * NS_PER_MS)
        self._desk.settle(self._channels())
        if self._desk.spoke or now_ns - self._positions.saved_ns >= SAVE_EVERY_NS:
            self._desk.spoke, self._positions.saved_ns = False, now_ns
            self._save()

    # --- finding ---------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        now_ns = self.context.clock.monotonic_ns()
        if now_ns - self._looked_ns >= LOOK_FOR_NS:
            self._looked_ns = now_ns
            if any(os.path.isdir(self.context.files.path(_fixed_part(pattern))) for pattern in self.settings.globs):
                self._running = True
                self._worker.start()

    def _find(self) -> None:
        first, self._first = self._first, False
        found = dict(self._logs())
        self._reasons.pop("limit", None)
        if len(found) > self.settings.limit:
            self._reasons["limit"] = f"over_limit:{len(found)}"
            # the newest are what runs now
            newest = sorted(found, key=lambda name: _modified(found[name]), reverse=True)
            found = {name: found[name] for name in newest[: self.settings.limit]}
        for name, path in found.items():
            if name not in self._followed:
                self._follow(name, path, from_start=not first)
        for name in [name for name in self._followed if name not in found]:
            self._let_go(name)

    def _logs(self) -> Iterator[tuple[str, Path]]:
        root = self.context.files.root
        for pattern in self.settings.globs:
            for link in sorted(glob.iglob(self.context.files.path(pattern))):
                try:
                    path = resolved(link, root)
                except OSError as error:
                    self._trouble(link, error)
                    continue
                if not self._excluded(labels_of(str(path)) or labels_of(link)):
                    yield str(path), path

    def _excluded(self, labels: dict[str, str]) -> bool:
        whose = f"{labels.get('namespace', '')}/{labels.get('pod', '')}"
        return any(fnmatch.fnmatchcase(whose, pattern) for pattern in self.settings.exclude)

    def _follow(self, name: str, path: Path, from_start: bool) -> None:
        labels, joiner = labels_of(name), Joiner()
        short = "/".join(labels.values()) or path.name
        channel = Channel(short, labels, unwrap=joiner, holds=joiner.holds)
        self._followed[name] = Followed(Tail(path, self._positions.of(name), from_start), channel)

    def _let_go(self, name: str) -> None:
        """The path is gone: what the open file still holds is read first."""
        followed = self._followed.pop(name)
        self._take(name, followed)
        self._desk.settle([followed.channel], last=True)
        followed.tail.close()
        self._reasons.pop(name, None)

    # --- reading ---------------------------------------------------------------------------------------------------------

    def _read(self, until_ns: int) -> None:
        waiting, taken = dict(self._followed), 0
        while waiting and taken < self.settings.bytes_per_poll:
            waiting = {name: followed for name, followed in waiting.items() if self._take(name, followed)}
            taken += CHUNK_BYTES
            if self.context.clock.monotonic_ns() >= until_ns:
                return

    def _take(self, name: str, followed: Followed) -> bool:
        try:
            block = followed.tail.block(CHUNK_BYTES)
        except OSError as error:
            self._trouble(name, error)
            return False
        self._reasons.pop(name, None)
        self._desk.block(followed.channel, block)
        return len(block) > CHUNK_BYTES // 2

    def _trouble(self, name: str, error: OSError) -> None:
        reason = "permission" if isinstance(error, PermissionError) else "unreadable"
        if self._reasons.get(name) != reason:
            logger.warning("container log %s cannot be read: %s", name, error.strerror)
        self._reasons[name] = reason

    def _channels(self) -> list[Channel]:
        return [followed.channel for followed in self._followed.values()]

    def _save(self) -> None:
        problem = self._positions.save({name: followed.tail.position() for name, followed in self._followed.items()})
        if problem:
            self._reasons["positions"] = problem
        else:
            self._reasons.pop("positions", None)

    def _turn(self) -> None:
        self.poll()
        self._worker.wait(self.settings.poll_ms / 1000)

    def _failed(self, error: Exception) -> None:
        logger.exception("watching container logs: %s", error)
        self._reasons["thread"] = "error"


def _fixed_part(pattern: str) -> str:
    """The directory above the first wildcard."""
    return os.path.dirname(pattern.split("*", 1)[0].split("?", 1)[0].split("[", 1)[0])


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
