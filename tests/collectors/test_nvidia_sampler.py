"""GPUs by a stand-in library: units, what is absent, what is asked how often, hangs, losses, MIG, vGPU, old libraries."""

from __future__ import annotations

import csv
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collectors.accelerators import INSTANCE_SIGNALS, NAMES
from collectors.nvidia import abi, wire
from collectors.nvidia.gpu import Spans
from collectors.nvidia.library import Library, LibraryError
from collectors.nvidia.sampler import Options, Sampler
from tests.collectors.kit import FIXTURES
from tests.collectors.nvml_stub import COMPILER, HANG, I32, I64, MIB, NOT_SUPPORTED, U32, UNTOUCHED, Stub, built

pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler: the stand-in for the driver library cannot be built"
)

MS = 10**6
BRISK = Spans((200 * MS, 20 * MS, 20 * MS), stale_periods=500)
"""Hardly any waiting; and nothing too old, however slow the machine is."""


@dataclass
class Board:
    """A sampler over a stand-in, and what it said."""

    stub: Stub
    sampler: Sampler
    gpus: dict[str, dict[str, float]]
    parts: dict[str, dict[str, float]]
    events: list[dict[str, Any]]
    inventory: dict[str, Any]
    frame: wire.Frame | None = None

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            for message in self.sampler.tick():
                self._take(message)

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Tick until something is so."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"it did not come to pass: {self.events}"
            self.tick()

    def codes(self) -> list[str]:
        return [event["code"] for event in self.events]

    def _take(self, message: bytes) -> None:
        if message[:1] == wire.ROWS:
            self._take_rows(wire.frame_of(message, 4 * len(NAMES), 4 * len(INSTANCE_SIGNALS)))
        elif message[:1] == wire.INVENTORY:
            self.inventory = wire.facts_of(message)
        else:
            self.events.append(wire.facts_of(message))

    def _take_rows(self, frame: wire.Frame) -> None:
        self.frame = frame
        if frame.generation != self.inventory.get("generation"):
            return
        values = array("f", frame.rows)
        at = 0
        self.gpus, self.parts = {}, {}
        for kind, names, found in (("gpus", NAMES, self.gpus), ("parts", INSTANCE_SIGNALS, self.parts)):
            for facts in self.inventory[kind]:
                row = values[at : at + len(names)]
                found[facts["name"]] = {n: v for n, v in zip(names, row, strict=True) if not math.isnan(v)}
                at += len(names)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Board]:
    def make(gpus: int = 1, spans: Spans = BRISK, old: bool = False, **options: Any) -> Board:
        stub = Stub(tmp_path / "state", gpus)
        monkeypatch.setenv("NVML_STUB_STATE", str(stub.path))
        wanted = Options(NAMES, INSTANCE_SIGNALS, spans, events=options.pop("events", False), **options)
        # a copy, because a library that is loaded already keeps the state of another test
        own = tmp_path / f"lib{gpus}.so"
        own.write_bytes(built(old=old).read_bytes())
        return Board(stub, Sampler(Library(str(own)), wanted), {}, {}, [], {})

    return make


def capture(name: str) -> dict[str, str]:
    """The columns of a captured nvidia-smi query."""
    with (FIXTURES / "nvidia-smi" / f"{name}.csv").open(encoding="utf-8") as file:
        return dict(next(iter(csv.DictReader(file, skipinitialspace=True))))


def number(text: str) -> float | None:
    try:
        return float(text.split(maxsplit=1)[0])
    except ValueError:
        return {"No": 0.0, "Yes": 1.0, "None": 0.0}.get(text)


