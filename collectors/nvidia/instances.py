"""MIG: the parts of a GPU, as devices ``gpu0/gi1.ci0``. The GPU itself gives power, heat and errors; a part its memory and activity."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping

from collectors.nvidia import abi
from collectors.nvidia.decode import NAN
from collectors.nvidia.gpm import ACTIVITY, Gpm
from collectors.nvidia.gpu import Gpu
from collectors.nvidia.library import Library

MOST = 16


class Instance:
    """One part of a GPU. Its UUID is another one each time it is made, its place is not."""

    def __init__(
        self, library: Library, name: str, handle: ctypes.c_void_p, gpu_instance: int, columns: int, with_gpm: bool
    ) -> None:
        self.name = name
        self.handle = handle
        self.uuid = library.text("DeviceGetUUID", handle)
        self.profile = library.text("DeviceGetName", handle)
        self.row = array("f", [NAN] * columns)
        self.gpm = Gpm(library, gpu_instance) if with_gpm else None

    def read(self, gpu: Gpu, at: Mapping[str, int]) -> None:
        """Memory, processes and, where the chip tells it for a part, activity."""
        row = self.row
        total, used, reserved, ratio = gpu.memory(self.handle)
        row[at["fb_total_bytes"]], row[at["fb_used_bytes"]] = total, used
        row[at["fb_reserved_bytes"]], row[at["fb_used_ratio"]] = reserved, ratio
        row[at["compute_processes_count"]] = gpu.processes(self.handle)
        if self.gpm is None or not self.gpm.supported(gpu.handle):
            return
        _, columns = self.gpm.read(gpu.handle)
        for column in ACTIVITY:
            row[at[column]] = columns.get(column, NAN)

    def close(self) -> None:
        """Give its samples back."""
        if self.gpm is not None:
            self.gpm.free()


class Instances:
    """The parts of one GPU, as they are now."""

    def __init__(self, library: Library, gpu: Gpu, at: Mapping[str, int], with_gpm: bool) -> None:
        self._library = library
        self._gpu = gpu
        self._at = at
        self._with_gpm = with_gpm
        self.present: dict[str, Instance] = {}

    def refresh(self) -> bool:
        """Look which parts there are; whether that changed."""
        found = self._find() if self._gpu.mig else {}
        before = {name: part.uuid for name, part in self.present.items()}
        if {name: part.uuid for name, part in found.items()} == before:
            self._drop(found)
            return False
        self._drop(self.present)
        self.present = found
        return True

    def read(self) -> None:
        """Read every part."""
        for part in self.present.values():
            part.read(self._gpu, self._at)

    def close(self) -> None:
        """Give everything back."""
        self._drop(self.present)
        self.present = {}

    def _drop(self, parts: Mapping[str, Instance]) -> None:
        for part in parts.values():
            part.close()

    def _find(self) -> dict[str, Instance]:
        found: dict[str, Instance] = {}
        most = self._library.number("DeviceGetMaxMigDeviceCount", self._gpu.handle) or 0
        for index in range(min(most, MOST)):
            handle = ctypes.c_void_p()
            if (
                self._library.call("DeviceGetMigDeviceHandleByIndex")(self._gpu.handle, index, ctypes.byref(handle))
                != abi.SUCCESS
            ):
                continue  # places without a part are refused
            gpu_instance = self._library.number("DeviceGetGpuInstanceId", handle)
            compute_instance = self._library.number("DeviceGetComputeInstanceId", handle)
            name = f"{self._gpu.identity.name}/gi{gpu_instance}.ci{compute_instance}"
            if gpu_instance is not None:
                found[name] = Instance(self._library, name, handle, gpu_instance, len(self._at), self._with_gpm)
        return found
