"""NVIDIA GPUs, by the driver library (NVML) in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectors.nvidia.source import NvmlSettings, NvmlSource


class NvidiaSource(NvmlSource):
    """One row per GPU (``gpu0``...) and per MIG part (``gpu0/gi1.ci0``); Xids, hangs and losses as log events.

    Clocks, power, temperature and utilisation every second; memory, counters and activity every ten; rows, links, fabric and limits every
    minute. What a GPU does not support is asked once and then left alone until driver, MIG mode or an hour have changed. Needs no rights
    beyond the device files; as long as it runs the driver cannot be unloaded and a GPU not be reset: switch it off for that.
    """

    name: ClassVar[str] = "nvidia"
    vendor: ClassVar[int] = 0x10DE

    @dataclass(frozen=True)
    class Settings(NvmlSettings):
        """Keys of ``[collector.sources.nvidia]``."""