def play(stub: Stub, said: dict[str, str]) -> None:
    """Let the stand-in answer what the captured GPU answered."""
    for call, columns, scale in (
        ("DeviceGetClockInfo", ("clocks.current.sm [MHz]", "clocks.current.memory [MHz]"), 1),
        ("DeviceGetTemperatureV", ("temperature.gpu",), 1),
        ("DeviceGetMarginTemperature", ("temperature.gpu.tlimit",), 1),
        ("DeviceGetUtilizationRates", ("utilization.gpu [%]", "utilization.memory [%]"), 1),
        ("DeviceGetMemoryInfo_v2", ("memory.total [MiB]", "memory.used [MiB]", "memory.reserved [MiB]"), MIB),
        ("DeviceGetCurrPcieLinkGeneration", ("pcie.link.gen.current",), 1),
        ("DeviceGetCurrPcieLinkWidth", ("pcie.link.width.current",), 1),
    ):
        numbers = [number(said[column]) for column in columns]
        code = 0 if None not in numbers else NOT_SUPPORTED
        stub.answer(call, *(int((n or 0) * scale) for n in numbers), code=code)
    for field, column, scale in (
        (abi.FI_POWER_INSTANT, "power.draw.instant [W]", 1000), (abi.FI_POWER_AVERAGE, "power.draw.average [W]", 1000),
        (abi.FI_POWER_LIMIT, "power.limit [W]", 1000), (abi.FI_MEMORY_TEMP, "temperature.memory", 1),
        (abi.FI_REMAPPED_COR, "remapped_rows.correctable", 1), (abi.FI_REMAPPED_UNC, "remapped_rows.uncorrectable", 1),
        (abi.FI_REMAPPED_PENDING, "remapped_rows.pending", 1), (abi.FI_REMAPPED_FAILURE, "remapped_rows.failure", 1),
        (abi.FI_RECOVERY_ACTION, "gpu_recovery_action", 1),
    ):  # fmt: skip
        value = number(said[column])
        stub.field(field, round((value or 0) * scale), U32, code=0 if value is not None else NOT_SUPPORTED)
    stub.code("DeviceGetRemappedRows", NOT_SUPPORTED)
    if number(said["temperature.memory"]) is None:
        stub.links(0, 0, 0)
        stub.code("DeviceGetGpuFabricInfoV", NOT_SUPPORTED)


@pytest.mark.parametrize("name", ["h100", "h200", "h100-mig", "l40s"])
def test_a_captured_gpu_is_told_in_our_units(board: Callable[..., Board], name: str) -> None:
    said = capture(name)
    b = board()
    play(b.stub, said)
    b.stub.answer("DeviceGetMigMode", int(said["mig.mode.current"] == "Enabled"))
    b.until(lambda: bool(b.gpus) and "power_limit_w" in b.gpus["gpu0"])
    b.until(lambda: bool(b.inventory["gpus"][0]["support"]))
    row = b.gpus["gpu0"]

    def shown(column: str, scale: float = 1.0) -> float | None:
        value = number(said[column])
        return None if value is None else pytest.approx(value * scale, rel=1e-6)  # type: ignore[return-value]

    usable = float(said["memory.total [MiB]"].split()[0]) - float(said["memory.reserved [MiB]"].split()[0])
    expected = {
        "sm_clock_mhz": shown("clocks.current.sm [MHz]"), "memory_clock_mhz": shown("clocks.current.memory [MHz]"),
        "power_w": shown("power.draw.instant [W]"), "power_average_w": shown("power.draw.average [W]"),
        "power_limit_w": shown("power.limit [W]"), "temp_c": shown("temperature.gpu"), "temp_margin_c": shown("temperature.gpu.tlimit"),
        "memory_temp_c": shown("temperature.memory"), "gpu_util_ratio": shown("utilization.gpu [%]", 0.01),
        "memory_util_ratio": shown("utilization.memory [%]", 0.01), "fb_total_bytes": shown("memory.total [MiB]", MIB),
        "fb_used_bytes": shown("memory.used [MiB]", MIB), "fb_reserved_bytes": shown("memory.reserved [MiB]", MIB),
        "fb_used_ratio": shown("memory.used [MiB]", 1 / usable), "pcie_link_gen": shown("pcie.link.gen.current"),
        "pcie_link_width": shown("pcie.link.width.current"), "remapped_rows_correctable": shown("remapped_rows.correctable"),
        "remapped_rows_uncorrectable": shown("remapped_rows.uncorrectable"), "row_remap_pending": shown("remapped_rows.pending"),
        "row_remap_failure": shown("remapped_rows.failure"), "recovery_action": shown("gpu_recovery_action"),
        "temp_slowdown_margin_c": -2, "temp_shutdown_margin_c": -8,
    }  # fmt: skip
    assert {column: row.get(column) for column in expected} == expected
    why = b.inventory["gpus"][0]["support"]
    absent = {column for column, value in expected.items() if value is None}
    assert absent <= set(why), "what is absent has a reason"
    if name == "h100-mig":
        assert why["gpu_util_ratio"] == why["memory_util_ratio"] == "mig"


