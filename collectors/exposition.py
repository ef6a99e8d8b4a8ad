"""The newest samples as a Prometheus page, under the names that dashboards of dcgm-exporter and node_exporter know.

Only gauges that mean the same have a familiar name: we send rates, and a rate under the name of a counter would be differentiated twice.
Everything else is there as ``trainwarden_<family>_<metric>``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from collectors.base import Family
from trainwarden.records import Block

FAMILIAR: dict[tuple[str, str], tuple[str, float]] = {
    ("gpu", "temp_c"): ("DCGM_FI_DEV_GPU_TEMP", 1),
    ("gpu", "memory_temp_c"): ("DCGM_FI_DEV_MEMORY_TEMP", 1),
    ("gpu", "power_w"): ("DCGM_FI_DEV_POWER_USAGE", 1),
    ("gpu", "sm_clock_mhz"): ("DCGM_FI_DEV_SM_CLOCK", 1),
    ("gpu", "gpu_util_ratio"): ("DCGM_FI_DEV_GPU_UTIL", 100),
    ("gpu", "sm_active_ratio"): ("DCGM_FI_PROF_SM_ACTIVE", 1),
    ("gpu", "tensor_active_ratio"): ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1),
    ("gpu", "dram_active_ratio"): ("DCGM_FI_PROF_DRAM_ACTIVE", 1),
    ("gpu", "xid_last"): ("DCGM_FI_DEV_XID_ERRORS", 1),
    ("gpu", "remapped_rows_correctable"): ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", 1),
    ("gpu", "remapped_rows_uncorrectable"): ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 1),
    ("gpu", "row_remap_failure"): ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1),
    ("gpu", "ecc_uncorrectable_count"): ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1),
    ("gpu", "pcie_link_gen"): ("DCGM_FI_DEV_PCIE_LINK_GEN", 1),
    ("gpu", "pcie_link_width"): ("DCGM_FI_DEV_PCIE_LINK_WIDTH", 1),
    ("host", "load1"): ("node_load1", 1),
    ("host", "runnable_tasks"): ("node_procs_running", 1),
    ("nic", "carrier"): ("node_network_carrier", 1),
    ("nic", "up"): ("node_network_up", 1),
    ("nic", "speed_mbps"): ("node_network_speed_bytes", 125_000),
}  # fmt: skip
"""(family, metric) → familiar name and the factor to its unit: dcgm-exporter's percent and MHz, node_exporter's bytes a second."""

ODD = re.compile(r"[^a-zA-Z0-9_]")


def exposition(node: str, blocks: Sequence[Block], families: Mapping[str, Family]) -> str:
    """Lines of the page; absent values are left out.

    Examples
    --------
    >>> from collectors.base import family
    >>> gpu = family("gpu", "x", ("temp_c", "C", "gauge", ""))
    >>> print(exposition("n0", gpu.block({"gpu3": {"temp_c": 61.0}}), {"gpu": gpu}), end="")
    DCGM_FI_DEV_GPU_TEMP{gpu="3",Hostname="n0"} 61
    trainwarden_gpu_temp_c{node="n0",device="gpu3"} 61
    """
    lines = [
        line for block in blocks if block.family in families for line in _lines(node, block, families[block.family])
    ]
    return "".join(f"{line}\n" for line in sorted(lines))


def _lines(node: str, block: Block, family: Family) -> Iterator[str]:
    names = [metric.name for metric in family.metrics]
    for device, values in block.rows():
        for name, value in zip(names, values, strict=True):
            if math.isnan(value):
                continue
            yield f'trainwarden_{ODD.sub("_", f"{family.name}_{name}")}{{node="{_text(node)}",device="{_text(device)}"}} {value:.10g}'
            if (family.name, name) in FAMILIAR:
                familiar, factor = FAMILIAR[family.name, name]
                yield f"{familiar}{{{_labels(node, family.name, device)}}} {value * factor:.10g}"


def _labels(node: str, family: str, device: str) -> str:
    """dcgm-exporter's labels on GPUs, node_exporter's elsewhere (which names no host: Prometheus adds the instance)."""
    if family == "gpu":
        return f'gpu="{_text(device.removeprefix("gpu"))}",Hostname="{_text(node)}"'
    return f'device="{_text(device)}"' if family == "nic" else f'node="{_text(node)}"'


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
