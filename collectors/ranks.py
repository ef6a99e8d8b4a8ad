"""The training processes of this node, as the hook's datagrams tell; shared by the step and the process source, kept over restarts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
from msgspec.structs import replace

from trainwarden.clock import NS_PER_S, Clock, SystemClock

BELIEVED_NS = 180 * NS_PER_S


class RankState(msgspec.Struct, frozen=True):
    """What is known of one rank.

    Attributes
    ----------
    pid
        0 when no datagram named it.
    last_step, phase, seen_monotonic_ns
        Of the newest step datagram; -1, empty and 0 before the first one.
    ended_monotonic_ns
        When the launcher reported its end, or its process was found gone; 0 while it runs.
    leaving
        It said goodbye: its end is no news.
    """

    job: str
    generation: int
    rank: int
    world: int = 0
    local_rank: int = -1
    pid: int = 0
    last_step: int = -1
    phase: str = ""
    seen_monotonic_ns: int = 0
    ended_monotonic_ns: int = 0
    leaving: bool = False

    @property
    def device(self) -> str:
        """Device name in the process family."""
        return f"rank{self.rank}"


class _SavedRank(msgspec.Struct):
    job: str
    generation: int
    rank: int
    world: int
    local_rank: int
    pid: int


class _Saved(msgspec.Struct):
    at_ns: int
    ranks: list[_SavedRank]


class RankBoard:
    """Ranks by (job, rank); the newest generation replaces older ones, datagrams of older ones are refused.

    Parameters
    ----------
    path
        Where the board is kept over restarts of the agent. A board that is older than a few minutes is not believed: its processes
        ended unseen, and their absence now would look like a death.

    Attributes
    ----------
    changes
        Grows whenever a rank comes, goes, ends or runs as another process: what follows from the layout holds until then.
    """

    def __init__(self, path: Path | None = None, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._ranks: dict[tuple[str, int], RankState] = {}
        self.changes = 0
        self._path = path
        if path is not None:
            self._load(path)

    def all(self) -> list[RankState]:
        """Every rank known, by job and rank."""
        with self._lock:
            return [self._ranks[key] for key in sorted(self._ranks)]

    def layouts(self) -> dict[str, list[RankState]]:
        """Running ranks of the newest generation by job."""
        found: dict[str, list[RankState]] = {}
        for state in self.all():
            found.setdefault(state.job, []).append(state)
        newest = {job: max(state.generation for state in states) for job, states in found.items()}
        return {job: [s for s in states if s.generation == newest[job]] for job, states in found.items()}

    def seen(self, job: str, generation: int, rank: int, **known: int | str) -> bool:
        """Take in that a rank spoke; true when the layout changed (new rank, generation or process).

        `known` are fields of `RankState`. A word from an older generation than the one known is ignored.
        """
        with self._lock:
            old = self._ranks.get((job, rank))
            if old is not None and old.generation > generation:
                return False
            if old is None or old.generation < generation:
                old = None
            base = old or RankState(job, generation, rank)
            new = replace(base, **known)
            if new.pid != base.pid:
                new = replace(new, ended_monotonic_ns=0, leaving=False)
            self._ranks[job, rank] = new
            changed = old is None or new.pid != old.pid or new.world != old.world
            if old is None:
                self._drop_older(job, generation)
            self.changes += changed
        if changed:
            self.save()
        return changed

    def ended(self, job: str, generation: int, rank: int, at_monotonic_ns: int, clean: bool) -> None:
        """A process ended: a clean end is forgotten, any other kept, so that its absence is reported."""
        with self._lock:
            state = self._ranks.get((job, rank))
            if state is None or state.generation != generation:
                return
            if clean or state.leaving:
                del self._ranks[job, rank]
            else:
                self._ranks[job, rank] = replace(state, ended_monotonic_ns=state.ended_monotonic_ns or at_monotonic_ns)
            self.changes += 1
        self.save()

    def leaving(self, job: str, generation: int, rank: int) -> None:
        """A rank said goodbye."""
        with self._lock:
            state = self._ranks.get((job, rank))
            if state is not None and state.generation == generation:
                self._ranks[job, rank] = replace(state, leaving=True)

    def forget(self, job: str, rank: int) -> None:
        """Stop reporting a rank."""
        with self._lock:
            self._ranks.pop((job, rank), None)
            self.changes += 1
        self.save()

    def _drop_older(self, job: str, generation: int) -> None:
        """Ranks that the new generation no longer runs on this node."""
        for key in [k for k, state in self._ranks.items() if k[0] == job and state.generation < generation]:
            del self._ranks[key]

    def save(self) -> None:
        """Keep pids over a restart of the agent: a frozen process says no second hello."""
        if self._path is None:
            return
        rows = [
            _SavedRank(s.job, s.generation, s.rank, s.world, s.local_rank, s.pid) for s in self.all() if not s.leaving
        ]
        scratch = self._path.with_suffix(f".{threading.get_ident()}.tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(_Saved(self._clock.now_ns(), rows)))
            os.replace(scratch, self._path)
        except OSError:
            scratch.unlink(missing_ok=True)  # a full disk costs the memory over restarts, nothing else

    def _load(self, path: Path) -> None:
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        except (OSError, msgspec.DecodeError):
            return
        if abs(self._clock.now_ns() - saved.at_ns) > BELIEVED_NS:
            return
        for row in saved.ranks:
            self._ranks[row.job, row.rank] = RankState(
                row.job, row.generation, row.rank, row.world, row.local_rank, row.pid
            )
