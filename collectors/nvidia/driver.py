"""Opening the driver once and finding its GPUs. A GPU keeps the name it was first seen with: the driver's indices move when one is gone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from collectors.nvidia import abi
from collectors.nvidia.decode import pci_address
from collectors.nvidia.gpu import Identity
from collectors.nvidia.library import Library

REOPEN_EVERY_NS = 30 * 10**9

Found = tuple[ctypes.c_void_p, Identity]


class Driver:
    """The library, opened once. Opening it in every loop leaks descriptors; it is opened again only when it lost its driver.

    Parameters
    ----------
    names
        Names by UUID from an earlier life of this process.
    """

    def __init__(self, library: Library, names: Mapping[str, str]) -> None:
        self.library = library
        self.names = dict(names)
        self.version = ""
        self.code = abi.UNINITIALIZED
        self._opened_ns: int | None = None

    @property
    def open(self) -> bool:
        """Whether calls make sense."""
        return self.code == abi.SUCCESS

    def ensure_open(self, now_ns: int) -> bool:
        """Open it when it is not, at most twice a minute; whether it was opened now."""
        if self.open or (self._opened_ns is not None and now_ns - self._opened_ns < REOPEN_EVERY_NS):
            return False
        self._opened_ns = now_ns
        self.code = self.library.init()
        if self.open:
            self.version = self.library.text("SystemGetDriverVersion")
        return self.open

    def lost(self, code: int) -> None:
        """The driver went away under us: close, to open again later."""
        if self.open:
            self.library.shutdown()
        self.code = code

    def find(self) -> list[Found] | None:
        """The GPUs there are, by the driver's index; None when the driver is gone. One that is lost has no handle and is left out."""
        count = ctypes.c_uint()
        code = self.library.newest("DeviceGetCount_v2", "DeviceGetCount")(ctypes.byref(count))
        if code != abi.SUCCESS:
            self.lost(code)
            return None
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            code = self.library.newest("DeviceGetHandleByIndex_v2", "DeviceGetHandleByIndex")(
                index, ctypes.byref(handle)
            )
            identity = self._identity(index, handle) if code == abi.SUCCESS else None
            if identity is not None:
                found.append((handle, identity))
        return found

    def _identity(self, index: int, handle: ctypes.c_void_p) -> Identity | None:
        """What a handle stands for; None when the GPU behind it does not even say its name: it is lost, and no new one."""
        text, pci = self.library.text, self._pci(handle)
        code, uuid = self.library.answer("DeviceGetUUID", handle)
        if code != abi.SUCCESS and code not in abi.LASTING:
            return None
        uuid = uuid or pci or f"index-{index}"
        virtual = abi.VIRTUALIZATION.get(self.library.number("DeviceGetVirtualizationMode", handle) or 0, "")
        return Identity(self._name(uuid, index), uuid, pci, text("DeviceGetName", handle), text("DeviceGetSerial", handle),
                        text("DeviceGetVbiosVersion", handle), virtual, index)  # fmt: skip

    def _pci(self, handle: ctypes.c_void_p) -> str:
        buffer = ctypes.create_string_buffer(abi.PCI_INFO.size + 64)
        code = self.library.newest("DeviceGetPciInfo_v3", "DeviceGetPciInfo_v2")(handle, buffer)
        if code != abi.SUCCESS:
            return ""
        legacy, *_, address = abi.PCI_INFO.unpack_from(buffer)
        return pci_address((address.split(b"\0")[0] or legacy.split(b"\0")[0]).decode("ascii", "replace"))

    def _name(self, uuid: str, index: int) -> str:
        if uuid not in self.names:
            taken = set(self.names.values())
            numbers = (number for number in range(index, index + len(taken) + 1) if f"gpu{number}" not in taken)
            self.names[uuid] = f"gpu{next(numbers)}"
        return self.names[uuid]
