"""The machine source: memory and PCIe errors, sensors, disks' health, what the kernel is short of."""

from __future__ import annotations

import errno
import struct
import threading
from pathlib import Path

import pytest

from collectors.base import Sample
from collectors.machine import kernel, sensors, smart
from collectors.machine.timekeeping import ClockState, kernel_clock
from collectors.sources.machine import MachineSource
from tests.collectors.kit import Bench, bench, devices, values

EDAC = "/sys/devices/system/edac/mc/mc0"


def health(spare: int = 100, used: int = 1, media_errors: int = 0, celsius: int = 42) -> bytes:
    """A health log as the specification lays it out; the numbers of the captured disks."""
    log = bytearray(512)
    struct.pack_into("<BHBBB", log, 0, 1 if spare < 10 else 0, celsius + 273, spare, 10, used)
    log[160:176] = media_errors.to_bytes(16, "little")
    return bytes(log)


def built(board: Bench, **settings: object) -> MachineSource:
    source = board.build(MachineSource, **{"every_s": 1.0, "slow_every_s": 1.0, "disks_every_s": 1.0, **settings})
    assert isinstance(source, MachineSource)
    return source


def later(board: Bench, source: MachineSource, seconds: float = 1.0) -> Sample:
    board.second(source, seconds)
    assert source.settle(60)
    return source.sample(0)


def test_what_the_kernel_is_short_of(tmp_path: Path) -> None:
    board = bench(tmp_path, "machine")
    board.write("/proc/stat", "cpu 1 2\nintr 1000 5 5\nprocs_blocked 3\nsoftirq 50 1\n")
    source = built(board)
    source.ask_clock = lambda: ClockState(True, 0.25, 1.5, -12.0)
    row = values(source, later(board, source, 0.0), "machine", "machine")
    assert row == {
        "blocked_tasks": 3, "conntrack_used_ratio": pytest.approx(123 / 65536), "file_handles_count": 1024,
        "file_handles_ratio": pytest.approx(1024 / 1631329), "hung_tasks_count": 42, "clock_source": 1,
        "clock_synced": 1, "clock_correction_ms": 0.25, "clock_error_ms": 1.5, "clock_frequency_ppm": -12,
    }  # fmt: skip
    board.edit("/proc/vmstat", "oom_kill 0", "oom_kill 4")
    board.edit("/proc/vmstat", "pgmajfault 507162", "pgmajfault 507172")
    board.edit("/proc/vmstat", "allocstall 83165", "allocstall 83169")
    board.edit("/proc/net/softnet_stat", "000dfb82 00000029", "000dfb82 00000031")
    board.edit("/proc/stat", "intr 1000", "intr 3000")
    row = values(source, later(board, source, 2.0), "machine", "machine")
    assert (row["oom_kills_per_s"], row["major_faults_per_s"], row["allocation_stalls_per_s"]) == (2, 5, 2)
    assert (row["softnet_dropped_per_s"], row["interrupts_per_s"]) == (4, 1000)


def test_memory_errors_and_the_module_that_made_them(tmp_path: Path) -> None:
    board = bench(tmp_path, "machine")
    source = built(board)
    row = values(source, later(board, source, 0.0), "board", "board")
    assert row["dimm_uncorrectable_count"] == 5
    assert row["cpu_clock_mhz"] == pytest.approx(1699.981)
    assert row["machine_checks_count"] == 0
    assert 0 < row["disk_used_ratio"] <= 1
    board.write(f"{EDAC}/ce_count", "61")
    board.write(f"{EDAC}/ue_count", "6")
    row = values(source, later(board, source, 2.0), "board", "board")
    assert (row["dimm_correctable_per_s"], row["dimm_uncorrectable_count"]) == (30, 6)
    (event, urgent) = board.outlet.logs[0]
    assert (event.code, event.severity, urgent) == ("edac_uncorrected", "critical", True)
    assert event.attributes == {"controller": "mc0", "count": "6", "module": "mc0csrow2channel0"}


def test_errors_and_link_of_a_pcie_device(tmp_path: Path) -> None:
    board = bench(tmp_path, "machine")
    base = "/sys/bus/pci/devices/0000:01:00.0"
    board.write("/sys/bus/pci/devices/0000:00:1f.3/class", "0x040300\n")  # sound: of no interest
    source = built(board)
    later(board, source, 0.0)
    board.edit(f"{base}/aer_dev_correctable", "TOTAL_ERR_COR 0", "TOTAL_ERR_COR 14")
    board.edit(f"{base}/aer_dev_fatal", "TOTAL_ERR_FATAL 0", "TOTAL_ERR_FATAL 1")
    board.write(f"{base}/current_link_width", "2\n")
    sample = later(board, source, 2.0)
    assert devices(sample, "pcie") == ("0000:01:00.0",)
    assert values(source, sample, "pcie", "0000:01:00.0") == {
        "aer_corrected_per_s": 7, "aer_nonfatal_per_s": 0, "aer_fatal_count": 1, "link_speed_gts": 8, "link_width": 2, "link_narrow": 1,
    }  # fmt: skip


