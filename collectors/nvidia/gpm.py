"""GPM: what the multiprocessors did between two samples (Hopper and later). Takes no profiling lock, unlike the counters of older chips."""

from __future__ import annotations

import ctypes

from collectors.nvidia import abi, decode
from collectors.nvidia.library import Library

MIB = 1024 * 1024
COLUMNS = {
    abi.GPM_SM_UTIL: ("sm_active_ratio", 0.01, 1.0),
    abi.GPM_ANY_TENSOR: ("tensor_active_ratio", 0.01, 1.0),
    abi.GPM_DRAM_BW: ("dram_active_ratio", 0.01, 1.0),
    abi.GPM_PCIE_TX: ("pcie_tx_bytes_per_s", MIB, 1e13),
    abi.GPM_PCIE_RX: ("pcie_rx_bytes_per_s", MIB, 1e13),
    abi.GPM_NVLINK_RX: ("nvlink_rx_bytes_per_s", MIB, 1e14),
    abi.GPM_NVLINK_TX: ("nvlink_tx_bytes_per_s", MIB, 1e14),
}
ACTIVITY = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")


class Gpm:
    """Two samples of a GPU, or of one of its instances, used in turn."""

    def __init__(self, library: Library, instance: int | None = None) -> None:
        self._library = library
        self._instance = instance
        self._samples: list[ctypes.c_void_p] = []
        self._has_older = False
        self.reason = ""
        size = abi.GPM_HEAD.size + len(abi.GPM_METRICS) * abi.GPM_METRIC.size
        self._answer = ctypes.create_string_buffer(size + 4096)

    def supported(self, handle: object) -> bool:
        """Whether the chip has it; allocates the two samples on the first call."""
        if self.reason or self._samples:
            return not self.reason
        support = ctypes.create_string_buffer(abi.GPM_SUPPORT.pack(1, 0), abi.GPM_SUPPORT.size + 64)
        code = self._library.call("GpmQueryDeviceSupport")(handle, support)
        if code == abi.SUCCESS and not abi.GPM_SUPPORT.unpack_from(support)[1]:
            code = abi.NOT_SUPPORTED
        while code == abi.SUCCESS and len(self._samples) < 2:
            sample = ctypes.c_void_p()
            code = self._library.call("GpmSampleAlloc")(ctypes.byref(sample))
            self._samples.append(sample)
        self.reason = abi.LASTING.get(code, f"code_{code}") if code != abi.SUCCESS else ""
        return not self.reason

    def read(self, handle: object) -> tuple[int, dict[str, float]]:
        """(result code, columns); no columns at the first call, which only begins the interval."""
        self._samples.reverse()
        code = self._sample(handle, self._samples[1])
        if code != abi.SUCCESS:
            self._has_older = False
            self.reason = abi.LASTING.get(code, "")
            return code, {}
        if not self._has_older:
            self._has_older = True
            return code, {}
        return self._metrics()

    def free(self) -> None:
        """Give the samples back."""
        while self._samples:
            self._library.call("GpmSampleFree")(self._samples.pop())

    def _sample(self, handle: object, sample: ctypes.c_void_p) -> int:
        if self._instance is None:
            return self._library.call("GpmSampleGet")(handle, sample)
        return self._library.call("GpmMigSampleGet")(handle, ctypes.c_uint(self._instance), sample)

    def _metrics(self) -> tuple[int, dict[str, float]]:
        older, newer = (sample.value or 0 for sample in self._samples)
        abi.GPM_HEAD.pack_into(self._answer, 0, 1, len(abi.GPM_METRICS), older, newer)
        for index, metric in enumerate(abi.GPM_METRICS):
            abi.GPM_METRIC.pack_into(
                self._answer, abi.GPM_HEAD.size + index * abi.GPM_METRIC.size, metric, abi.UNKNOWN, 0.0, 0, 0, 0
            )
        code = self._library.call("GpmMetricsGet")(self._answer)
        return code, self._columns() if code == abi.SUCCESS else {}

    def _columns(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for index in range(len(abi.GPM_METRICS)):
            metric, code, value, *_ = abi.GPM_METRIC.unpack_from(
                self._answer, abi.GPM_HEAD.size + index * abi.GPM_METRIC.size
            )
            if code == abi.SUCCESS and metric in COLUMNS:
                column, scale, high = COLUMNS[metric]
                found[column] = decode.within(value * scale, 0.0, high)
        return found
