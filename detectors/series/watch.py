"""What foretells a failure: one row per precursor. To watch another metric, add a row.

Limits are where the precursor becomes the failure, from the vendor where there is a published one, else a round figure of ours (marked
`ours` in the origin). A row matches `<family>.<metric>` as a whole, case ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class Law(StrEnum):
    """How a precursor is read: events whose rate grows, events that add up, or a level with a trend."""

    RATE = "rate"
    TOTAL = "total"
    TREND = "trend"


@dataclass(frozen=True)
class Watch:
    """One precursor.

    Attributes
    ----------
    limit
        RATE: events per hour. TOTAL: events in all. TREND: the level, in the metric's unit; with `relative`, the distance from the
        median of the peers.
    floor
        TREND: moves smaller than this within a window are no news, in the metric's unit.
    falling
        TREND: the level fails downwards.
    load
        TREND: metric of the same row that explains part of the level; the trend is looked for at equal load.
    decades
        TREND: compared as log10, limits and floor in decades.
    end
        What happens at the limit, for the text.
    """

    name: str
    pattern: str
    law: Law
    limit: float
    end: str
    origin: str
    floor: float = 0.0
    falling: bool = False
    relative: bool = False
    load: str = ""
    decades: bool = False

    @property
    def is_count(self) -> bool:
        """Whether it counts events."""
        return self.law is not Law.TREND


_R, _N, _T = Law.RATE, Law.TOTAL, Law.TREND
_C = r"_(per_s|count|total)"

WATCHED: tuple[Watch, ...] = (
    Watch("gpu_ecc", rf"gpu\.ecc_(correctable|corrected|sbe\w*){_C}", _R, 600, "a storm of corrected errors, ahead of an uncorrectable one",
          "ours; Xid 92 is NVIDIA's own alarm for it"),
    Watch("dimm_ecc", rf"(board|host|edac)\.(dimm_correctable|edac_(ce|correctable)\w*|memory_correctable){_C}", _R, 600,
          "a storm of corrected memory errors, ahead of a machine check", "ours; kernel page retirement starts far below"),
    Watch("row_remap", r"gpu\.(remapped_rows|row_remaps?)_(un)?correctable(_count)?", _N, 10, "ten remapped rows",
          "SuperBench: above ten remaps 83 % of nodes regress"),
    Watch("symbol_errors", rf"(nic|port|rdma)\.(symbol_errors?|port_rcv_errors?|rx_errors|rx_crc_errors|rx_icrc\w*|local_link_integrity\w*)"
          rf"{_C}", _R, 3600, "one bad symbol a second: retransmission", "ours; the InfiniBand rule of thumb is 120 an hour"),
    Watch("link_flaps", rf"(nic|port|rdma)\.(link_downed|carrier_changes|link_error_recovery){_C}", _R, 60,
          "a link that flaps every other minute",
          "ours; a third flap within an hour is the usual line for isolating the port"),
    Watch("pcie_replay", rf"(gpu|pcie|host|nic)\.(pcie_replays?|aer_corrected\w*){_C}", _R, 3600,
          "replays every second, ahead of a lost device", "ours"),
    Watch("nvlink_errors", rf"gpu\.nvlink_(crc_(flit_|data_)?errors|crc\w*|replays?){_C}", _R, 36000, "an NVLink that retrains", "ours"),
    Watch("nvlink_recovery", rf"gpu\.nvlink_recover(y|ies){_C}", _R, 60, "an NVLink that stalls each minute", "ours"),
    Watch("nvme_media", rf"(board|host|disk)\.nvme_media_errors{_C}", _R, 60, "a disk that returns errors", "ours"),
    Watch("bit_errors", r"(port|nic|rdma)\.(fec_corrected|fec_symbol_errors|raw_bit_errors)_per_s", _T, 2.0,
          "a hundred times the bit errors of its peers: uncorrected blocks", "ours; PAM4 links always have raw errors",
          floor=0.1, relative=True, decades=True),
    Watch("light", r"(port|nic)\.rx_power_dbm", _T, 5.0, "five dB less light than its peers", "ours; typical receiver margin",
          floor=0.2, falling=True, relative=True),
    Watch("gpu_heat", r"gpu\.(temp|gpu_temp|temperature)_c(elsius)?", _T, 87.0, "thermal slowdown of the GPU", "H100 software slowdown",
          floor=1.0, load="power_w"),
    Watch("hbm_heat", r"gpu\.memory_temp(erature)?_c(elsius)?", _T, 95.0, "thermal slowdown of the memory", "HBM3 limit",
          floor=1.0, load="power_w"),
    Watch("module_heat", r"(port|nic)\.module_temp_c(elsius)?", _T, 75.0, "an optical module that shuts down", "module specification",
          floor=1.0),
    Watch("fan", r"board\.fan_ratio", _T, 0.98, "fans at their end", "ours", floor=0.02, load="server_power_w"),
    Watch("disk_full", r"(board|host|disk)\.disk_used_ratio", _T, 0.98, "a full disk", "ours", floor=0.005),
    Watch("disk_space", r"host\.\w*free_bytes", _T, 0.0, "a full disk", "arithmetic", floor=5e7, falling=True),
    Watch("memory_leak", r"host\.mem_available_ratio", _T, 0.03, "the kernel's out-of-memory killer", "ours", floor=0.01, falling=True),
    Watch("disk_spare", r"(board|host|disk)\.nvme_spare_ratio", _T, 0.10, "a disk without spare blocks", "NVMe critical warning threshold",
          floor=0.01, falling=True),
    Watch("disk_wear", r"(board|host|disk)\.nvme_(used|wear)_ratio", _T, 1.0, "a disk at the end of its rated life", "NVMe percentage used",
          floor=0.005),
)  # fmt: skip


@cache
def watch_of(family: str, metric: str) -> Watch | None:
    """The row that watches a metric, if one does; the first match wins."""
    name = f"{family}.{metric}"
    return next((w for w in WATCHED if re.fullmatch(w.pattern, name, re.IGNORECASE)), None)


@cache
def watch_named(name: str) -> Watch:
    """The row called `name`."""
    return next(w for w in WATCHED if w.name == name)


def adds_up(metric: str) -> bool:
    """Whether a count is reported as a running total and not as a rate."""
    return not metric.endswith("_per_s")
