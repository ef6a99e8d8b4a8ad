"""Ascend: the npu-exporter page and its times, npu-smi and hccn_tool, fault codes, optics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.accelerators import NAMES
from collectors.pages import ascend_faults, ascend_page, ascend_text
from collectors.pages.text import PageError
from collectors.runner import take
from collectors.sources.ascend import AscendSource
from collectors.sources.ethtool import PORT
from collectors.sources.nic import NIC
from detectors.rules.table import table
from tests.collectors.kit import FIXTURES, Bench, bench, devices, values
from trainwarden.errors import ConfigError

MIB = 1024 * 1024
PAGE_NS = 1_606_402_000 * 1_000_000  # the times on the captured page are milliseconds of January 1970
KG = (FIXTURES / "ascend" / "npu_info_kg.txt").read_text(encoding="utf-8")
AFTER = (FIXTURES / "ascend" / "npu_info_after.txt").read_text(encoding="utf-8")


def part(text: str, command: str) -> str:
    """What one command printed in a file of many."""
    return text.partition(f"{command}\n")[2].partition("\n\n")[0]


def with_page(tmp_path: Path) -> Bench:
    board = bench(tmp_path, "ascend")
    board.clock.step_ns(PAGE_NS + 5 * 10**9 - board.clock.now_ns())
    return board


def build(board: Bench, **given: Any) -> AscendSource:
    source = board.build(AscendSource, **{"url": "file:/npu_exporter.prom", **given})
    assert isinstance(source, AscendSource)
    return source


def test_a_machine_of_huawei_without_ascend_is_quiet(tmp_path: Path) -> None:
    board = bench(tmp_path)
    for address, kind, device in (("0000:75:00.0", "0x120000", "0xa250"), ("0000:02:00.0", "0x030000", "0x1711")):
        for name, text in (("vendor", "0x19e5"), ("class", kind), ("device", device)):
            board.write(f"/sys/bus/pci/devices/{address}/{name}", text)
    sample = board.build(AscendSource).sample(0)
    assert (sample.blocks, sample.gaps) == ((), ())


def test_chips_that_nobody_can_read_are_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path)
    for name, text in (("vendor", "0x19e5"), ("class", "0x120000"), ("device", "0xd801")):
        board.write(f"/sys/bus/pci/devices/0000:61:00.0/{name}", text)
    assert [gap.reason for gap in take(board.build(AscendSource), 0).gaps] == ["no_tool"]


def test_golden_values_of_the_captured_page(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    sample = source.sample(board.clock.now_ns())
    assert sample.gaps == ()
    assert devices(sample, "gpu") == tuple(f"gpu{i}" for i in range(8))
    assert values(source, sample, "gpu", "gpu7") == {
        "gpu_util_ratio": 0, "sm_clock_mhz": 0, "power_w": 0, "temp_c": 0, "health_state": 0,
    }  # fmt: skip
    assert values(source, sample, "nic", "npu0") == {
        "up": 0,
        "carrier": 0,
        "rx_bytes_per_s": 0,
        "tx_bytes_per_s": 0,
        "role": 1,
    }
    assert devices(sample, "port") == ()
    assert board.outlet.logs == []  # error code 0 is none


LABELS = '{id="3",model_name="910B",pcie_bus_info="0000:61:00.0",pod_name="llm",vdie_id="x"}'


def page(at_ms: int, **changed: float) -> str:
    numbers: dict[str, float] = {
        "npu_chip_info_utilization": 87, "npu_chip_info_power": 312.5, "npu_chip_info_hbm_total_memory": 65536,
        "npu_chip_info_hbm_used_memory": 16384, "npu_chip_info_hbm_temperature": -1, "npu_chip_info_health_status": 1,
        "npu_chip_info_hbm_ecc_single_bit_error_cnt": 100, "npu_chip_info_hbm_ecc_double_bit_error_cnt": 1,
        "npu_chip_info_hbm_ecc_single_bit_isolated_pages_cnt": 2, "npu_chip_info_hbm_ecc_double_bit_isolated_pages_cnt": 3,
        "npu_chip_info_hccs_bandwidth_info_total_rx": 12.5, "npu_chip_info_link_status": 1, "npu_chip_link_speed": 104857600000,
        "npu_chip_info_bandwidth_rx": 40, "npu_chip_roce_rx_err_pkt_num": 10, "npu_chip_mac_rx_pfc_pkt_num": 1000,
        "npu_chip_mac_rx_pause_num": 50, "npu_chip_optical_state": 1, "npu_chip_optical_temp": 47, "npu_chip_optical_vcc": 3262.9,
        "npu_chip_optical_rx_power_0": 1.0, "npu_chip_optical_rx_power_1": 0.5, "npu_chip_optical_tx_power_0": 2.0,
    }  # fmt: skip
    return "".join(f"{name}{LABELS} {value!r} {at_ms}\n" for name, value in {**numbers, **changed}.items())


def test_units_rates_and_optics_of_a_page(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    start_ms = PAGE_NS // 10**6
    board.write("/npu_exporter.prom", page(start_ms))
    source = build(board)
    source.sample(board.clock.now_ns())
    board.write("/npu_exporter.prom", page(start_ms + 20_000, npu_chip_info_hbm_ecc_single_bit_error_cnt=140,
                npu_chip_roce_rx_err_pkt_num=50, npu_chip_mac_rx_pfc_pkt_num=3000, npu_chip_mac_rx_pause_num=70))  # fmt: skip
    sample = board.second(source, 30.0)  # the page's own times count, not when it was fetched
    assert values(source, sample, "gpu", "gpu3") == {
        "gpu_util_ratio": pytest.approx(0.87), "power_w": 312.5, "fb_total_bytes": 65536 * MIB, "fb_used_bytes": 16384 * MIB,
        "fb_used_ratio": 0.25, "health_state": 0, "ecc_correctable_per_s": 2, "ecc_uncorrectable_count": 1, "retired_pages_count": 5,
        "nvlink_rx_bytes_per_s": pytest.approx(12.5e9),
    }  # fmt: skip
    assert values(source, sample, "nic", "npu3") == {
        "up": 1, "carrier": 1, "speed_mbps": 100_000, "rx_bytes_per_s": 40e6, "rx_errors_per_s": 2, "role": 1,
    }  # fmt: skip
    assert values(source, sample, "port", "npu3") == pytest.approx({
        "pause_rx_per_s": 100, "pause_rx_all_per_s": 101, "module_temp_c": 47, "module_voltage_v": 3.2629, "rx_power_dbm": -3.0103,
        "rx_power_spread_db": 3.0103, "tx_power_dbm": 3.0103,
    }, rel=1e-4)  # fmt: skip


def test_samples_grow_old_by_their_own_times(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    at_ms = PAGE_NS // 10**6
    fresh = page(at_ms).replace("npu_chip_info_power", "npu_chip_info_voltage")
    board.write("/npu_exporter.prom", fresh + f"npu_chip_info_power{LABELS} 300 {at_ms - 300_000}\n")
    source = build(board)
    assert "power_w" not in values(source, source.sample(board.clock.now_ns()), "gpu", "gpu3")
    board.clock.advance_ns(190 * 10**9)
    board.write("/npu_exporter.prom", fresh.replace("87 ", "88 "))  # new numbers under old times
    assert [gap.reason for gap in take(source, board.clock.now_ns()).gaps] == ["stale"]


def test_a_dark_lane_and_an_empty_cage(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    at_ms = PAGE_NS // 10**6
    board.write("/npu_exporter.prom", page(at_ms, npu_chip_optical_rx_power_2=0))
    source = build(board)
    assert values(source, source.sample(board.clock.now_ns()), "port", "npu3")["rx_power_dbm"] == -40
    board.write("/npu_exporter.prom", page(at_ms, npu_chip_optical_state=0))
    assert "rx_power_dbm" not in values(source, board.second(source, 10.0), "port", "npu3")


def test_memory_without_hbm_is_ddr(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    board.write("/npu_exporter.prom", page(PAGE_NS // 10**6, npu_chip_info_hbm_total_memory=0, npu_chip_info_hbm_used_memory=0,
                npu_chip_info_total_memory=21534, npu_chip_info_used_memory=994))  # fmt: skip
    source = build(board)
    row = values(source, source.sample(board.clock.now_ns()), "gpu", "gpu3")
    assert (row["fb_used_bytes"], row["fb_total_bytes"]) == (994 * MIB, 21534 * MIB)


def test_a_fault_code_is_said_once_while_it_stands(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    at_ms = PAGE_NS // 10**6
    codes = {"npu_chip_info_error_code": float(0x80E3A201), "npu_chip_info_error_code_1": float(0x80DE0207)}
    board.write("/npu_exporter.prom", page(at_ms, npu_chip_info_health_status=0, **codes))
    source = build(board)
    sample = source.sample(board.clock.now_ns())
    assert values(source, sample, "gpu", "gpu3")["health_state"] == 2
    assert [(e.code, e.severity, e.attributes["level"], urgent) for e, urgent in board.outlet.logs] == [
        ("npu:80DE0207", "warning", "SubHealth", False), ("npu:80E3A201", "critical", "SeparateNPU", True),
    ]  # fmt: skip
    event = board.outlet.logs[1][0]
    assert event.attributes["gpu"] == "gpu3"
    assert "replace the accelerator" in event.line
    board.second(source, 10.0)
    board.write("/npu_exporter.prom", page(at_ms))
    board.second(source, 10.0)
    board.write("/npu_exporter.prom", page(at_ms, npu_chip_info_error_code=float(0x80E3A201)))
    board.second(source, 10.0)
    assert board.outlet.codes == ["npu:80DE0207", "npu:80E3A201", "npu:80E3A201"]


def test_the_table_of_levels_is_huaweis_and_the_detectors(tmp_path: Path) -> None:
    text = (FIXTURES / "ascend" / "faultCode.json").read_text(encoding="utf-8")
    levels = ascend_faults.parse_levels(text, "key")
    # one code stands in two lists upstream; the last one counts in both tables
    assert {code for code, level in ascend_faults.shipped().items() if levels[code] != level} == set()
    assert set(levels.values()) <= set(ascend_faults.LEVELS)
    for level, (severity, _) in ascend_faults.LEVELS.items():
        code = next(code for code, other in levels.items() if other == level)
        rule = table().find(f"npu:{code}", severity)
        assert rule is not None
        assert rule.code == f"npu:{level}"
    board = with_page(tmp_path)
    board.write("/codes.json", '{"SeparateNPUCodes": ["80e21007"]}')
    board.write("/npu_exporter.prom", page(PAGE_NS // 10**6, npu_chip_info_error_code=float(0x80E21007)))
    build(board, fault_codes="/codes.json").sample(board.clock.now_ns())
    assert board.outlet.logs[0][0].severity == "critical"
    with pytest.raises(ConfigError, match="fault_codes: the table of fault codes is no JSON"):
        build(board, fault_codes="/none.json")


TABLE = """+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  {second}             | Bus-Id        | AICore(%)   Memory-Usage(MB)  {memory}|
+===========================+===============+====================================================+
| 0     910B3               | OK            | 178.9       36                0    / 0             |
| 0     {phy}               | 0000:9D:00.0  | 90          {use} |
+------------------------------------------------------------------------------------------------+
| 0     910B3               | Alarm         | -           37                0    / 0             |
| 1     {phy1}              | 0000:9F:00.0  | 0           {use} |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 4711          | python                   | 3412                    |
"""
HBM = {"second": "Phy-ID", "memory": "HBM-Usage(MB)", "phy": "4", "phy1": "5", "use": "0    / 0          16384/ 65536"}
DDR = {"second": "Device", "memory": "", "phy": "0", "phy1": "1", "use": "994  / 21534"}


def test_shapes_of_npu_smi() -> None:
    first, second = ascend_text.parse_info(TABLE.format(**HBM))
    assert (first.number, first.address) == (4, "0000:9d:00.0")
    assert first.row == {"health_state": 0, "power_w": 178.9, "temp_c": 36, "gpu_util_ratio": 0.9, "fb_used_bytes": 16384 * MIB,
                         "fb_total_bytes": 65536 * MIB, "fb_used_ratio": 0.25}  # fmt: skip
    assert (second.number, second.chip) == (5, 1)
    assert second.row["health_state"] == 2
    assert "power_w" not in second.row  # the second die of a card has no meter
    assert ascend_text.parse_info(TABLE.format(**DDR))[0].row["fb_total_bytes"] == 21534 * MIB
    plain = {**HBM, "second": "", "phy": "", "phy1": ""}
    assert [chip.number for chip in ascend_text.parse_info(TABLE.format(**plain))] == [0, 0]
    with pytest.raises(PageError, match="no table of chips"):
        ascend_text.parse_info(KG)  # the captured answer is empty


def test_tools_fill_what_no_page_says(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/smi.txt", TABLE.format(**HBM) + "\tError Code                     : 0x80E3A201 80DE0207\n")
    board.write(
        "/hccn.txt", part(AFTER, "hccn_tool -i 5 -stat -g") + "\n" + part(AFTER, "hccn_tool -i 0 -link_stat -g")
    )
    source = build(board, url="", smi="file:/smi.txt", hccn="file:/hccn.txt", hccn_every_s=10.0)
    source.sample(0)
    assert board.outlet.codes == ["npu:80DE0207", "npu:80E3A201"]
    board.edit("/hccn.txt", "roce_rx_err_pkt_num:11", "roce_rx_err_pkt_num:31")
    sample = board.second(source, 10.0)
    assert values(source, sample, "gpu", "gpu4")["gpu_util_ratio"] == pytest.approx(0.9)
    assert values(source, sample, "nic", "npu0") == {
        "up": 0, "carrier": 0, "rx_errors_per_s": 2, "tx_errors_per_s": 0, "link_recovery_per_s": 0, "role": 1,
    }  # fmt: skip
    board.write("/smi.txt", "dcmi model initialized failed, because the device is used.\n")
    assert [gap.reason for gap in board.second(source, 30.0).gaps] == ["smi_no_chips"]


def test_captured_answers_of_hccn_tool_and_npu_smi() -> None:
    optical = part(KG, "hccn_tool -i 0 -optical -g")
    assert ascend_text.parse_optical(optical) == {}  # it says "not present", and then numbers all the same
    row = ascend_text.parse_optical(optical.replace("not present", "present"))
    assert row == pytest.approx({"rx_power_dbm": -22.676, "rx_power_spread_db": 22.767, "tx_power_dbm": 1.4513, "module_temp_c": 47,
                                 "module_voltage_v": 3.2629, "bias_ma": 7.924}, rel=1e-4)  # fmt: skip
    assert ascend_text.parse_counts(part(AFTER, "hccn_tool -i 6 -stat -g")) == {
        "roce_rx_err_pkt_num": 13,
        "roce_tx_err_pkt_num": 77,
    }
    assert ascend_text.parse_link(part(AFTER, "hccn_tool -i 0 -link_stat -g")) == (
        2,
        0,
    )  # the newest record stands first
    assert ascend_text.parse_link(part(AFTER, "hccn_tool -i 1 -link_stat -g")) == (2, 1)
    assert all(math.isnan(value) for value in ascend_text.parse_link(""))
    assert ascend_text.parse_health(part(KG, "npu-smi info -i 0 -c 0 -t health")) == ()


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.integers(0, len(KG)), st.integers(0, 1500))
def test_odd_answers_are_read_or_refused(noise: str, start: int, length: int) -> None:
    for text in (noise, KG[start : start + length] + noise, TABLE.format(**HBM)[start % 900 :] + noise):
        for parse in (ascend_text.parse_optical, ascend_text.parse_counts):
            assert all(math.isfinite(value) for value in parse(text).values())
        ascend_text.parse_link(text)
        ascend_text.parse_health(text)
        try:
            chips = ascend_text.parse_info(text)
        except PageError:
            continue
        assert all(math.isfinite(value) for chip in chips for value in chip.row.values())


def test_all_columns_exist() -> None:
    helpers = {"ddr_total_bytes", "ddr_used_bytes"}
    assert {rule.column for rule in ascend_page.GPU_RULES} <= {*NAMES, *helpers}
    assert {rule.column for rule in ascend_page.NIC_RULES} <= {metric.name for metric in NIC.metrics}
    assert {rule.column for rule in ascend_page.PORT_RULES} <= {metric.name for metric in PORT.metrics}
