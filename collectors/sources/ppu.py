"""Alibaba PPU, by its driver library (HGML), which is NVML under other names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectors.nvidia.source import NvmlSettings, NvmlSource
from trainwarden.settings import option


class PpuSource(NvmlSource):
    """PPUs as devices ``gpu0``...: the code of the source `nvidia` with another library and prefix.

    Written from the published look-alike of the interface and tested with a stand-in library only: no capture of a real PPU was at hand.
    Which field values HGML knows is not public; what it refuses is absent, with the reason.
    """

    name: ClassVar[str] = "ppu"
    vendor: ClassVar[int] = 0x1DED

    @dataclass(frozen=True)
    class Settings(NvmlSettings):
        """Keys of ``[collector.sources.ppu]``."""

        library: str = option("libhgml.so", "the driver library: a name that the loader finds, or a path")
        symbol_prefix: str = option("hgml", "what the library's functions begin with")
