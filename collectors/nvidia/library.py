"""The driver library by ctypes: any path, any symbol prefix, symbols that an older release lacks answered instead of raised."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from collectors.nvidia import abi

DEFAULT_PATH, DEFAULT_PREFIX = "libnvidia-ml.so.1", "nvml"

Call = Callable[..., int]


class LibraryError(Exception):
    """The library cannot be used; `reason` is the code of the gap."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _absent(*arguments: Any) -> int:
    del arguments
    return abi.FUNCTION_NOT_FOUND


class Library:
    """NVML, or a look-alike that names its functions differently (Alibaba PPU: ``hgml``).

    Parameters
    ----------
    path
        File name or path of the shared library.
    prefix
        What stands where NVML's functions have ``nvml``.

    Raises
    ------
    LibraryError
        From the constructor, when the library is not there.
    """

    def __init__(self, path: str = DEFAULT_PATH, prefix: str = DEFAULT_PREFIX) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise LibraryError("no_library", f"{path} cannot be loaded: {error}") from None
        self._prefix = prefix
        self._calls: dict[str, Call] = {}

    def call(self, name: str) -> Call:
        """The function `name` without its prefix; one that is not there answers FUNCTION_NOT_FOUND."""
        found = self._calls.get(name)
        if found is None:
            found = self._calls[name] = getattr(self._library, self._prefix + name, _absent)
        return found

    def has(self, name: str) -> bool:
        """Whether this release knows the function."""
        return self.call(name) is not _absent

    def newest(self, *names: str) -> Call:
        """The first of `names` that this release knows: newest first."""
        return self.call(next((name for name in names if self.has(name)), names[0]))

    def init(self) -> int:
        """Open the driver."""
        return self.newest("Init_v2", "Init")()

    def shutdown(self) -> int:
        """Close the driver, so that it can be opened anew."""
        return self.call("Shutdown")()

    def text(self, name: str, *handle: Any) -> str:
        """A string of at most 95 characters; empty when there is none."""
        return self.answer(name, *handle)[1]

    def answer(self, name: str, *handle: Any) -> tuple[int, str]:
        """(result code, string)."""
        buffer = ctypes.create_string_buffer(96)
        code = self.call(name)(*handle, buffer, 96)
        return code, buffer.value.decode("utf-8", "replace") if code == abi.SUCCESS else ""

    def number(self, name: str, *arguments: Any) -> int | None:
        """An unsigned number; None when there is none."""
        value = ctypes.c_uint()
        return value.value if self.call(name)(*arguments, ctypes.byref(value)) == abi.SUCCESS else None


class Buffer:
    """Memory that a call fills, of one structure's size, and more than that behind it.

    A library of another version may write a longer structure than the one asked for: what it writes then lands in the spare bytes and
    not in the interpreter's heap.
    """

    SPARE_BYTES = 64

    def __init__(self, layout: struct.Struct, version: int = 0) -> None:
        self._layout = layout
        self._head = struct.pack("@I", abi.versioned(layout, version)) if version else b""
        self._bytes = ctypes.create_string_buffer(layout.size + self.SPARE_BYTES)
        self.reference = ctypes.byref(self._bytes)

    def prepare(self) -> None:
        """Write the version word again: the call may have overwritten it."""
        if self._head:
            ctypes.memmove(self._bytes, self._head, len(self._head))

    def values(self) -> tuple[Any, ...]:
        """The structure's fields."""
        return self._layout.unpack_from(self._bytes)
