"""Page-locked buffers: locked once, released before the mapping goes, and no save is lost for want of a lock."""

from __future__ import annotations

import logging
import sys
from mmap import mmap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trainwarden_hook import copying, pinning
from trainwarden_hook.copying import Piece
from trainwarden_hook.memory import Buffer


class Cuda:
    """The two calls, written down in order."""

    def __init__(self, answer: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.answer = answer

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        self.calls.append(("lock", size))
        self.address = address
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        assert address == self.address
        self.calls.append(("release", 0))
        return 0


def test_a_buffer_is_locked_once_and_released_before_a_larger_one_takes_its_place(tmp_path: Path) -> None:
    buffer, cuda = Buffer(str(tmp_path / "a")), Cuda()
    buffer.page_lock(cuda)
    assert cuda.calls == []  # nothing is mapped yet
    buffer.prepare(8192)
    for _ in range(3):
        buffer.begin(8192)
        buffer.page_lock(cuda)
    assert cuda.calls == [("lock", 8192)]
    buffer.begin(20480)
    buffer.page_lock(cuda)
    assert cuda.calls == [("lock", 8192), ("release", 0), ("lock", 20480)]


def test_without_a_gpu_nothing_is_asked(tmp_path: Path) -> None:
    buffer = Buffer(str(tmp_path / "a"))
    buffer.prepare(4096)
    buffer.page_lock(pinning.runtime())  # here: no GPU
    assert not pinning.Pin().held


def test_a_refused_lock_is_said_once_and_the_buffer_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer, cuda = Buffer(str(tmp_path / "a")), Cuda(answer=2)
    buffer.prepare(4096)
    with caplog.at_level(logging.WARNING):
        buffer.page_lock(cuda)
        buffer.page_lock(cuda)
    assert cuda.calls == [("lock", 4096)]
    assert [record.getMessage() for record in caplog.records] == [
        "a save buffer of 4096 bytes cannot be page-locked (CUDA error 2): saves from the GPU are slower"
    ]
    buffer.begin(4096)[8:16] = b"12345678"


def test_the_runtime_is_asked_on_the_device_of_the_thread_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *error: object) -> None:
            entered.append(-1)

    raw, fake = Cuda(), ModuleType("torch")
    fake.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True,
        is_initialized=lambda: True,
        current_device=lambda: 3,
        device=Device,
        cudart=lambda: raw,
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    cuda = pinning.runtime()
    assert cuda is not None
    pin = pinning.Pin()
    pin.hold(mmap(-1, 4096), cuda)
    assert pin.held
    pin.release()
    assert (raw.calls, entered) == ([("lock", 4096), ("release", 0)], [3, -1, 3, -1])
    fake.cuda.is_initialized = lambda: False
    assert pinning.runtime() is None


def test_copies_from_a_device_are_waited_for_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU here: host memory stands in for the device, and the wait is only counted."""
    waits: list[Any] = []
    monkeypatch.setattr(copying, "gpu_of", lambda tensors: torch.device("cpu"))
    sources = [
        torch.arange(12, dtype=torch.float32).view(3, 4).t(),
        torch.arange(6, dtype=torch.float32).view(2, 3).t(),
    ]
    target = bytearray(sum(tensor.nbytes for tensor in sources))
    pieces = [Piece("a", 0, sources[0], sources[0]), Piece("b", sources[0].nbytes, sources[1], sources[1])]
    monkeypatch.setattr(copying, "settle", lambda device: waits.append((device, bytes(target))))
    copying.copy_all(pieces, memoryview(target))
    whole = b"".join(tensor.contiguous().numpy().tobytes() for tensor in sources)
    assert waits == [(torch.device("cpu"), whole)]
