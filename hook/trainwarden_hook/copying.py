"""Copying tensors into a save: at once, or piece by piece beside the next forward and backward pass.

``memmove`` of a large piece goes around the caches and releases the interpreter, which a tensor's own
copy does at half the speed; that one is left what is strided or on a device.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 << 20
MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor and where it goes; ``name`` is its path in the state, ``stable`` that nothing but the optimizer's
    step changes it, ``watched`` whose version counter tells that something did (a DTensor for its local part).
    """

    name: str
    offset: int
    tensor: torch.Tensor
    watched: torch.Tensor
    stable: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def address_of(view: memoryview) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in one row in this process's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_piece(piece: Piece, target: memoryview, go_on: Callable[[], bool] = lambda: True) -> bool:
    """Copy one tensor to ``target`` (just its bytes); ``False`` when ``go_on`` said no on the way."""
    import torch

    if not piece.size:
        return True
    if not is_plain(piece.tensor):
        flat = torch.frombuffer(target, dtype=piece.tensor.dtype)
        flat.view(piece.tensor.shape).copy_(piece.tensor)
        return go_on()
    source, goal = piece.tensor.data_ptr(), address_of(target)
    for start in range(0, piece.size, CHUNK_BYTES):
        ctypes.memmove(goal + start, source + start, min(CHUNK_BYTES, piece.size - start))
        if not go_on():
            return False
    return True


def copy_all(pieces: list[Piece], data: memoryview) -> None:
    """Copy every piece now, on as many threads as pay; what is on a device in this thread, whose stream made it."""
    jobs = [(piece, data[piece.offset : piece.offset + piece.size]) for piece in pieces]
    plain = [job for job in jobs if is_plain(job[0].tensor)]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    if threads < 2 or sum(piece.size for piece, _ in plain) < 2 * CHUNK_BYTES:
        threads, plain = 1, []
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(copy_piece, part, at) for whole, target in plain for part, at in _cut(whole, target)]
        for piece, target in jobs:
            if not plain or not is_plain(piece.tensor):
                copy_piece(piece, target)
        for done in waiting:
            done.result()


def move_all(moves: list[tuple[memoryview, memoryview]]) -> None:
    """Copy bytes, (target, source) each, on as many threads as pay."""
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    if threads < 2 or sum(len(source) for _, source in moves) < 2 * CHUNK_BYTES:
        for target, source in moves:
            target[:] = source
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_move, target, source) for target, source in moves]:
            done.result()


def _move(target: memoryview, source: memoryview) -> None:
    ctypes.memmove(address_of(target), address_of(source), len(source))


def _cut(piece: Piece, target: memoryview) -> list[tuple[Piece, memoryview]]:
    """Parts of a large plain tensor, so that one matrix does not keep a single thread busy."""
    item = piece.tensor.element_size()
    if piece.size <= CHUNK_BYTES or not is_plain(piece.tensor):
        return [(piece, target)]
    flat, step = piece.tensor.view(-1), CHUNK_BYTES // item
    return [
        (
            Piece(piece.name, 0, flat[start : start + step], piece.watched),
            target[start * item : (start + step) * item],
        )
        for start in range(0, flat.numel(), step)
    ]


class Overlap:
    """The stable tensors of one save, copied by a thread of its own while the next step computes.

    What only the optimizer's step changes may be copied until that step begins: `wait` there. Should
    anything else have changed a tensor meanwhile, its version counter says so, and the save is no save.
    """

    def __init__(self, pieces: list[Piece], data: memoryview) -> None:
        self._pieces = pieces
        self._data = data
        self._versions = [piece.watched._version for piece in pieces]
        self._stream = side_stream([piece.tensor for piece in pieces])
        self._done = threading.Event()
        self._wait_began: float | None = None
        self._ended = 0.0
        self.problem = ""
        threading.Thread(target=self._run, name="trainwarden-copy", daemon=True).start()

    @property
    def waited_ms(self) -> float:
        """How long the training thread stood in `wait`; complete once the copy is."""
        began = self._wait_began
        return 0.0 if began is None else max(0.0, (self._ended - began) * 1e3)

    def _run(self) -> None:
        try:
            with self._stream:
                for piece in self._pieces:
                    copy_piece(piece, self._data[piece.offset : piece.offset + piece.size])
            self.problem = self._changed()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        self._pieces = []
        self._ended = time.perf_counter()
        self._done.set()

    def finish(self) -> None:
        """Wait for the copy in the background; nobody is stalled by this."""
        self._done.wait()

    def _changed(self) -> str:
        for piece, version in zip(self._pieces, self._versions, strict=True):
            if piece.watched._version != version:
                return f"{piece.name} was changed before its copy was complete"
        return ""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Called before the tensors change: the rest of the copy is the stall that is seen."""
        if not self._done.is_set() and self._wait_began is None:
            self._wait_began = time.perf_counter()
        return self._done.wait(timeout_s)


def side_stream(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """A CUDA stream that begins where the training stream is now, so that the copy runs beside what follows."""
    on_device = next((tensor for tensor in tensors if tensor.device.type == "cuda"), None)
    if on_device is None:
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(on_device.device)
    stream.wait_stream(torch.cuda.current_stream(on_device.device))
    return torch.cuda.stream(stream)
