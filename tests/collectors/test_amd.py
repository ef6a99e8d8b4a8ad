"""AMD: the driver's files, rocm-smi and amd-smi through the releases, the exporter's page, partitions."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.accelerators import NAMES
from collectors.pages import amd_page
from collectors.pages.amd_tools import ROCM_COUNTS, ROCM_KEYS, SMI_COUNTS, SMI_PATHS, parse_list, parse_tool
from collectors.pages.text import PageError
from collectors.runner import take
from collectors.sources.amd import AmdSource
from tests.collectors.kit import FIXTURES, Bench, bench, devices, values

MIB = 1024 * 1024
FILES = {
    "vendor": "0x1002", "gpu_busy_percent": "97", "mem_busy_percent": "41", "mem_info_vram_used": "103079215104",
    "mem_info_vram_total": "206158430208", "current_link_speed": "32.0 GT/s PCIe", "current_link_width": "8",
    "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16", "pcie_replay_count": "5",
    "hwmon/hwmon3/power1_input": "742000000", "hwmon/hwmon3/power1_average": "731000000", "hwmon/hwmon3/power1_cap": "750000000",
    "hwmon/hwmon3/temp1_label": "edge", "hwmon/hwmon3/temp1_input": "51000", "hwmon/hwmon3/temp2_label": "junction",
    "hwmon/hwmon3/temp2_input": "68000", "hwmon/hwmon3/temp3_label": "mem", "hwmon/hwmon3/temp3_input": "59000",
    "hwmon/hwmon3/freq1_label": "sclk", "hwmon/hwmon3/freq1_input": "2100000000", "hwmon/hwmon3/freq2_label": "mclk",
    "hwmon/hwmon3/freq2_input": "1300000000", "ras/umc_err_count": "ue: 1\nce: 40", "ras/gfx_err_count": "ue: 0\nce: 2",
}  # fmt: skip


def add_card(board: Bench, card: int, address: str, driver: bool = True) -> str:
    bus = f"/sys/bus/pci/devices/{address}"
    for name, text in (("vendor", "0x1002"), ("class", "0x120000"), ("device", "0x74a1")):
        board.write(f"{bus}/{name}", text + "\n")
    base = f"/sys/class/drm/card{card}/device"
    if driver:
        board.write(f"{base}/uevent", f"DRIVER=amdgpu\nPCI_SLOT_NAME={address}\n")
        for name, text in FILES.items():
            board.write(f"{base}/{name}", text + "\n")
    return base


def parsed(name: str) -> dict[str, float]:
    return parse_tool((FIXTURES / "amd" / name).read_bytes())[0].row


def test_a_machine_without_amd_is_quiet(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/sys/bus/pci/devices/0000:01:00.1/vendor", "0x1002")
    board.write("/sys/bus/pci/devices/0000:01:00.1/class", "0x040300")  # the sound of a display card
    sample = board.build(AmdSource).sample(0)
    assert (sample.blocks, sample.gaps) == ((), ())


def test_a_chip_without_its_driver_is_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 1, "0000:05:00.0", driver=False)
    assert [gap.reason for gap in take(board.build(AmdSource), 0).gaps] == ["driver"]


def test_a_chip_without_its_driver_beside_one_that_has_it_is_told_by_its_address(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 0, "0000:05:00.0")
    add_card(board, 1, "0000:15:00.0", driver=False)
    sample = take(board.build(AmdSource), 0)
    assert devices(sample, "gpu") == ("gpu0",)
    assert [gap.reason for gap in sample.gaps] == ["driver:0000:15:00.0"]


def test_sensors_and_chips_that_a_driver_numbers_anew_are_found_again(tmp_path: Path) -> None:
    board = bench(tmp_path)
    base = board.root / add_card(board, 0, "0000:05:00.0").lstrip("/")
    source = board.build(AmdSource)
    assert values(source, source.sample(0), "gpu", "gpu0")["power_w"] == 742
    made_anew(base / "hwmon" / "hwmon3", base / "hwmon" / "hwmon7")
    board.write("/sys/class/drm/card0/device/hwmon/hwmon7/power1_input", "500000000\n")
    assert values(source, board.second(source, 61.0), "gpu", "gpu0")["power_w"] == 500
    made_anew(base.parent, base.parent.with_name("card4"))
    board.write("/sys/class/drm/card4/device/hwmon/hwmon7/power1_input", "300000000\n")
    row = values(source, board.second(source, 61.0), "gpu", "gpu0")
    assert (row["power_w"], row["temp_c"], row["pcie_link_width"]) == (300, 68, 8)


def made_anew(before: Path, after: Path) -> None:
    """Other files, not the old ones under another name: who holds those open sees nothing new."""
    shutil.copytree(before, after)
    shutil.rmtree(before)


@pytest.mark.parametrize("warning", ["[WARNING] no render group", "{x} warns", "[1] two", "WARNING: [a] {b}"])
def test_warnings_of_any_shape_may_stand_before_the_answer(warning: str) -> None:
    assert parse_tool(f"{warning}\n".encode() + json.dumps([SMI]).encode())[0].row == pytest.approx(SMI_ROW)


def test_an_answer_that_was_cut_off_is_none_though_its_inside_is_whole() -> None:
    with pytest.raises(PageError, match="no JSON"):
        parse_tool(json.dumps([SMI, SMI], indent=4).encode()[:-30])


def test_golden_values_of_the_drivers_files(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 9, "0000:65:00.0")
    base = add_card(board, 1, "0000:C5:00.0")
    source = board.build(AmdSource)
    assert devices(source.sample(0), "gpu") == ("gpu0", "gpu1")  # in the order of the bus, not of card1 and card9
    board.write(f"{base}/pcie_replay_count", "25")
    board.write(f"{base}/ras/umc_err_count", "ue: 3\nce: 60")
    board.write(f"{base}/gpu_busy_percent", "50")
    row = values(source, board.second(source, 10.0), "gpu", "gpu1")
    assert row == {
        "gpu_util_ratio": 0.5, "memory_util_ratio": pytest.approx(0.41), "fb_used_bytes": 103079215104, "fb_total_bytes": 206158430208,
        "fb_used_ratio": 0.5, "power_w": 742, "power_average_w": 731, "power_limit_w": 750, "temp_c": 68, "memory_temp_c": 59,
        "sm_clock_mhz": 2100, "memory_clock_mhz": 1300, "pcie_link_gen": 5, "pcie_link_width": 8, "pcie_link_gen_max": 5,
        "pcie_link_width_max": 16, "pcie_replay_per_s": 2, "ecc_correctable_per_s": 2, "ecc_uncorrectable_count": 3,
    }  # fmt: skip


def test_files_that_are_not_there_are_absent_and_links_are_read_seldom(tmp_path: Path) -> None:
    board = bench(tmp_path)
    base = add_card(board, 0, "0000:05:00.0")
    for name in (
        "hwmon/hwmon3/temp2_label",
        "hwmon/hwmon3/power1_input",
        "gpu_busy_percent",
        "ras/umc_err_count",
        "ras/gfx_err_count",
    ):
        (board.root / base.lstrip("/") / name).unlink()
    source = board.build(AmdSource)
    row = values(source, source.sample(0), "gpu", "gpu0")
    assert (row["temp_c"], row["power_w"]) == (
        51,
        731,
    )  # the edge where there is no hot spot, the mean where nothing says it now
    assert not {"gpu_util_ratio", "ecc_uncorrectable_count"} & set(row)
    board.write(f"{base}/current_link_width", "4")
    board.write(f"{base}/mem_busy_percent", "N/A")
    row = values(source, board.second(source, 1.0), "gpu", "gpu0")
    assert row["pcie_link_width"] == 8
    assert "memory_util_ratio" not in row
    assert values(source, board.second(source, 10.0), "gpu", "gpu0")["pcie_link_width"] == 4


def test_a_chip_that_leaves_the_bus_has_no_row(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 0, "0000:05:00.0")
    base = add_card(board, 1, "0000:15:00.0")
    source = board.build(AmdSource)
    source.sample(0)
    (board.root / base.lstrip("/") / "vendor").unlink()
    assert devices(board.second(source, 61.0), "gpu") == ("gpu0",)


def test_keys_of_rocm_smi_through_the_releases() -> None:
    old, middle, new = parsed("rx6700xt_rocm430.json"), parsed("rx6700xt_rocm602.json"), parsed("rx6700xt_rocm612.json")
    same = {
        "gpu_util_ratio": 0, "memory_util_ratio": 0, "power_w": 6, "power_average_w": 6, "power_limit_w": 211, "temp_c": 47,
        "memory_temp_c": 46, "memory_clock_mhz": 96, "fb_total_bytes": 12868124672, "pcie_link_gen": 4, "pcie_link_width": 16,
    }  # fmt: skip
    assert old == same | {"sm_clock_mhz": 500, "fb_used_bytes": 1622728704}
    assert new == same | {"sm_clock_mhz": 0, "fb_used_bytes": 1572745216}  # 12 % allocated is not 12 % busy
    assert {"power_w", "power_average_w"} == set(old) - set(middle)  # "N/A (Secondary die)"


def test_chips_of_rocm_smi_have_their_addresses(tmp_path: Path) -> None:
    chips = parse_tool((FIXTURES / "amd" / "mi100_rocm602.json").read_bytes())
    assert [(chip.number, chip.address) for chip in chips[:2]] == [(0, "0000:83:00.0"), (1, "0000:a3:00.0")]
    board = bench(tmp_path, "amd")
    source = board.build(AmdSource, smi="file:/mi100_rocm602.json")
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0", "gpu1", "gpu2", "gpu3")
    board.edit("/mi100_rocm602.json", '"PCIe Replay Count": "0"', '"PCIe Replay Count": "30"')
    row = values(source, board.second(source, 10.0), "gpu", "gpu0")
    assert (row["pcie_replay_per_s"], row["power_limit_w"]) == (3, 290)
    assert row["fb_used_ratio"] == pytest.approx(6750208 / 34342961152)


SMI = {
    "gpu": 1, "usage": {"gfx_activity": {"value": 73, "unit": "%"}, "umc_activity": "N/A"},
    "power": {"current_socket_power": "N/A", "average_socket_power": {"value": 512, "unit": "W"}},
    "temperature": {"hotspot": {"value": 71, "unit": "C"}, "mem": {"value": 58, "unit": "C"}, "edge": "N/A"},
    "clock": {"gfx_0": {"clk": {"value": 2100, "unit": "MHz"}}, "mem_0": {"clk": {"value": 1300, "unit": "MHz"}}},
    "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 49148, "unit": "MB"}},
    "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "replay_count": 4},
    "ecc": {"total_correctable_count": 7, "total_uncorrectable_count": 1},
    "energy": {"total_energy_consumption": {"value": 5.5, "unit": "kWh"}},
}  # fmt: skip
SMI_ROW = {
    "gpu_util_ratio": 0.73, "power_w": 512, "power_average_w": 512, "temp_c": 71, "memory_temp_c": 58, "sm_clock_mhz": 2100,
    "memory_clock_mhz": 1300, "fb_total_bytes": 196592 * MIB, "fb_used_bytes": 49148 * MIB, "pcie_link_width": 16, "pcie_link_gen": 5,
    "ecc_uncorrectable_count": 1,
}  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda gpu: [gpu], lambda gpu: {"gpu_data": [gpu, "odd", {"gpu": "x"}]}])
def test_amd_smi_in_both_shapes(wrap: Any) -> None:
    [chip] = parse_tool(b"WARNING: user is not in the render group\n" + json.dumps(wrap(SMI)).encode())
    assert chip.number == 1
    assert chip.row == pytest.approx(SMI_ROW)
    assert chip.counts == {"pcie_replay_per_s": 4, "ecc_correctable_per_s": 7}  # a unit that is not known is no value
    assert parse_list(b'[{"gpu": 1, "bdf": "0000:C5:00.0", "partition_id": "N/A"}]') == {1: ("0000:c5:00.0", 0)}


@pytest.mark.parametrize(
    ("output", "reason"),
    [(b"", "not_json"), (b"ERROR: no driver", "not_json"), (b'{"card0": {"GPU', "not_json"), (b"[" * 100_000, "not_json"),
     (b"[]", "no_chips"), (b'{"system": {}}', "no_chips"), (b'{"card0": 5}', "no_chips"), (b"\xff\xfe{", "not_json")],
    ids=["empty", "text", "cut", "deep", "none", "system", "odd", "bytes"],
)  # fmt: skip
def test_an_answer_that_is_none_has_its_reason(output: bytes, reason: str) -> None:
    with pytest.raises(PageError) as caught:
        parse_tool(output)
    assert caught.value.reason == reason


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | st.sampled_from(["N/A", "(5Mhz)", "5 W"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["gpu", "value", "unit", "power", "card0", "usage",
        "gfx_activity", "socket_power", "GPU use (%)", "PCI Bus", "pcie clock level", "gpu_data"]), inner, max_size=4), max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON | st.lists(st.fixed_dictionaries({"gpu": st.integers(0, 9), "power": JSON, "usage": JSON})))
def test_odd_answers_are_read_or_refused(document: object) -> None:
    try:
        chips = parse_tool(json.dumps(document).encode())
    except PageError:
        return
    for chip in chips:
        assert all(math.isfinite(value) for value in {**chip.row, **chip.counts}.values())


PAGE = """# TYPE amd_gpu_package_power gauge
amd_gpu_package_power{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 612
amd_gpu_package_power{gpu_id="1",partition_id="1",pcie_bus_id="0000:0C:00.1"} 0
amd_gpu_gfx_activity{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 90
amd_gpu_gfx_activity{gpu_id="1",partition_id="1",pcie_bus_id="0000:0C:00.1"} 30
amd_gpu_used_vram{gpu_id="1",partition_id="1",pcie_bus_id="0000:0C:00.1"} 1024
amd_gpu_total_vram{gpu_id="1",partition_id="1",pcie_bus_id="0000:0C:00.1"} 24576
amd_gpu_energy_consumed{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 9000000000
amd_gpu_xgmi_link_rx{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0",link_index="0"} 1000
amd_gpu_xgmi_link_rx{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0",link_index="1"} 3000
amd_gpu_junction_temperature{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 65535
amd_pcie_speed{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 32
amd_gpu_health{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0"} 0
amd_gpu_clock{gpu_id="0",partition_id="0",pcie_bus_id="0000:0C:00.0",clock_type="GPU_CLOCK_TYPE_SYSTEM"} 2100
"""


def test_the_exporters_page_and_partitions(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/amd.prom", PAGE)
    source = board.build(AmdSource, url="file:/amd.prom")
    sample = source.sample(0)
    assert values(source, sample, "gpu", "gpu0") == {
        "power_w": 612, "gpu_util_ratio": pytest.approx(0.9), "sm_clock_mhz": 2100, "pcie_link_gen": 5, "health_state": 2,
    }  # fmt: skip
    part = values(source, sample, "gpu_instance", "gpu0/part1")
    assert part == {
        "gpu_util_ratio": pytest.approx(0.3), "fb_used_bytes": 1024 * MIB, "fb_total_bytes": 24576 * MIB,
        "fb_used_ratio": pytest.approx(1 / 24),
    }  # fmt: skip
    board.write(
        "/amd.prom",
        PAGE.replace(" 9000000000", " 15000000000").replace(" 1000\n", " 2000\n").replace(" 3000\n", " 5000\n"),
    )
    row = values(source, board.second(source, 10.0), "gpu", "gpu0")
    assert row["energy_j_per_s"] == pytest.approx(600)  # microjoules
    assert row["nvlink_rx_bytes_per_s"] == pytest.approx(3000 * 1024 / 10)


def test_a_page_without_addresses_keeps_its_numbers(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/amd.prom", PAGE.replace(',pcie_bus_id="0000:0C:00.0"', "").replace(',pcie_bus_id="0000:0C:00.1"', ""))
    source = board.build(AmdSource, url="file:/amd.prom")
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0", "gpu1")
    assert "power_w" not in values(source, sample, "gpu", "gpu1")  # only the first part has sensors


def test_sources_are_put_together_and_each_trouble_is_told(tmp_path: Path) -> None:
    board = bench(tmp_path)
    base = add_card(board, 0, "0000:0c:00.0")
    board.write("/amd.prom", PAGE)
    board.write("/smi.json", '[{"gpu": 0}')
    source = board.build(AmdSource, url="file:/amd.prom", smi="file:/smi.json")
    sample = take(source, 0)
    row = values(source, sample, "gpu", "gpu0")
    assert (row["power_w"], row["health_state"]) == (742, 2)  # the driver's files are fresher than the page
    assert [gap.reason for gap in sample.gaps] == ["smi_not_json"]
    (board.root / "amd.prom").unlink()
    (board.root / base.lstrip("/") / "hwmon/hwmon3/power1_input").unlink()
    assert {gap.reason for gap in board.second(source, 60.0).gaps} == {"missing", "smi_not_json"}


def test_all_columns_exist() -> None:
    used = {*ROCM_KEYS, *ROCM_COUNTS, *SMI_PATHS, *SMI_COUNTS, *(rule.column for rule in amd_page.rules())}
    assert used <= set(NAMES)


# --- partitions: DPX, CPX ------------------------------------------------------------------------------------------------------------


def rocm_part(number: int, bus: str) -> dict[str, str]:
    """As rocm-smi says it of an MI300X in CPX: each part has the socket's power, heat and memory, and its own load."""
    return {
        "GPU use (%)": str(number * 10), "Current Socket Graphics Package Power (W)": "136.0", "PCI Bus": bus,
        "Temperature (Sensor junction) (C)": "46.0", "Max Graphics Package Power (W)": "750.0", "PCIe Replay Count": "0",
        "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "1000000",
    }  # fmt: skip


@pytest.mark.parametrize("function", ["0", "number"])
def test_parts_of_a_chip_are_parts_and_the_sockets_power_is_counted_once(tmp_path: Path, function: str) -> None:
    board = bench(tmp_path)
    cards = {}
    for chip, bus in enumerate(("0C", "22")):
        for part in range(8):
            place = f"0000:{bus}:00.{part if function == 'number' else 0}"
            cards[f"card{8 * chip + part}"] = rocm_part(part, place)
    board.write("/smi.json", json.dumps(cards))
    source = board.build(AmdSource, smi="file:/smi.json")
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0", "gpu1")
    assert devices(sample, "gpu_instance") == tuple(f"gpu{chip}/part{part}" for chip in (0, 1) for part in range(1, 8))
    assert sum(values(source, sample, "gpu", gpu)["power_w"] for gpu in ("gpu0", "gpu1")) == 272
    # the memory that each part claims is that of the whole chip
    assert values(source, sample, "gpu_instance", "gpu1/part7") == {"gpu_util_ratio": pytest.approx(0.7)}
    assert values(source, sample, "gpu", "gpu1")["fb_total_bytes"] == 206141652992


def test_memory_that_is_a_parts_own_stays_with_it(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 0, "0000:0c:00.0")  # the driver's files know the whole: 192 GiB
    parts = [{**rocm_part(part, "0000:0C:00.0"), "VRAM Total Memory (B)": "51539607552"} for part in range(4)]
    board.write("/smi.json", json.dumps({f"card{i}": part for i, part in enumerate(parts)}))
    source = board.build(AmdSource, smi="file:/smi.json")
    sample = source.sample(0)
    assert values(source, sample, "gpu", "gpu0")["fb_total_bytes"] == 206158430208
    assert values(source, sample, "gpu_instance", "gpu0/part3")["fb_total_bytes"] == 51539607552


def test_amd_smi_tells_of_the_whole_chip_how_busy_its_parts_are(tmp_path: Path) -> None:
    def busy(*shares: int | str) -> list[object]:
        return [share if isinstance(share, str) else {"value": share, "unit": "%"} for share in shares]

    # the shape of ROCm 7.0.2 in DPX: the second part says N/A where the first tells of both
    usage = {
        "gfx_activity": {"value": 40, "unit": "%"},
        "gfx_busy_inst": {"xcp_0": busy(60, 60, 60, 60, "N/A"), "xcp_1": busy(20, 20, 20, 20, "N/A")},
    }
    first = {**SMI, "gpu": 0, "usage": usage}
    second = {**SMI, "gpu": 1, "usage": {"gfx_activity": "N/A", "gfx_busy_inst": "N/A"}}
    board = bench(tmp_path)
    board.write("/smi.json", json.dumps({"gpu_data": [first, second]}))
    source = board.build(AmdSource, smi="file:/smi.json")
    assert isinstance(source, AmdSource)
    assert source._tool is not None
    source._tool._listed = parse_list(
        b'[{"gpu": 0, "bdf": "0000:0c:00.0", "partition_id": 0}, {"gpu": 1, "bdf": "0000:0c:00.1", "partition_id": 1}]'
    )
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0",)
    assert values(source, sample, "gpu", "gpu0")["gpu_util_ratio"] == pytest.approx(0.4)
    assert [values(source, sample, "gpu_instance", f"gpu0/part{part}")["gpu_util_ratio"] for part in (0, 1)] == [
        pytest.approx(0.6),
        pytest.approx(0.2),
    ]
    assert values(source, sample, "gpu", "gpu0")["power_w"] == 512
    assert "fb_total_bytes" not in values(source, sample, "gpu_instance", "gpu0/part1")


def test_devices_of_partitions_in_sys_are_no_chips(tmp_path: Path) -> None:
    board = bench(tmp_path)
    add_card(board, 0, "0000:0c:00.0")
    board.write("/sys/class/drm/card1/device/uevent", "DRIVER=amdgpu_xcp_drv\nMODALIAS=platform:amdgpu_xcp\n")
    sample = board.build(AmdSource).sample(0)
    assert devices(sample, "gpu") == ("gpu0",)