def test_counters_become_rates_and_start_again_with_the_driver(board: Callable[..., Board]) -> None:
    b = board()
    for field in (abi.FI_ECC_SBE_VOL, abi.FI_ENERGY, abi.FI_NVLINK_DATA_TX, abi.FI_POLICY_POWER, abi.FI_PCIE_REPLAY):
        b.stub.field(field, 10**9)
    b.stub.field(abi.FI_ECC_DBE_VOL, 3)
    b.until(lambda: bool(b.gpus) and "pcie_link_gen" in b.gpus["gpu0"])
    assert not {"ecc_correctable_per_s", "energy_j_per_s"} & set(b.gpus["gpu0"]), "one reading has no rate"
    started = time.monotonic()
    for field, grown in (
        (abi.FI_ECC_SBE_VOL, 5),
        (abi.FI_ENERGY, 7000),
        (abi.FI_NVLINK_DATA_TX, 1000),
        (abi.FI_POLICY_POWER, 10**12),
    ):
        b.stub.field(field, 10**9 + grown)
    b.until(lambda: b.gpus["gpu0"].get("ecc_correctable_per_s", 0) > 0)
    row, at_most_s = b.gpus["gpu0"], time.monotonic() - started + 1
    assert row["ecc_correctable_per_s"] >= 5 / at_most_s
    # all by the same interval, each in its unit: mJ, KiB, ns
    assert row["energy_j_per_s"] / row["ecc_correctable_per_s"] == pytest.approx(7 / 5, rel=1e-3)
    assert row["nvlink_tx_bytes_per_s"] / row["ecc_correctable_per_s"] == pytest.approx(1000 * 1024 / 5, rel=1e-3)
    assert row["power_violation_ratio"] == 1.0, "a share of time is at most the whole of it"
    assert row["pcie_replay_per_s"] == 0
    for field in (abi.FI_ECC_SBE_VOL, abi.FI_ENERGY, abi.FI_ECC_DBE_VOL):
        b.stub.field(field, 0)
    b.until(lambda: b.gpus["gpu0"]["ecc_uncorrectable_count"] == 0)
    assert b.gpus["gpu0"].get("ecc_correctable_per_s", 0.0) >= 0, "a volatile count that fell is no negative rate"


@pytest.mark.parametrize(
    ("field", "kind", "raw", "column"),
    [
        (abi.FI_MEMORY_TEMP, U32, 0x7FFFFFF0, "memory_temp_c"),
        (abi.FI_MEMORY_TEMP, U32, 0xFFFFFFFF, "memory_temp_c"),
        (abi.FI_MEMORY_TEMP, U32, 0, "memory_temp_c"),
        (abi.FI_REMAPPED_COR, U32, 0x7FFFFFF2, "remapped_rows_correctable"),
        (abi.FI_RECOVERY_ACTION, U32, 0xFFFFFFFF, "recovery_action"),
        (abi.FI_ECC_DBE_VOL, 3, 9223372036854775794, "ecc_uncorrectable_count"),
        (abi.FI_ECC_DBE_VOL, I64, 9223372036854775794, "ecc_uncorrectable_count"),
        (abi.FI_RECOVERY_ACTION, 77, 1, "recovery_action"),
        (abi.FI_POWER_AVERAGE, U32, 2_000_000_000, "power_average_w"),
    ],
)
def test_blank_and_impossible_values_are_absent(
    board: Callable[..., Board], field: int, kind: int, raw: int, column: str
) -> None:
    b = board()
    b.stub.field(field, raw, kind)
    b.until(lambda: bool(b.gpus))
    b.tick()
    assert column not in b.gpus["gpu0"]


