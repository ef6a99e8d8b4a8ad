"""Sleeping until a file is written to: the kernel's word on writing, replacing and truncating, and looking without it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collectors.logs import watch as module
from collectors.logs.watch import RESTLESS_LOOKS, Watch

LONG_S = 60.0


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Watch]]:
    path = tmp_path / "train.log"
    path.touch()
    watch = Watch([str(path), str(tmp_path / "not there yet.log")])
    yield path, watch
    watch.close()


def woken(watch: Watch, act: Callable[[], object]) -> bool:
    """Whether `wait` returns because of what is done while it waits, and not because its time is over."""
    begun_s = time.monotonic()
    actor = threading.Thread(target=act)
    actor.start()
    watch.wait(0.0, LONG_S)
    actor.join()
    return time.monotonic() - begun_s < LONG_S


def append(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("a line\n")


@pytest.mark.parametrize(
    "act",
    [
        append,
        lambda path: os.truncate(path, 0),
        lambda path: path.rename(path.with_suffix(".1")),
        lambda path: append(path.with_name("not there yet.log")),
    ],
    ids=["written", "truncated", "rotated", "came to be"],
)
def test_what_happens_to_a_file_wakes(watched: tuple[Path, Watch], act: Callable[[Path], object]) -> None:
    path, watch = watched
    assert woken(watch, lambda: act(path))


def test_after_a_rotation_the_new_file_is_watched_and_looks_come_at_their_usual_pace(
    watched: tuple[Path, Watch],
) -> None:
    path, watch = watched
    path.rename(path.with_suffix(".1"))
    append(path)
    for _ in range(RESTLESS_LOOKS + 1):
        watch.wait(0.0, LONG_S)  # none of these may last: a writer may still hold the old file
    assert woken(watch, lambda: append(path))


def test_a_neighbour_that_is_written_to_does_not_wake(watched: tuple[Path, Watch]) -> None:
    path, watch = watched
    other = path.with_name("other.log")
    append(other)
    watch.wait(0.0, 0.0)  # its coming is news, for it might have been ours
    for _ in range(RESTLESS_LOOKS + 1):
        watch.wait(0.0, 0.0)
    append(other)
    assert not watch._poll.poll(0)


def test_somebody_who_ends_it_is_heard_at_once_and_from_then_on(watched: tuple[Path, Watch]) -> None:
    _, watch = watched
    assert woken(watch, watch.wake)
    watch.wait(LONG_S, LONG_S)


def test_without_watches_every_wait_lasts_as_long_as_the_usual_pace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class NoMore:
        @staticmethod
        def inotify_init1(flags: int) -> int:
            del flags
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: NoMore)
    watch = Watch([str(tmp_path / "a.log")])
    assert watch.blind
    watch.wait(0.0, LONG_S)
    watch.close()


def test_a_folder_that_comes_later_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path = tmp_path / "job" / "train.log"
    watch = Watch([str(path)])
    watch.wait(0.0, 0.0)
    path.parent.mkdir()
    watch.wait(0.0, 0.0)
    assert woken(watch, lambda: append(path))
    watch.close()


def test_another_descriptor_wakes_too(watched: tuple[Path, Watch]) -> None:
    _, watch = watched
    read, write = os.pipe()
    watch.follow(read)
    assert woken(watch, lambda: os.write(write, b"x"))
    for descriptor in (read, write):
        os.close(descriptor)
