"""The dcgm-exporter page: fields, units, blanks, MIG, Xids, pages that stand still."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.accelerators import BY_DCGM, NAMES
from collectors.pages import dcgm_names
from collectors.runner import take
from collectors.sources.dcgm import DcgmSource, bus_address
from tests.collectors.kit import Bench, bench, devices, values

PAGE = "/run/metrics/dcgm.prom"
MIB = 1024 * 1024


def with_page(tmp_path: Path, name: str = "h100") -> Bench:
    board = bench(tmp_path, "dcgm")
    board.write(PAGE, (board.root / f"{name}.prom").read_text(encoding="utf-8"))
    return board


def build(board: Bench, **settings: object) -> DcgmSource:
    source = board.build(DcgmSource, url=f"file:{PAGE}", **settings)
    assert isinstance(source, DcgmSource)
    return source


def set_value(board: Bench, metric: str, gpu: int, value: object) -> None:
    path = board.root / PAGE.lstrip("/")
    lines = path.read_text(encoding="utf-8").splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith(f'{metric}{{gpu="{gpu}"')]
    assert at, f"no {metric} of GPU {gpu}"
    for i in at:
        lines[i] = f"{lines[i].rpartition(' ')[0]} {value}"
    board.write(PAGE, "\n".join(lines) + "\n")


def test_it_is_quiet_until_an_address_is_set(tmp_path: Path) -> None:
    sample = bench(tmp_path).build(DcgmSource).sample(0)
    assert (sample.blocks, sample.gaps) == ((), ())


def test_golden_values_of_a_page(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    first = values(source, source.sample(0), "gpu", "gpu0")
    assert first == {
        "gpu_util_ratio": 1, "sm_active_ratio": pytest.approx(0.87), "tensor_active_ratio": pytest.approx(0.412345),
        "dram_active_ratio": pytest.approx(0.33), "sm_clock_mhz": 1980, "power_w": pytest.approx(412.573), "temp_c": 41,
        "memory_temp_c": 48, "fb_used_ratio": pytest.approx(60600 / 81079), "pcie_rx_bytes_per_s": 9e8, "pcie_tx_bytes_per_s": 1.2e9,
        "ecc_uncorrectable_count": 0, "remapped_rows_correctable": 0, "remapped_rows_uncorrectable": 0, "row_remap_failure": 0,
        "xid_last": 0, "memory_clock_mhz": 2619, "memory_util_ratio": pytest.approx(0.38), "fb_total_bytes": 81559 * MIB,
        "fb_used_bytes": 60600 * MIB, "fb_reserved_bytes": 480 * MIB, "xid_count": 0,
    }  # fmt: skip
    set_value(board, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 0, 2147483641234 + 12_000_000)
    set_value(board, "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 0, 60)
    set_value(board, "DCGM_FI_DEV_POWER_VIOLATION", 0, 5_000_000_000 + 15_000_000_000)
    set_value(board, "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 1, 40)
    set_value(board, "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 1, 50)
    sample = board.second(source, 30.0)
    later = values(source, sample, "gpu", "gpu0")
    assert later["energy_j_per_s"] == pytest.approx(400)  # 12 kJ in 30 s, on a count beyond 2^31 mJ
    assert later["pcie_replay_per_s"] == pytest.approx(2)
    assert later["power_violation_ratio"] == pytest.approx(0.5)
    assert values(source, sample, "gpu", "gpu1")["nvlink_crc_errors_per_s"] == pytest.approx(2)


def test_blank_values_are_absent_and_large_counts_are_not(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    row = values(source, source.sample(0), "gpu", "gpu1")
    assert not {"sm_active_ratio", "pcie_rx_bytes_per_s", "ecc_uncorrectable_count", "retired_pages_count"} & set(row)
    set_value(board, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1, 140737488400000 + 9_000_000)
    assert values(source, board.second(source, 30.0), "gpu", "gpu1")["energy_j_per_s"] == pytest.approx(300)


def test_a_page_that_counts_microseconds_is_believed(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    board.edit(PAGE, "power constraints (in ns)", "power constraints (in us)")
    source = build(board)
    source.sample(0)
    set_value(board, "DCGM_FI_DEV_POWER_VIOLATION", 0, 5_000_000_000 + 15_000_000)
    assert values(source, board.second(source, 30.0), "gpu", "gpu0")["power_violation_ratio"] == pytest.approx(0.5)
    set_value(
        board, "DCGM_FI_DEV_POWER_VIOLATION", 0, 5_000_000_000 + 15_000_000_000
    )  # nanoseconds after all: no share of time
    assert "power_violation_ratio" not in values(source, board.second(source, 30.0), "gpu", "gpu0")


def test_mig_instances_and_the_names_of_the_new_header(tmp_path: Path) -> None:
    board = with_page(tmp_path, "mig_new_names")
    source = build(board)
    sample = source.sample(0)
    assert devices(sample, "gpu") == ("gpu0",)
    assert devices(sample, "gpu_instance") == ("gpu0/gi7", "gpu0/gi8", "gpu0/gi3")
    assert values(source, sample, "gpu", "gpu0") == {
        "temp_c": 40, "power_w": 310.5, "sm_clock_mhz": 1980, "xid_last": 0, "xid_count": 0,
    }  # fmt: skip
    assert values(source, sample, "gpu_instance", "gpu0/gi8") == {
        "sm_active_ratio": 0.25, "tensor_active_ratio": pytest.approx(0.2), "fb_used_bytes": 2000 * MIB,
        "fb_total_bytes": 9728 * MIB, "fb_used_ratio": pytest.approx(2000 / 9728),
    }  # fmt: skip
    set_value(board, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 0, 103_000)
    assert values(source, board.second(source, 10.0), "gpu", "gpu0")["energy_j_per_s"] == pytest.approx(300)


def test_an_xid_is_an_event_when_it_changes_and_never_at_start(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    source.sample(0)  # GPU 1 shows Xid 31 from before
    board.second(source, 10.0)
    assert board.outlet.codes == []
    set_value(board, "DCGM_FI_DEV_XID_ERRORS", 1, 79)
    sample = board.second(source, 10.0)
    [(event, urgent)] = board.outlet.logs
    assert (event.code, event.severity, urgent) == ("xid:79", "error", True)
    assert event.attributes == {
        "gpu": "gpu1",
        "pci": "0000:3b:00.0",
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
    }
    assert values(source, sample, "gpu", "gpu1")["xid_last"] == 79
    assert values(source, sample, "gpu", "gpu1")["xid_count"] == 1
    board.second(source, 10.0)  # the gauge keeps it for ever
    set_value(board, "DCGM_FI_DEV_XID_ERRORS", 1, 0)  # the exporter was restarted
    board.second(source, 10.0)
    assert board.outlet.codes == ["xid:79"]


def test_the_exporters_count_per_xid_shows_repeats(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    text = (board.root / PAGE.lstrip("/")).read_text(encoding="utf-8")
    series = 'DCGM_EXP_XID_ERRORS_COUNT{{gpu="0",UUID="u",window_size_in_ms="300000",xid="{}"}} {}\n'
    for lines, expected in (
        (series.format(94, 2), []), (series.format(94, 4), [("xid:94", 2)]), (series.format(94, 1), []),
        (series.format(94, 1) + series.format(63, 1), [("xid:63", 1)]),
    ):  # fmt: skip
        board.outlet.logs.clear()
        board.write(PAGE, text.replace("412.5", f"412.{len(lines)}") + lines)
        sample = board.second(source, 10.0)
        assert [(event.code, event.repeat) for event, _ in board.outlet.logs] == expected
    assert values(source, sample, "gpu", "gpu0")["xid_count"] == 3


def test_xids_can_be_left_to_the_kernel_log(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board, xid_events=False)
    source.sample(0)
    set_value(board, "DCGM_FI_DEV_XID_ERRORS", 0, 48)
    assert values(source, board.second(source, 10.0), "gpu", "gpu0")["xid_count"] == 1
    assert board.outlet.logs == []


def test_what_the_kernel_log_told_is_not_told_again(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board)
    source.sample(0)
    board.context.facts.xids.by_kernel("0000:19:00.0", "xid:48", board.clock.monotonic_ns())
    set_value(board, "DCGM_FI_DEV_XID_ERRORS", 0, 48)
    board.second(source, 30.0)
    assert board.outlet.logs == []
    set_value(board, "DCGM_FI_DEV_XID_ERRORS", 0, 63)
    board.second(source, 30.0)
    assert board.outlet.codes == ["xid:63"]


def test_the_exporters_health_watches(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    text = (board.root / PAGE.lstrip("/")).read_text(encoding="utf-8")
    watch = 'DCGM_EXP_GPU_HEALTH_STATUS{{gpu="{}",health_watch="{}"}} {}\n'
    board.write(PAGE, text + watch.format(0, "PCIE", 0) + watch.format(1, "MEM", 10) + watch.format(1, "INFOROM", 0))
    source = build(board)
    sample = source.sample(0)
    assert [values(source, sample, "gpu", device)["health_state"] for device in ("gpu0", "gpu1")] == [0, 1]


def test_a_page_of_several_machines_is_refused(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    text = (board.root / PAGE.lstrip("/")).read_text(encoding="utf-8")
    board.write(PAGE, text + 'DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="node-b"} 40\n')
    assert [gap.reason for gap in take(build(board), 0).gaps] == ["several_hosts"]


def test_a_page_that_hangs_or_goes_away_is_a_gap(tmp_path: Path) -> None:
    board = with_page(tmp_path)
    source = build(board, stale_s=25.0)
    for _ in range(3):
        assert take(source, 0).gaps == ()
        board.clock.advance_ns(10 * 10**9)
    sample = take(source, 0)
    assert ([gap.reason for gap in sample.gaps], sample.blocks) == (["stale"], ())
    set_value(board, "DCGM_FI_DEV_GPU_TEMP", 0, 42)
    assert board.second(source, 10.0).gaps == ()
    (board.root / PAGE.lstrip("/")).unlink()
    sample = board.second(source, 10.0)
    assert [gap.reason for gap in sample.gaps] == ["missing"]
    assert devices(sample, "gpu") == ("gpu0", "gpu1")  # the last page is not too old yet
    board.clock.advance_ns(20 * 10**9)
    sample = take(source, 0)
    assert ([gap.reason for gap in sample.gaps], sample.blocks) == (["missing"], ())


def test_every_field_of_the_catalogue_has_its_rule() -> None:
    rules = dcgm_names.rules()
    columns = {rule.column for rule in rules}
    assert {signal.name for signal in BY_DCGM.values()} - columns == {"xid_last"}
    assert columns <= {*NAMES, "fb_free_bytes"}
    old = {name for name in BY_DCGM if name.split("_", 3)[3] in dcgm_names.RENAMED}
    assert len(old) == len(dcgm_names.RENAMED)


def test_spellings_of_an_address() -> None:
    assert [bus_address(text) for text in ("00000000:3B:00.0", "0000:3b:00.0", "3B:00.0")] == ["0000:3b:00.0"] * 3
