"""Page-locked save buffers where tensors lie on a GPU: the device writes into shared memory by itself, at the bus's full rate.

Memory that is not page-locked is copied through a small buffer of the driver, by a processor core and at a fraction of the rate. The pages
of a segment belong to every process that maps it; the lock is this process's alone, and ends with it. What cannot be locked
(``ulimit -l`` does not bind the driver, a container's memory may) is copied all the same, slower.
"""

from __future__ import annotations

import logging
import sys
import threading
from ctypes import addressof, c_char
from mmap import mmap
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Runtime(Protocol):
    """Of the CUDA runtime what is used here (``torch.cuda.cudart()``); both answer 0 for success, maybe as an enumeration."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
        """Lock pages and make them known to the devices."""

    def cudaHostUnregister(self, address: int) -> Any:
        """Take that back; the pages have to be mapped still."""


class _OfDevice:
    """The runtime, asked on the device of the training thread: from another thread it would begin to use the first GPU of the node."""

    def __init__(self, torch: Any) -> None:
        self._torch, self._device = torch, torch.cuda.current_device()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
        with self._torch.cuda.device(self._device):
            return self._torch.cuda.cudart().cudaHostRegister(address, size, flags)

    def cudaHostUnregister(self, address: int) -> Any:
        with self._torch.cuda.device(self._device):
            return self._torch.cuda.cudart().cudaHostUnregister(address)


def runtime() -> Runtime | None:
    """The runtime of this process, once the script itself uses a GPU; called in the training thread."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return _OfDevice(torch)


class Pin:
    """The page lock of one mapping after another.

    A mapping has to be released before it is dropped: the driver goes on writing to the old pages, and the next mapping may get the
    same address.
    """

    def __init__(self) -> None:
        self._address = 0
        self._cuda: Runtime | None = None
        self._failed = False
        self._lock = threading.Lock()

    @property
    def held(self) -> bool:
        """Whether the present mapping is locked."""
        return self._cuda is not None

    def hold(self, mapped: mmap, cuda: Runtime | None) -> None:
        """Lock a mapping, whole; nothing without a GPU, nor when it is locked already. Takes a tenth of a second for a GB, once."""
        with self._lock:
            if cuda is not None and not self.held and not self._failed:
                self._hold(mapped, cuda)

    def _hold(self, mapped: mmap, cuda: Runtime) -> None:
        address = addressof(c_char.from_buffer(mapped))
        problem = _asked(lambda: cuda.cudaHostRegister(address, len(mapped), 0))
        if problem:
            self._failed = True
            log.warning(
                "a save buffer of %d bytes cannot be page-locked (%s): saves from the GPU are slower",
                len(mapped),
                problem,
            )
            return
        self._cuda, self._address = cuda, address

    def release(self) -> None:
        """Take the lock back, before the mapping goes."""
        with self._lock:
            cuda, self._cuda = self._cuda, None
        if cuda is not None and (problem := _asked(lambda: cuda.cudaHostUnregister(self._address))):
            log.warning("the page lock of a save buffer was not taken back: %s", problem)


def _asked(call: Any) -> str:
    """What went wrong; empty if nothing did."""
    try:
        code = call()
    except RuntimeError as error:
        return str(error)
    return "" if int(code) == 0 else f"CUDA error {int(code)}"
