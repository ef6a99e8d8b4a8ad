"""The library by ctypes: each function checked, an error raised as `OSError` with the kernel's number."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

from collectors.verbs import abi

DEFAULT_PATH = "libibverbs.so.1"


class LibraryError(Exception):
    """The library is not there, or is none."""


class NoWayError(OSError):
    """No address handle can be had: the way to that peer is not known, and the port is as good as before."""


class Verbs:
    """libibverbs.

    Parameters
    ----------
    path
        File name or path of the shared library.

    Raises
    ------
    LibraryError
        From the constructor, when it cannot be loaded or lacks a function.
    """

    def __init__(self, path: str = DEFAULT_PATH) -> None:
        try:
            library = ctypes.CDLL(path, use_errno=True)
            self._calls = {name: _typed(library, name) for name in abi.SYMBOLS}
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{path} cannot be used: {error}") from None

    def made(self, name: str, *arguments: Any) -> Any:
        """What a function that gives a pointer gives. Raises `OSError` when that is none."""
        ctypes.set_errno(0)
        found = self._calls[name](*arguments)
        if not found:
            raise failure(name, ctypes.get_errno())
        return found

    def done(self, name: str, *arguments: Any) -> None:
        """Call a function that answers 0 or an error number, or -1 with errno. Raises `OSError`."""
        ctypes.set_errno(0)
        code = self._calls[name](*arguments)
        if code:
            raise failure(name, code if code > 0 else ctypes.get_errno())

    def answer(self, name: str, *arguments: Any) -> Any:
        """Whatever a function answers."""
        return self._calls[name](*arguments)

    def open(self, device: str) -> Any:
        """The context of the device with that name. Raises `OSError`: ENODEV when there is none."""
        count = ctypes.c_int()
        devices = self.made("ibv_get_device_list", ctypes.byref(count))
        try:
            for index in range(count.value):
                if self.answer("ibv_get_device_name", devices[index]) == device.encode():
                    return self.made("ibv_open_device", devices[index])
        finally:
            self.answer("ibv_free_device_list", devices)
        raise failure(f"no device {device}", errno.ENODEV)


def failure(what: str, number: int) -> OSError:
    """The error of a call; EIO when the library names none."""
    number = number or errno.EIO
    return OSError(number, f"{what}: {os.strerror(number)}")


def _typed(library: ctypes.CDLL, name: str) -> Any:
    call = getattr(library, name)
    call.restype, call.argtypes = abi.SYMBOLS[name]
    return call
