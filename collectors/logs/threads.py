"""Where the threads of a process are: py-spy's stacks, else what the kernel says of each thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

MAX_THREADS = 512
MAX_FRAMES = 40
MAX_FILE_BYTES = 16 * 1024
COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|(?:^|_)(?:isend|irecv|send|recv)$|batch_isend|nccl|hccl|c10d",
    re.IGNORECASE,
)
TELLING_STATES = ("T", "t", "D", "Z")
_KERNEL_FRAME = re.compile(r"\] (?P<function>[\w.]{1,80})")


@dataclass(frozen=True)
class Place:
    """Where one thread is.

    Attributes
    ----------
    frames
        Innermost first: ``function (file:line)``, or functions of the kernel.
    state
        Of the scheduler (R, S, D, ...), or ``active`` and ``idle`` where py-spy says it.
    """

    thread: int
    name: str
    state: str
    frames: tuple[str, ...]

    @property
    def collective(self) -> str:
        """The innermost frame that is a collective, empty for none."""
        return next((frame for frame in self.frames if COLLECTIVE.search(frame.partition(" ")[0])), "")


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    short_filename: str | None = None
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame]
    thread_id: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False


_spy = msgspec.json.Decoder(list[_Thread])


class ThreadError(Exception):
    """The threads of a process could not be read; the message says why."""


def from_py_spy(output: bytes) -> list[Place]:
    """Threads in the output of ``py-spy dump --json``, the main thread first. Raises `ThreadError`."""
    try:
        threads = _spy.decode(output)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ThreadError(f"py-spy said something else than JSON stacks: {error}") from None
    places = [
        Place(
            thread.os_thread_id or thread.thread_id, (thread.thread_name or "")[:60], "active" if thread.active else "idle",
            tuple(f"{f.name[:100]} ({(f.short_filename or f.filename)[-80:]}:{f.line})" for f in thread.frames[:MAX_FRAMES]),
        )
        for thread in threads[:MAX_THREADS]
    ]  # fmt: skip
    return sorted(places, key=lambda place: place.name != "MainThread")


def from_kernel(pid: int, root: str = "") -> list[Place]:
    """What the kernel says of each thread of a process, the main thread first. Raises `ThreadError` when it is gone.

    Kernel stacks need CAP_SYS_ADMIN; without it there is the function a thread waits in, or only its state.
    """
    tasks = Path(f"{root}/proc/{pid}/task")
    try:
        numbers = sorted(int(name) for name in os.listdir(tasks) if name.isdecimal())
    except OSError as error:
        raise ThreadError(f"threads of process {pid}: {error.strerror}") from None
    places = [_task(tasks / str(number), number) for number in numbers[:MAX_THREADS]]
    return [place for place in places if place.state]


def with_kernel_state(places: list[Place], pid: int, root: str = "") -> list[Place]:
    """The places with the first one's state as the kernel has it, where that says more: py-spy calls a stopped process idle."""
    if not places:
        return places
    first = places[0]
    status = _read(Path(f"{root}/proc/{pid}/task/{first.thread}/status")) or _read(Path(f"{root}/proc/{pid}/status"))
    state = status.partition("\nState:\t")[2][:1]
    return [replace(first, state=state), *places[1:]] if state in TELLING_STATES else places


def _task(directory: Path, number: int) -> Place:
    status = dict(line.split(":\t", 1) for line in _read(directory / "status").splitlines() if ":\t" in line)
    stack = [found["function"] for found in _KERNEL_FRAME.finditer(_read(directory / "stack"))]
    wchan = _read(directory / "wchan").strip()
    call = _read(directory / "syscall").split(" ", 1)[0].strip()
    frames = stack or ([wchan] if wchan not in ("", "0") else [])
    frames += [f"syscall_{call}"] if call.lstrip("-").isdecimal() else ([call] if call else [])
    return Place(number, status.get("Name", "")[:60], status.get("State", "")[:1], tuple(frames[:MAX_FRAMES]))


def _read(path: Path) -> str:
    """A file of /proc; empty when we may not read it or the thread is gone."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Alike:
    """Ranks whose threads are at the same place."""

    ranks: tuple[int, ...]
    frames: tuple[str, ...]
    state: str
    collective: str


def alike(by_rank: dict[int, list[Place]]) -> list[Alike]:
    """Ranks by where their telling thread is, the largest group first: the odd one out stands at the end."""
    found: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for rank, places in sorted(by_rank.items()):
        place = telling(places)
        if place is not None:
            found.setdefault((place.frames, place.state), []).append(rank)
    groups = [Alike(tuple(ranks), frames, state, _collective(frames)) for (frames, state), ranks in found.items()]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def telling(places: Iterable[Place]) -> Place | None:
    """The thread to look at: the main one."""
    return next(iter(places), None)


def _collective(frames: tuple[str, ...]) -> str:
    return Place(0, "", "", frames).collective