def test_sensors_by_what_they_measure(tmp_path: Path) -> None:
    board = bench(tmp_path)
    monitors = {
        "hwmon0/name": "coretemp", "hwmon0/temp1_input": "61000", "hwmon0/temp2_input": "72500",
        "hwmon1/name": "nvme", "hwmon1/temp1_input": "39850",
        "hwmon2/name": "nct6775", "hwmon2/temp1_input": "24000", "hwmon2/temp1_label": "Inlet Temp", "hwmon2/temp2_input": "-128000",
        "hwmon2/fan1_input": "9000", "hwmon2/fan1_max": "12000", "hwmon2/fan2_input": "0",
        "hwmon3/name": "power_meter", "hwmon3/power1_average": "6200000000", "hwmon4/name": "mlx5", "hwmon4/temp1_input": "junk",
        "hwmon5/name": "amdgpu", "hwmon5/power1_average": "90000000",
    }  # fmt: skip
    for name, value in monitors.items():
        board.write(f"/sys/class/hwmon/{name}", f"{value}\n")
    source = built(board)
    row = values(source, later(board, source, 0.0), "board", "board")
    assert row | {"disk_used_ratio": 0} == pytest.approx({
        "cpu_temp_c": 72.5, "nvme_temp_c": 39.85, "inlet_temp_c": 24, "fan_ratio": 0.75, "server_power_w": 6200, "disk_used_ratio": 0,
    })  # fmt: skip


def test_a_thermal_zone_of_the_processor_serves_where_no_monitor_does(tmp_path: Path) -> None:
    board = bench(tmp_path, "machine")
    board.write("/sys/class/thermal/thermal_zone2/type", "x86_pkg_temp\n")
    board.write("/sys/class/thermal/thermal_zone2/temp", "55000\n")
    source = built(board)
    assert values(source, later(board, source, 0.0), "board", "board")["cpu_temp_c"] == 55


def test_the_health_of_disks_and_the_worst_of_them(tmp_path: Path) -> None:
    board = bench(tmp_path)
    logs = {"/dev/nvme0": health(), "/dev/nvme9": health(spare=0, media_errors=10)}
    for name in ("nvme0", "nvme9"):
        board.write(f"/sys/class/nvme/{name}/state", "live\n")
    source = built(board)
    source.ask_disk = lambda path: logs[path.removeprefix(str(board.root))]
    sample = later(board, source, 0.0)
    assert values(source, sample, "nvme", "nvme9") == pytest.approx({
        "live": 1, "critical_warning": 1, "spare_ratio": 0, "spare_threshold_ratio": 0.1, "used_ratio": 0.01, "media_errors_count": 10,
        "temp_c": 41.85,
    }, rel=1e-4)  # fmt: skip
    logs["/dev/nvme9"] = health(spare=0, media_errors=30)
    row = values(source, later(board, source, 2.0), "board", "board")
    assert (row["nvme_spare_ratio"], row["nvme_media_errors_per_s"]) == (0, 10)


def test_disks_that_may_not_be_asked_are_a_gap_and_keep_their_state(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write("/sys/class/nvme/nvme0/state", "dead\n")
    source = built(board)

    def refuse(path: str) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    source.ask_disk = refuse
    sample = later(board, source, 0.0)
    assert values(source, sample, "nvme", "nvme0") == {"live": 0}
    assert [gap.reason for gap in sample.gaps] == ["disks_refused"]


def test_a_sensor_that_hangs_costs_the_sensors_only(tmp_path: Path) -> None:
    board = bench(tmp_path, "machine")
    board.write("/sys/class/nvme/nvme0/state", "live\n")
    release = threading.Event()
    source = built(board)

    def hang(path: str) -> bytes:
        assert release.wait(60)
        return health()

    source.ask_disk = hang
    source.sample(0)
    for name in ("kernel", "sensors", "slow"):
        assert source._questions[name].settle(60)
    board.second(source, 3.0)
    for name in ("kernel", "sensors", "slow"):
        assert source._questions[name].settle(60)
    sample = source.sample(0)
    assert [gap.reason for gap in sample.gaps] == ["disks_hung"]
    assert devices(sample, "machine") == ("machine",)
    release.set()
    assert source.settle(60)


def test_an_empty_tree_is_quiet(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = built(board)
    sample = later(board, source, 0.0)
    assert sample.gaps == ()
    assert set(values(source, sample, "board", "board")) == {"disk_used_ratio"}


def test_stalls_by_zone_are_summed() -> None:
    assert kernel.vmstat("allocstall_dma 1\nallocstall_normal 2\nbad\nx y\n") == {
        "allocstall_dma": 1, "allocstall_normal": 2, "allocstall": 3
    }  # fmt: skip


def test_odd_texts() -> None:
    assert kernel.softnet("zz yy xx\n1\n") is None
    assert kernel.file_handles("1 2") is None
    assert kernel.error_interrupts("MCE: 1 2 x 3 Machine check\n MCP: 9\nTHR:\n") == {
        "machine_checks": 6,
        "threshold_interrupts": 0,
    }
    assert kernel.clock_source_number("hpet") == 7
    assert kernel.clock_source_number("") is None
    assert sensors.aer_total("RxErr 1\nBadTLP 2\n", "TOTAL_ERR_COR") == 3
    assert sensors.transfers("Unknown") is None
    assert smart.decode_health(b"short") == {}


def test_the_clock_of_this_machine() -> None:
    state = kernel_clock()
    assert state.error_ms >= 0
    assert abs(state.frequency_ppm) <= 1000
