"""MetaX: page and table, written after public descriptions; what they cannot say stays absent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.accelerators import NAMES
from collectors.pages import metax_text
from collectors.pages.text import PageError
from collectors.runner import take
from collectors.sources.metax import MetaxSource
from tests.collectors.kit import bench, devices, values

CHIP = 'Hostname="n0",bios_version="1.16.0.0",deviceId="0",driver_version="2.6.0",modelName="MXC500",uuid="u0"'
PAGE = f"""#HELP mx_chip_hotspot_temp Chip hotspot temperature
#TYPE mx_chip_hotspot_temp gauge
mx_chip_hotspot_temp{{{CHIP}}} 35.75
mx_chip_hbm_temp{{{CHIP}}} 4150
mx_board_power{{{CHIP}}} 301500
mx_gpu_usage{{{CHIP}}} 88
mx_gpu_clock{{{CHIP}}} 1500
mx_memory_used{{{CHIP},type="vram"}} 33554432
mx_memory_used{{{CHIP},type="xtt"}} 5
mx_memory_total{{{CHIP},type="vram"}} 67108864
mx_mxlk_traffic_total_bytes{{{CHIP},mxlkId="1",type="rx"}} 1000
mx_mxlk_traffic_total_bytes{{{CHIP},mxlkId="2",type="rx"}} 2000
mx_pci_event{{{CHIP},type="aer_ce"}} 4
mx_pci_event{{{CHIP},type="aer_ue"}} 1
mx_gpu_state{{{CHIP},unavailable_reason=""}} 0
"""
TABLE = """mx-smi  version: 2.2.4

Attached GPUs                                     : 2
+---------------------------------------------------------------------------------+
| MX-SMI 2.2.4                        Kernel Mode Driver Version: 2.14.8          |
|------------------------------------+---------------------+----------------------+
| GPU         NAME                   | Bus-id              | GPU-Util             |
| Temp        Pwr:Usage/Cap          | Memory-Usage        | GPU-State            |
|====================================+=====================+======================|
| 0           MetaX C500             | 0000:01:00.0        | 12%                  |
| 45C         48W / 350W             | 858/65536 MiB       | Available            |
+------------------------------------+---------------------+----------------------+
| 1           MXC550                 | 0000:2a:00.0        | 0%                   |
| 31C         44W                    | 810/65536 MiB       |                      |
+------------------------------------+---------------------+----------------------+
"""


def test_a_machine_without_metax_is_quiet_and_one_without_reader_is_not(tmp_path: Path) -> None:
    board = bench(tmp_path)
    sample = board.build(MetaxSource).sample(0)
    assert (sample.blocks, sample.gaps) == ((), ())
    for name, text in (("vendor", "0x9999"), ("class", "0x038000"), ("device", "0x4001")):
        board.write(f"/sys/bus/pci/devices/0000:08:00.0/{name}", text)
    assert [gap.reason for gap in take(board.build(MetaxSource), 0).gaps] == ["no_tool"]


def test_units_of_the_page(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/mx.prom", PAGE)
    source = board.build(MetaxSource, url="file:/mx.prom")
    assert values(source, source.sample(0), "gpu", "gpu0") == {
        "temp_c": 35.75, "memory_temp_c": 41.5, "power_w": 301.5, "gpu_util_ratio": pytest.approx(0.88), "sm_clock_mhz": 1500,
        "fb_used_bytes": 2.0**35, "fb_total_bytes": 2.0**36, "fb_used_ratio": 0.5, "pcie_uncorrectable_count": 1,
    }  # fmt: skip
    board.write("/plain.prom", PAGE.replace(',type="vram"', ""))
    plain = board.build(MetaxSource, url="file:/plain.prom")
    assert values(plain, plain.sample(0), "gpu", "gpu0")["fb_used_ratio"] == 0.5
    board.write("/mx.prom", PAGE.replace(" 1000\n", " 3000\n").replace(" 2000\n", " 7000\n").replace(" 4\n", " 24\n")
                .replace('reason=""', 'reason="PCIe link down"'))  # fmt: skip
    row = values(source, board.second(source, 10.0), "gpu", "gpu0")
    assert (row["nvlink_rx_bytes_per_s"], row["pcie_correctable_per_s"], row["health_state"]) == (700, 2, 2)


def test_the_table_of_mx_smi_in_both_shapes(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/smi.txt", TABLE)
    board.write("/mx.prom", PAGE)
    source = board.build(MetaxSource, url="file:/mx.prom", smi="file:/smi.txt")
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0", "gpu1")
    first = values(source, sample, "gpu", "gpu0")
    assert (first["power_w"], first["power_limit_w"], first["health_state"]) == (
        301.5,
        350,
        0,
    )  # the page is believed first
    assert values(source, sample, "gpu", "gpu1") == {
        "gpu_util_ratio": 0, "temp_c": 31, "power_w": 44, "fb_used_bytes": 810 * 2**20, "fb_total_bytes": 2.0**36,
        "fb_used_ratio": pytest.approx(810 / 65536),
    }  # fmt: skip
    (board.root / "mx.prom").unlink()
    board.write("/smi.txt", "mx-smi: no device found\n")
    assert {gap.reason for gap in board.second(source, 10.0).gaps} == {"missing", "smi_no_chips"}


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(0, len(TABLE)))
def test_odd_tables_are_read_or_refused(noise: str, at: int) -> None:
    rows = {}
    try:
        rows = metax_text.parse_smi(TABLE[:at] + noise + TABLE[at:])
    except PageError as error:
        reason = error.reason
    else:
        reason = "no_chips" if not rows else ""
    assert reason == ("" if rows else "no_chips")
    assert all(math.isfinite(value) for row in rows.values() for value in row.values())


def test_all_columns_exist() -> None:
    assert {rule.column for rule in metax_text.RULES} <= set(NAMES)