def test_margins_that_come_as_unsigned_numbers_are_negative(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.field(abi.FI_TLIMIT_SHUTDOWN, -8 & 0xFFFFFFFF, U32)
    b.stub.field(abi.FI_TLIMIT_SLOWDOWN, -3, I32)
    b.stub.answer("DeviceGetMarginTemperature", -1)
    b.until(lambda: bool(b.gpus))
    b.tick()
    row = b.gpus["gpu0"]
    assert (row["temp_shutdown_margin_c"], row["temp_slowdown_margin_c"], row["temp_margin_c"]) == (-8, -3, -1)


def test_an_old_library_is_asked_by_its_own_functions(board: Callable[..., Board]) -> None:
    b = board(old=True)
    b.stub.answer("DeviceGetCurrentClocksThrottleReasons", 0x4)
    b.stub.answer("DeviceGetRemappedRows", 1, 2, 3)
    b.stub.answer("DeviceGetComputeRunningProcesses", 2)
    b.stub.answer("DeviceGetGpuFabricInfo", 3, 0)
    b.until(lambda: bool(b.gpus))
    b.tick()
    row = b.gpus["gpu0"]
    assert row["clocks_event_reasons"] == 4
    assert row["temp_c"] == 59
    assert row["power_w"] == pytest.approx(631.95)
    assert row["temp_margin_c"] == 87 - 59, "thresholds in degrees become margins, and never stand as such"
    assert (row["temp_slowdown_margin_c"], row["temp_shutdown_margin_c"]) == (87 - 89, 87 - 92)
    assert row["fb_used_bytes"] == (19818 + 479) * MIB, (
        "version 1 counts the reserve as used, and does not say how much that is"
    )
    assert "fb_reserved_bytes" not in row
    remapped = [
        row[c]
        for c in ("remapped_rows_correctable", "remapped_rows_uncorrectable", "row_remap_pending", "row_remap_failure")
    ]
    assert remapped == [1, 2, 1, 1]
    assert (row["compute_processes_count"], row["fabric_state"]) == (2, 3)
    why = b.inventory["gpus"][0]["support"]
    assert why["energy_j_per_s"] == why["power_average_w"] == "old_library"


def test_what_is_not_supported_is_asked_once_until_the_gpu_begins_another_life(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.field(abi.FI_ENERGY, 5000)
    b.stub.field(abi.FI_MEMORY_TEMP, 0, code=NOT_SUPPORTED)
    b.stub.code("DeviceGetUtilizationRates", NOT_SUPPORTED)
    b.until(lambda: bool(b.gpus))
    b.tick(10)
    assert (b.stub.field_made(abi.FI_MEMORY_TEMP), b.stub.made("DeviceGetUtilizationRates")) == (1, 1)
    b.stub.field(abi.FI_ENERGY, 10)  # less than before: a reset
    b.until(lambda: b.stub.field_made(abi.FI_MEMORY_TEMP) == 2)
    before = b.stub.made("DeviceGetUtilizationRates")
    b.stub.answer("DeviceGetMigMode", 1)
    b.until(lambda: b.stub.made("DeviceGetUtilizationRates") == before + 1)
    assert b.stub.made("Init_v2", None) == 1, "opened once, whatever happens in between"
    assert b.stub.made("DeviceGetPcieThroughput") == 0, "it holds the caller for 20 ms"


def test_a_field_that_the_library_leaves_untouched_is_absent(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.field(abi.FI_RECOVERY_ACTION, 3, U32, code=UNTOUCHED)
    b.until(lambda: bool(b.gpus))
    b.tick()
    assert "recovery_action" not in b.gpus["gpu0"]


def test_a_structure_of_another_version_is_not_read(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.answer("DeviceGetGpuFabricInfoV", 3, 0, 0xAAAA, kind=2)  # a library that knows version 2
    b.until(lambda: bool(b.gpus))
    b.tick()
    assert (b.gpus["gpu0"]["fabric_state"], b.gpus["gpu0"]["fabric_health"]) == (3, 0xAAAA)


def test_a_hanging_call_costs_its_gpu_only_and_is_told_once(board: Callable[..., Board]) -> None:
    b = board(4, Spans((200 * MS, 200 * MS, 200 * MS)))
    b.until(lambda: len(b.gpus) == 4 and "power_w" in b.gpus["gpu3"])
    b.stub.code("DeviceGetClockInfo", HANG, gpu=1)
    b.stub.answer("DeviceGetTemperatureV", 61, gpu=3)
    b.until(lambda: "gpu_hung" in b.codes())
    b.tick(3)
    assert b.codes().count("gpu_hung") == 1
    assert b.events[-1]["gpu"] == "gpu1"
    assert b.frame is not None
    assert b.frame.hung == 0b0010
    assert set(b.gpus) == {"gpu0", "gpu1", "gpu2", "gpu3"}
    assert b.gpus["gpu1"] == {}, "its values are too old; its row stays"
    b.until(lambda: b.gpus["gpu3"].get("temp_c") == 61)
    asked = b.stub.made("DeviceGetClockInfo", gpu=1)
    b.tick(3)
    assert b.stub.made("DeviceGetClockInfo", gpu=1) == asked, "no second call beside one that hangs"
    b.stub.code("DeviceGetClockInfo", 0, gpu=1)
    b.until(lambda: "power_w" in b.gpus["gpu1"])
    assert b.codes()[-1] == "gpu_answers"


def test_a_driver_that_hangs_while_it_opens_is_told_by_the_status(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.answer("Init_v2", gpu=None, code=HANG)
    b.until(lambda: b.frame is not None and b.frame.status == wire.HUNG)
    b.stub.code("Init_v2", 0, None)
    b.until(lambda: bool(b.gpus))


@pytest.mark.parametrize(("code", "status"), [(9, wire.NO_DRIVER), (4, wire.NO_PERMISSION)])
def test_without_a_driver_there_is_a_reason(board: Callable[..., Board], code: int, status: int) -> None:
    b = board()
    b.stub.answer("Init_v2", gpu=None, code=code)
    b.tick(5)
    assert b.frame is not None
    assert (b.frame.status, b.stub.made("Init_v2", None)) == (status, 1), "and it is not opened again and again"


def test_a_lost_gpu_is_told_once_and_keeps_its_name_when_it_comes_back(board: Callable[..., Board]) -> None:
    b = board(3)
    b.until(lambda: len(b.gpus) == 3)
    b.stub.lost(1)
    b.until(lambda: set(b.gpus) == {"gpu0", "gpu2"})
    looked = b.stub.made("DeviceGetHandleByIndex_v2", None)
    b.until(lambda: b.stub.made("DeviceGetHandleByIndex_v2", None) >= looked + 9)
    b.tick(2)
    assert b.codes() == ["gpu_lost"], "three looks later still told once"
    assert b.events[0]["pci"] == "0000:19:00.0"
    b.stub.lost(1, False)
    b.until(lambda: set(b.gpus) == {"gpu0", "gpu1", "gpu2"})
    assert b.codes() == ["gpu_lost", "gpu_back"]


def test_gpus_are_known_by_their_uuid_not_by_their_index(board: Callable[..., Board]) -> None:
    b = board(3, names={"GPU-00000002": "gpu2"})
    # the driver counts anew: what was GPU 2 is its first now
    b.stub.name(0, "GPU-00000002", "00000000:1A:00.0")
    b.stub.name(2, "GPU-00000000", "00000000:18:00.0")
    b.until(lambda: len(b.gpus) == 3)
    assert {g["name"]: g["uuid"] for g in b.inventory["gpus"]}["gpu2"] == "GPU-00000002"
    assert len({g["name"] for g in b.inventory["gpus"]}) == 3


def test_a_driver_that_was_replaced_ends_the_process(board: Callable[..., Board]) -> None:
    b = board()
    b.until(lambda: bool(b.gpus))
    b.stub.code("DeviceGetClockInfo", abi.LIB_RM_VERSION_MISMATCH)
    b.tick(2)
    assert b.sampler.finished
    assert b.frame is not None
    assert b.frame.status == wire.OLD_DRIVER


def test_parts_of_a_gpu_have_their_memory_and_activity(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.answer("DeviceGetMigMode", 1)
    b.stub.part(0, 0, 2, 40448 * MIB, 26 * MIB, "MIG-0")
    b.stub.part(0, 1, 9, 9984 * MIB, 9 * MIB, "MIG-1")
    b.until(lambda: set(b.parts) == {"gpu0/gi2.ci0", "gpu0/gi9.ci0"} and "sm_active_ratio" in b.parts["gpu0/gi9.ci0"])
    assert b.parts["gpu0/gi2.ci0"]["fb_total_bytes"] == 40448 * MIB
    assert b.parts["gpu0/gi9.ci0"]["fb_used_bytes"] == 9 * MIB
    assert b.parts["gpu0/gi9.ci0"]["sm_active_ratio"] == pytest.approx(0.935)
    assert b.gpus["gpu0"]["mig_enabled"] == 1
    assert b.gpus["gpu0"]["power_w"] == pytest.approx(625.68)
    b.stub.part(0, 1, 9, 9984 * MIB, 9 * MIB, "MIG-2")  # made anew: another UUID in the same place
    b.until(lambda: [part["uuid"] for part in b.inventory["parts"]] == ["MIG-0", "MIG-2"])


def test_a_guest_of_a_virtual_machine_says_what_only_its_host_knows(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.answer("DeviceGetVirtualizationMode", 2)
    b.stub.code("DeviceGetPowerUsage", NOT_SUPPORTED)
    for field in (
        abi.FI_POWER_INSTANT,
        abi.FI_POWER_AVERAGE,
        abi.FI_ECC_DBE_VOL,
        abi.FI_NVLINK_REPLAY,
        abi.FI_NVLINK_DL_REPLAY,
    ):
        b.stub.field(field, code=NOT_SUPPORTED)
    b.until(lambda: bool(b.gpus) and bool(b.inventory["gpus"][0]["support"]))
    why = b.inventory["gpus"][0]["support"]
    absent = ("power_w", "ecc_uncorrectable_count", "nvlink_replays_per_s")
    assert [why.get(column) for column in absent] == ["vgpu"] * 3
    assert not set(absent) & set(b.gpus["gpu0"])


def test_activity_is_measured_between_two_samples(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.field(abi.FI_PCIE_RX, code=NOT_SUPPORTED)
    b.until(lambda: bool(b.gpus) and "sm_active_ratio" in b.gpus["gpu0"])
    row = b.gpus["gpu0"]
    shares = [row[column] for column in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")]
    assert shares == pytest.approx([0.935, 0.6125, 0.4])
    assert row["pcie_rx_bytes_per_s"] == 200 * MIB, "where the counter is missing"


def test_activity_without_the_right_to_it_has_a_reason(board: Callable[..., Board]) -> None:
    b = board()
    b.stub.code("GpmSampleGet", abi.NO_PERMISSION)
    b.until(lambda: bool(b.gpus) and b.inventory["gpus"][0]["support"].get("sm_active_ratio") == "permission")
    asked = b.stub.made("GpmSampleGet")
    b.tick(5)
    assert b.stub.made("GpmSampleGet") == asked


@pytest.mark.parametrize(
    ("links", "up", "fabric", "expected"),
    [(18, 17, 3, (17, 1)), (18, 0, 3, (0, 18)), (12, 12, 0, (12, 0)), (4, 0, 0, (0, None)), (0, 0, 0, (None, None))],
)
def test_links_that_should_be_up(
    board: Callable[..., Board], links: int, up: int, fabric: int, expected: tuple[int | None, int | None]
) -> None:
    b = board()
    b.stub.links(0, links, up)
    b.stub.answer("DeviceGetGpuFabricInfoV", fabric, kind=3)
    b.until(lambda: bool(b.gpus))
    b.tick(2)
    row = b.gpus["gpu0"]
    assert (row.get("nvlink_active_count"), row.get("nvlink_inactive_count")) == expected


def test_events_are_told_with_the_gpu_they_belong_to(board: Callable[..., Board]) -> None:
    b = board(2, events=True)
    b.until(lambda: len(b.gpus) == 2)
    b.stub.event(79, gpu=1)
    b.stub.event(0, gpu=0, kind=0x200)
    b.until(lambda: len(b.events) == 2)
    assert [(e["code"], e["gpu"], e["pci"]) for e in b.events] == [
        ("xid:79", "gpu1", "0000:19:00.0"),
        ("gpu_ecc_storm", "gpu0", "0000:18:00.0"),
    ]


def test_slower_tiers_are_asked_as_seldom_as_they_should_and_repeat_in_between(board: Callable[..., Board]) -> None:
    b = board(spans=Spans((200 * MS, 3600 * 1000 * MS, 3600 * 1000 * MS)))
    b.until(lambda: bool(b.gpus))
    b.tick(20)
    assert b.stub.made("DeviceGetMemoryInfo_v2") == 1
    assert b.stub.made("DeviceGetClockInfo") >= 20
    assert b.gpus["gpu0"]["fb_total_bytes"] == 81559 * MIB


def test_a_gpu_that_takes_long_to_answer_is_asked_half_as_often(board: Callable[..., Board]) -> None:
    b = board(spans=Spans((1000 * MS, 3600 * 1000 * MS, 3600 * 1000 * MS)))
    b.until(lambda: bool(b.gpus) and "power_w" in b.gpus["gpu0"])
    b.stub.latency_us("DeviceGetCurrentClocksEventReasons", 110_000)
    before = b.stub.made("DeviceGetTemperatureV")
    b.tick(6)
    assert b.stub.made("DeviceGetTemperatureV") - before == 3


def test_sixty_four_gpus_fit(board: Callable[..., Board]) -> None:
    b = board(64)
    b.until(lambda: len(b.gpus) == 64 and "power_w" in b.gpus["gpu63"])
    b.stub.code("DeviceGetClockInfo", HANG, gpu=63)
    b.until(lambda: b.frame is not None and b.frame.hung == 1 << 63)
    b.stub.code("DeviceGetClockInfo", 0, gpu=63)


def test_a_library_that_is_not_there_has_a_reason() -> None:
    with pytest.raises(LibraryError, match=r"libnothing\.so") as caught:
        Library("libnothing.so")
    assert caught.value.reason == "no_library"
