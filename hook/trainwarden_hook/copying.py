"""Copying tensors into a save: at once, or piece by piece beside the next forward and backward pass.

What lies in one row in this process's memory is copied by the threads of `crew`; where that could not be built, by ``memmove``
(which releases the interpreter, and a tensor's own copy takes twice as long). That one is left what is strided or on a device.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwarden_hook.crew import PART_BYTES, BlockSums, Job, Move, ready, threads_that_pay

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 << 20


@dataclass(slots=True)
class Piece:
    """One tensor and where it goes; ``name`` is its path in the state, ``stable`` that nothing but the optimizer's
    step changes it, ``watched`` whose version counter tells that something did (a DTensor for its local part).
    """

    name: str
    offset: int
    tensor: torch.Tensor
    watched: torch.Tensor
    stable: bool = False
    size: int = -1
    """Bytes."""

    def __post_init__(self) -> None:
        if self.size < 0:
            self.size = self.tensor.nbytes


def address_of(view: memoryview) -> int:
    """Where a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in one row in this process's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy_piece(
    piece: Piece, target: memoryview, go_on: Callable[[], bool] = lambda: True, unwaited: torch.device | None = None
) -> bool:
    """Copy one tensor to ``target`` (just its bytes); ``False`` when ``go_on`` said no on the way. A copy from the device
    ``unwaited`` is only begun, see `settle`.
    """
    import torch

    if not piece.size:
        return True
    if not is_plain(piece.tensor):
        flat = torch.frombuffer(target, dtype=piece.tensor.dtype)
        flat.view(piece.tensor.shape).copy_(piece.tensor, non_blocking=piece.tensor.device == unwaited)
        return go_on()
    source, goal = piece.tensor.data_ptr(), address_of(target)
    for start in range(0, piece.size, CHUNK_BYTES):
        ctypes.memmove(goal + start, source + start, min(CHUNK_BYTES, piece.size - start))
        if not go_on():
            return False
    return True


def copy_all(pieces: list[Piece], data: memoryview) -> None:
    """Copy every piece now, on as many threads as pay; what is on a device in this thread, whose stream made it."""
    plain = [piece for piece in pieces if piece.size and is_plain(piece.tensor)]
    rest = [piece for piece in pieces if piece.size and not is_plain(piece.tensor)]
    if not rest:
        _copy_plain(plain, data)
        return
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(_copy_plain, plain, data)
        _copy_waiting_once(rest, data)
        beside.result()


def _copy_waiting_once(pieces: list[Piece], data: memoryview) -> None:
    """One after the other on the present stream, waited for at the end: a wait for each would let the device rest between them."""
    device = gpu_of([piece.tensor for piece in pieces])
    for piece in pieces:
        copy_piece(piece, data[piece.offset : piece.offset + piece.size], unwaited=device)
    settle(device)


def gpu_of(tensors: list[torch.Tensor]) -> torch.device | None:
    """The GPU on which the first of the tensors that lie on one does."""
    return next((tensor.device for tensor in tensors if tensor.device.type == "cuda"), None)


def settle(device: torch.device | None) -> None:
    """Wait until what was begun on the present stream of the device is done."""
    if device is not None:
        import torch

        torch.cuda.current_stream(device).synchronize()


def moves_of(plain: list[Piece], data: memoryview) -> list[Move]:
    """Addresses for `crew`; none of the pieces is empty."""
    start = address_of(data) if plain else 0
    return [(start + piece.offset, piece.tensor.data_ptr(), piece.size) for piece in plain]


def _copy_plain(plain: list[Piece], data: memoryview) -> None:
    threads, crew = _threads_for(sum(piece.size for piece in plain)), ready()
    if crew is not None:
        crew.copy(moves_of(plain, data), threads)
        return
    jobs = [(piece, data[piece.offset : piece.offset + piece.size]) for piece in plain]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(copy_piece, part, at) for whole, target in jobs for part, at in _cut(whole, target)]:
            done.result()


def _threads_for(size: int) -> int:
    return min(threads_that_pay(), 1 + size // (2 * PART_BYTES))


def move_all(moves: list[tuple[memoryview, memoryview]]) -> None:
    """Copy bytes, (target, source) each, on as many threads as pay."""
    threads, crew = _threads_for(sum(len(source) for _, source in moves)), ready()
    if threads < 2:
        for target, source in moves:
            target[:] = source
        return
    if crew is not None:
        crew.copy([(address_of(to), address_of(source), len(source)) for to, source in moves if len(source)], threads)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_move, target, source) for target, source in moves]:
            done.result()


def _move(target: memoryview, source: memoryview) -> None:
    ctypes.memmove(address_of(target), address_of(source), len(source))


def _cut(piece: Piece, target: memoryview) -> list[tuple[Piece, memoryview]]:
    """Parts of a large plain tensor, so that one matrix does not keep a single thread busy."""
    item = piece.tensor.element_size()
    if piece.size <= CHUNK_BYTES:
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

    Tensors in host memory are copied when a core is idle, and what is left when the optimizer comes by all that can help.
    What only the optimizer's step changes may be copied until that step begins: `wait` there. Should
    anything else have changed a tensor meanwhile, its version counter says so, and the save is no save.

    Parameters
    ----------
    data
        What the pieces' offsets count from, the end of ``payload``.
    """

    def __init__(self, pieces: list[Piece], data: memoryview, payload: memoryview) -> None:
        self._pieces = pieces
        self._data = data
        self._versions = [piece.watched._version for piece in pieces]
        self._stream = side_stream([piece.tensor for piece in pieces])
        self._done = threading.Event()
        self._wait_began: float | None = None
        self._ended = 0.0
        self.problem = ""
        crew = ready() if all(is_plain(piece.tensor) for piece in pieces) else None
        self.blocks = BlockSums(payload) if crew is not None else None
        moves = moves_of([piece for piece in pieces if piece.size], data) if crew is not None else []
        self._job = Job(crew, moves, idle=True, blocks=self.blocks) if crew is not None else None
        threading.Thread(target=self._run, name="trainwarden-copy", daemon=True).start()

    @property
    def waited_ms(self) -> float:
        """How long the training thread stood in `wait`; complete once the copy is."""
        began = self._wait_began
        return 0.0 if began is None else max(0.0, (self._ended - began) * 1e3)

    def _run(self) -> None:
        try:
            self._copy()
            self.problem = self._changed()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        self._pieces = []
        self._ended = time.perf_counter()
        self._done.set()

    def _copy(self) -> None:
        if self._job is not None:
            self._job.wait()
            return
        with self._stream:
            _copy_waiting_once(self._pieces, self._data)

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
            if self._job is not None:
                # The idle thread takes part; it has a core now that this one's helpers are done with theirs.
                self._job.help(threads_that_pay() - 1)
        return self._done.wait(timeout_s)


def side_stream(tensors: list[torch.Tensor]) -> AbstractContextManager[Any]:
    """A CUDA stream that begins where the training stream is now, so that the copy runs beside what follows."""
    device = gpu_of(tensors)
    if device is None:
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
