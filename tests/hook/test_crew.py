"""The copying threads: every byte, whatever the sizes; at idle priority only where training goes on; nothing lost without a compiler."""

from __future__ import annotations

import ctypes
import itertools
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainwarden_hook import crew, native, sums
from trainwarden_hook.crew import BLOCK_BYTES, PART_BYTES, BlockSums, Crew, Job

NOISE = random.Random(11).randbytes(3 * PART_BYTES + 99)


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    library = str(tmp_path_factory.mktemp("crew") / "copy.so")
    native.build(crew.SOURCE, library, (*crew.FLAGS, "-Wall", "-Werror"))
    return Crew(library)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(NOISE)), max_size=4),
    shift=st.integers(0, 65),
    extra=st.integers(0, 3),
    idle=st.booleans(),
)
def test_every_byte_is_copied_and_no_other(threads: Crew, cuts: list[int], shift: int, extra: int, idle: bool) -> None:
    source = ctypes.create_string_buffer(NOISE, len(NOISE))
    target = ctypes.create_string_buffer(b"\xee" * (len(NOISE) + 200), len(NOISE) + 200)
    edges = sorted({0, len(NOISE), *cuts})
    start, goal = ctypes.addressof(source), ctypes.addressof(target) + shift
    job = Job(threads, [(goal + at, start + at, end - at) for at, end in itertools.pairwise(edges)], idle)
    job.help(extra)
    job.wait()
    assert target.raw == b"\xee" * shift + NOISE + b"\xee" * (200 - shift)


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 4 * BLOCK_BYTES + 777), max_size=3),
    shift=st.sampled_from([0, 8, 3, 4096]),
    extra=st.integers(-1, 1),
)
def test_sums_taken_on_the_way_are_those_of_what_was_copied(
    threads: Crew, cuts: list[int], shift: int, extra: int
) -> None:
    """Whatever the pieces, wherever they lie, and whoever copied them: the thread that sums, or helpers that do not."""
    size = 4 * BLOCK_BYTES + 777
    source, target = (ctypes.create_string_buffer(size + 4096) for _ in range(2))
    ctypes.memmove(ctypes.addressof(source) + shift, (NOISE * 7)[:size], size)
    payload = memoryview(target).cast("B")[:size]
    edges, blocks = sorted({0, size, *cuts}), BlockSums(payload)
    start, goal = ctypes.addressof(source) + shift, ctypes.addressof(target)
    moves = [(goal + at, start + at, end - at) for at, end in itertools.pairwise(edges)]
    job = Job(threads, moves, True, blocks)
    if extra >= 0:
        job.help(extra)
    job.wait()
    assert payload == (NOISE * 7)[:size]
    if shift % 8 == 0 and extra < 0 and not cuts:
        assert list(blocks.known) == [1] * 4, "nothing is looked at twice"
    threads.complete(blocks)
    assert all(blocks.known)
    assert zlib.crc32(blocks.sums) == sums._by_torch(payload[: 4 * BLOCK_BYTES], 0)


def test_help_that_comes_after_the_end_does_nothing(threads: Crew) -> None:
    job = Job(threads, [], idle=True)
    job.wait()
    job.help(2)
    assert job.handle is None


def test_the_library_is_built_once_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWARDEN_RUN_DIR", str(tmp_path))
    crew._open()
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    monkeypatch.setattr(crew, "build", lambda *_: pytest.fail("it was built a second time"))
    crew._open()


@pytest.mark.parametrize(
    ("source", "path", "reason"),
    [("int nothing(void) { return 0; }", "", "no C compiler"), ("no C at all", "/usr/bin:/bin", "refuses the source")],
)
def test_no_library_is_told_once_and_copies_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str, path: str, reason: str
) -> None:
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("TRAINWARDEN_RUN_DIR", raising=False)
    for name, value in {"SOURCE": source, "_crew": None, "_tried": False}.items():
        monkeypatch.setattr(crew, name, value)
    assert crew.load() is None
    assert crew.load() is None
    assert [reason in record.getMessage() for record in caplog.records] == [True]
