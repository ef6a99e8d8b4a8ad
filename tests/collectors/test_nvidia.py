"""Pure parts: structures and numbers against nvidia-ml-py, decoding, messages, the merge of Xids; the source with a child of its own."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.accelerators import BY_DCGM, GPU, NAMES, SIGNALS, packed
from collectors.base import Sample
from collectors.crew import Crew
from collectors.nvidia import abi, decode, wire
from collectors.nvidia.fields import FAST, MEDIUM, READINGS, SLOW, Batch, fields_of
from collectors.nvidia.library import Library
from collectors.nvidia.parent import BACKOFF_MAX_S, Keeper
from collectors.nvidia.sampler import tiers_of
from collectors.nvidia.source import NvmlSource
from collectors.simulated.families import GPU as SIMULATED
from collectors.sources.logfile import LogfileSource
from collectors.sources.nvidia import NvidiaSource
from collectors.sources.ppu import PpuSource
from collectors.xids import XidBoard
from tests.collectors.kit import Bench, bench, devices, values
from tests.collectors.nvml_stub import COMPILER, HANG, Stub, built
from tests.collectors.waiting import until
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.records import LogEvent

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler: the stand-in for the driver library cannot be built"
)


# --- the catalogue --------------------------------------------------------------------------------------------------------------


def test_the_catalogue_begins_with_the_columns_of_the_simulator() -> None:
    assert [(m.name, m.unit, m.kind) for m in SIMULATED.metrics] == [
        (m.name, m.unit, m.kind) for m in GPU.metrics[: len(SIMULATED.metrics)]
    ]
    assert len(set(NAMES)) == len(NAMES)
    assert len(BY_DCGM) == sum(bool(signal.dcgm) for signal in SIGNALS), "a DCGM name stands for one column"
    row = struct.unpack(f"<{len(NAMES)}f", packed({"power_w": 7.0}))
    assert row[NAMES.index("power_w")] == 7.0
    assert sum(math.isnan(value) for value in row) == len(NAMES) - 1


def test_every_column_of_a_reading_exists_and_belongs_to_one_tier() -> None:
    assert {reading.column for reading in READINGS} <= set(NAMES)
    tiers = tiers_of(NAMES)
    told = {NAMES[column] for column in tiers[FAST] + tiers[MEDIUM] + tiers[SLOW]}
    assert len(tiers[FAST] + tiers[MEDIUM] + tiers[SLOW]) == len(told)
    assert set(NAMES) - told == {"xid_last", "xid_count"}, "which are no reading, and never too old"


# --- numbers and structures ---------------------------------------------------------------------------------------------------------


FIELD_NAMES = {
    "FI_ECC_SBE_VOL": "ECC_SBE_VOL_TOTAL", "FI_ECC_DBE_AGG": "ECC_DBE_AGG_TOTAL",
    "FI_NVLINK_CRC_FLIT": "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "FI_NVLINK_RECOVERY": "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "FI_POLICY_POWER": "PERF_POLICY_POWER", "FI_POLICY_THERMAL": "PERF_POLICY_THERMAL", "FI_MEMORY_TEMP": "MEMORY_TEMP",
    "FI_ENERGY": "TOTAL_ENERGY_CONSUMPTION", "FI_PCIE_REPLAY": "PCIE_REPLAY_COUNTER",
    "FI_NVLINK_DATA_TX": "NVLINK_THROUGHPUT_DATA_TX", "FI_NVLINK_DATA_RX": "NVLINK_THROUGHPUT_DATA_RX",
    "FI_REMAPPED_COR": "REMAPPED_COR", "FI_REMAPPED_FAILURE": "REMAPPED_FAILURE", "FI_NVLINK_DL_CRC": "NVLINK_ERROR_DL_CRC",
    "FI_PCIE_FATAL": "PCIE_COUNT_FATAL_ERROR", "FI_POWER_AVERAGE": "POWER_AVERAGE", "FI_POWER_INSTANT": "POWER_INSTANT",
    "FI_POWER_LIMIT": "POWER_CURRENT_LIMIT", "FI_TLIMIT_SHUTDOWN": "TEMPERATURE_SHUTDOWN_TLIMIT",
    "FI_TLIMIT_SLOWDOWN": "TEMPERATURE_SLOWDOWN_TLIMIT", "FI_PCIE_TX": "PCIE_COUNT_TX_BYTES",
    "FI_NVLINK_RCV_BYTES": "NVLINK_COUNT_RCV_BYTES", "FI_NVLINK_RECOVERY_EVENTS": "NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    "FI_RECOVERY_ACTION": "GET_GPU_RECOVERY_ACTION", "FI_REASON_SW_THERMAL": "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "FI_REASON_HW_POWER_BRAKE": "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}  # fmt: skip
STRUCTURES = {
    "FIELD_VALUE": "c_nvmlFieldValue_t", "MEMORY_V2": "c_nvmlMemory_v2_t", "PCI_INFO": "nvmlPciInfo_t",
    "FABRIC_V2": "c_nvmlGpuFabricInfo_v2_t", "FABRIC_V3": "c_nvmlGpuFabricInfo_v3_t", "SRAM_V1": "c_nvmlEccSramErrorStatus_v1_t",
    "EVENT_DATA": "c_nvmlEventData_t", "GPM_METRIC": "c_nvmlGpmMetric_t", "PROCESS_V2": "c_nvmlProcessInfo_v2_t",
}  # fmt: skip


def test_numbers_and_structures_are_those_of_nvidia_ml_py() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: nothing to compare with")
    for name, constant in FIELD_NAMES.items():
        assert getattr(abi, name) == getattr(nvml, f"NVML_FI_DEV_{constant}"), name
    for name, structure in STRUCTURES.items():
        assert getattr(abi, name).size == ctypes.sizeof(getattr(nvml, structure)), name
    assert abi.versioned(abi.MEMORY_V2, 2) == nvml.nvmlMemory_v2
    assert abi.versioned(abi.FABRIC_V3, 3) == nvml.nvmlGpuFabricInfo_v3
    assert abi.versioned(abi.SRAM_V1, 1) == nvml.nvmlEccSramErrorStatus_v1
    assert abi.versioned(abi.TEMPERATURE_V1, 1) == nvml.nvmlTemperature_v1
    assert abi.versioned(abi.MARGIN_V1, 1) == nvml.nvmlMarginTemperature_v1
    assert abi.FIELD_VALUE.size * len(fields_of(MEDIUM)) < 4096


@given(st.integers(0, 12), st.integers(0, 2**64 - 1))
def test_any_field_is_a_finite_number_or_nothing(kind: int, raw: int) -> None:
    value = decode.field_value(kind, raw)
    assert value is None or (math.isfinite(value) and abs(value) < 2**63)


@given(st.binary(max_size=400))
def test_any_bytes_of_fields_are_taken_in(data: bytes) -> None:
    assert len(decode.field_results(data)) == len(data) // abi.FIELD_VALUE.size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00", "0000:3b:00.0"),
        ("3B:00.0", "0000:3b:00.0"),
        ("", ""),
        ("no:such:one", ""),
    ],
)
def test_pci_addresses_have_one_spelling(text: str, address: str) -> None:
    assert decode.pci_address(text) == address


def test_a_counter_that_fell_has_no_rate() -> None:
    counters = decode.Counters()
    rates = [
        counters.per_second(1, value, now_ns)
        for value, now_ns in ((10, 0), (30, 10**9), (5, 2 * 10**9), (6, 3 * 10**9), (7, 3 * 10**9))
    ]
    assert [rate for rate in rates if not math.isnan(rate)] == [20, 1]


# --- messages ---------------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_messages_of_any_bytes_are_taken_or_refused_by_name(data: bytes) -> None:
    for read in (lambda: wire.frame_of(data, 8, 4), lambda: wire.facts_of(data)):
        try:
            read()
        except wire.WireError as error:
            told = str(error)
        else:
            told = "expected"
        assert "expected" in told or "no JSON" in told


def test_a_frame_comes_back_as_it_was() -> None:
    frame = wire.Frame(wire.RUNNING, 3, 2, 1, 12345, wire.hung_mask([False, True]), 77, 5, b"x" * 20)
    assert wire.frame_of(frame.pack(), 8, 4) == frame
    assert wire.shift_of(wire.shift(-5)) == -5
    assert wire.shift_of(b"S") == 0


def board_with_gpu(tmp_path: Path, vendor: str = "0x10de", kind: str = "0x030200") -> Bench:
    b = bench(tmp_path)
    for name, content in (("vendor", vendor), ("class", kind)):
        b.write(f"/sys/bus/pci/devices/0000:18:00.0/{name}", content + "\n")
    return b


def test_a_node_without_gpus_starts_nothing_and_says_nothing(tmp_path: Path) -> None:
    b = board_with_gpu(tmp_path, vendor="0x8086", kind="0x020000")
    b.write("/sys/bus/pci/devices/0000:19:00.0/vendor", "0x10de\n")
    b.write("/sys/bus/pci/devices/0000:19:00.0/class", "0x068000\n")  # an NVSwitch is no GPU
    source = b.build(NvidiaSource)
    assert isinstance(source, NvmlSource)
    assert source.sample(0) == Sample()
    assert source.child_pid() == 0


class Played:
    """A keeper that plays messages."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.silent, self.restarts, self.pid = False, 0, 0
        self.shifts: list[int] = []

    def poll(self) -> list[bytes]:
        said, self.said = self.said, []
        return said

    def remember(self, names: dict[str, str]) -> None:
        del names

    def shift(self, by_ns: int) -> None:
        self.shifts.append(by_ns)

    def close(self) -> None: ...


def played(tmp_path: Path) -> tuple[Bench, NvidiaSource, Played]:
    b = board_with_gpu(tmp_path)
    source = b.build(NvidiaSource)
    assert isinstance(source, NvidiaSource)
    keeper = Played()
    source._keeper = keeper  # type: ignore[assignment]
    return b, source, keeper


def told(at_ns: int, status: int = wire.RUNNING, hung: int = 0, **row: float) -> bytes:
    return wire.Frame(status, 1, 1, 0, at_ns, hung, 0, 0, packed(row)).pack()


def an_inventory(generation: int = 1) -> bytes:
    gpu = {
        "name": "gpu0",
        "uuid": "GPU-0",
        "pci": "0000:18:00.0",
        "support": {"memory_temp_c": "not_supported"},
        "events": True,
    }
    return wire.inventory(generation, {"driver": "590", "gpus": [gpu], "parts": [], "names": {"GPU-0": "gpu0"}})


def test_rows_are_told_until_they_are_too_old(tmp_path: Path) -> None:
    b, source, keeper = played(tmp_path)
    assert [gap.reason for gap in source.sample(0).gaps] == ["starting"]
    keeper.said = [an_inventory(), told(b.clock.monotonic_ns(), power_w=500.0, xid_last=0.0)]
    sample = b.second(source)
    assert values(source, sample, "gpu", "gpu0") == {"power_w": 500, "xid_last": 0}
    assert source.support() == {"gpu0": {"memory_temp_c": "not_supported"}}
    assert devices(b.second(source), "gpu") == ("gpu0",)
    assert [gap.reason for gap in b.second(source, 3.0).gaps] == ["stale"]
    keeper.said = [told(b.clock.monotonic_ns(), hung=1)]
    assert [gap.reason for gap in b.second(source).gaps] == ["hung:gpu0"]
    keeper.said = [told(b.clock.monotonic_ns(), status=wire.NO_DRIVER)]
    assert [gap.reason for gap in b.second(source).gaps] == ["no_driver"]
    keeper.silent = True
    assert [gap.reason for gap in b.second(source).gaps] == ["helper_silent"]


@pytest.mark.parametrize(
    ("status", "code", "after_s"),
    [(wire.HUNG, "gpu_driver_hung", 0), (wire.NO_DRIVER, "gpu_unreadable", 60), (wire.STARTING, "", 0)],
)
def test_gpus_that_cannot_be_read_are_told_once(tmp_path: Path, status: int, code: str, after_s: int) -> None:
    b, source, keeper = played(tmp_path)
    for second in range(100):
        keeper.said = [told(b.clock.monotonic_ns(), status=status)]
        b.second(source)
        assert len(b.outlet.logs) == (1 if code and second >= after_s else 0)
    assert b.outlet.codes == ([code] if code else [])


def test_messages_that_are_none_of_ours_cost_nothing_but_themselves(tmp_path: Path) -> None:
    b, source, keeper = played(tmp_path)
    frame = told(b.clock.monotonic_ns(), power_w=500.0)
    keeper.said = [b"?", b"I{", b'I{"gpus":[{}]}', b"E[]", b"E{}", b"R", an_inventory(), frame[:-4], frame]
    assert values(source, b.second(source), "gpu", "gpu0")["power_w"] == 500


def test_frames_that_come_late_in_the_second_are_asked_for_earlier(tmp_path: Path) -> None:
    b, source, keeper = played(tmp_path)
    source.sample(0)
    b.clock.advance_ns(20 * NS_PER_S)
    keeper.said = [an_inventory(), told(b.clock.monotonic_ns() - 700_000_000)]
    source.sample(0)
    assert keeper.shifts == [500_000_000]


def test_what_happens_to_a_gpu_becomes_an_event(tmp_path: Path) -> None:
    b, source, keeper = played(tmp_path)
    keeper.said = [
        an_inventory(),
        wire.event({"code": "gpu_lost", "gpu": "gpu0", "uuid": "GPU-0", "pci": "0000:18:00.0"}),
    ]
    b.second(source)
    ((event, urgent),) = b.outlet.logs
    assert (event.code, event.severity, urgent, event.attributes["pci"]) == (
        "gpu_lost",
        "critical",
        True,
        "0000:18:00.0",
    )
    assert "fell off the bus" in event.line


# --- Xids -------------------------------------------------------------------------------------------------------------------------


def xid(number: int) -> LogEvent:
    return LogEvent(source="nvidia", code=f"xid:{number}")


def test_an_xid_of_two_sources_is_one_event_in_either_order() -> None:
    board = XidBoard()
    assert board.by_kernel("a", "xid:79", 0)
    board.by_library("a", xid(79), 2 * NS_PER_S)
    assert board.due(10 * NS_PER_S) == []
    board.by_library("b", xid(79), 0)
    assert board.by_kernel("b", "xid:79", NS_PER_S // 2), "the kernel's line is the better one"
    assert board.due(10 * NS_PER_S) == []
    assert board.merged == 2


def test_an_xid_that_only_the_library_saw_is_told_after_a_moment_and_once() -> None:
    board = XidBoard()
    board.by_library("a", xid(62), 0)
    board.by_library("a", xid(62), NS_PER_S // 10)
    assert board.due(NS_PER_S // 2) == []
    assert [event.code for event in board.due(2 * NS_PER_S)] == ["xid:62"]
    assert not board.by_kernel("a", "xid:62", 3 * NS_PER_S), "a line that comes late"
    assert board.by_kernel("a", "xid:62", 30 * NS_PER_S), "another event"
    assert (board.last("a"), board.count("a"), board.last("b"), board.count("b")) == (62, 2, 0, 0)


def test_the_last_xid_and_their_number_are_told_apart() -> None:
    """A gauge that keeps the last code for ever hides repeats: the number goes on."""
    board = XidBoard()
    for second in (0, 10, 20):
        board.by_kernel("a", "xid:94", second * NS_PER_S)
    assert (board.last("a"), board.count("a")) == (94, 3)


def test_the_library_and_the_kernel_log_are_merged_through_the_sources(tmp_path: Path) -> None:
    b, source, keeper = played(tmp_path)
    log = b.root / "kern.log"
    log.write_text("")
    logs = b.build(LogfileSource, files={"kern": str(log)}, from_start=True)
    assert isinstance(logs, LogfileSource)
    report = {"code": "xid:79", "xid": "79", "gpu": "gpu0", "uuid": "GPU-0", "pci": "00000000:18:00.0"}
    keeper.said = [an_inventory(), told(b.clock.monotonic_ns()), wire.event(report)]
    b.second(source)
    with log.open("a", encoding="utf-8") as file:
        file.write("NVRM: Xid (PCI:0000:18:00): 79, pid=1, name=python, GPU has fallen off the bus.\n")
    logs.poll()
    b.second(source, 2.0)
    assert [(event.source, event.code) for event, _ in b.outlet.logs] == [("kern", "xid:79")]
    keeper.said = [told(b.clock.monotonic_ns()), wire.event({**report, "code": "xid:62", "xid": "62"})]
    row = values(source, b.second(source), "gpu", "gpu0")
    assert (row["xid_last"], row["xid_count"]) == (79, 1)
    b.second(source, 2.0)
    assert [(e.source, e.code, e.severity, urgent) for e, urgent in b.outlet.logs[1:]] == [
        ("nvidia", "xid:62", "critical", True)
    ]
    logs.close()


class Waits:
    """A job that hangs until another one was done."""

    def __init__(self, before: threading.Event | None, after: threading.Event) -> None:
        self.busy_since_ns = 0
        self._before, self._after = before, after
        self.runs = 0

    def run(self) -> None:
        if self._before is not None:
            self._before.wait(600)
        self.runs += 1
        self._after.set()


def test_jobs_behind_one_that_hangs_are_done_in_the_same_turn() -> None:
    second_done, first_done = threading.Event(), threading.Event()
    first, second = Waits(second_done, first_done), Waits(None, second_done)
    Crew().turn([first, second], timeout_s=30)
    assert (first.runs, second.runs) == (1, 1), "the second waited for the first, which waited for it"


# --- the child ----------------------------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "prefix", "vendor"), [(NvidiaSource, "nvml", "0x10de"), (PpuSource, "hgml", "0x1ded")]
)
def test_a_child_reads_gpus_and_ends_with_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[NvmlSource], prefix: str, vendor: str
) -> None:
    stub = Stub(tmp_path / "stub", 2, built(prefix))
    monkeypatch.setenv("NVML_STUB_STATE", str(stub.path))
    b = board_with_gpu(tmp_path, vendor)
    source = b.build(kind, library=str(built(prefix)), every_s=0.1, medium_s=0.1, slow_s=0.1)
    assert isinstance(source, kind)

    def row() -> dict[str, float]:
        sample = source.sample(0)
        return values(source, sample, "gpu", "gpu1") if "gpu1" in devices(sample, "gpu") else {}

    until(lambda: row().get("power_w") == pytest.approx(625.68))
    pid = source.child_pid()
    threads = len(os.listdir(f"/proc/{pid}/task"))
    stub.code("DeviceGetClockInfo", HANG, gpu=0)
    until(lambda: row() and "gpu_hung" in b.outlet.codes)
    stub.answer("DeviceGetTemperatureV", 44, gpu=1)
    until(lambda: row().get("temp_c") == 44)
    assert len(os.listdir(f"/proc/{pid}/task")) <= threads + 2, "one thread hangs, another took over"
    os.kill(pid, 15)  # it ends in order only
    stub.code("DeviceGetClockInfo", 0, gpu=0)
    until(lambda: row() and "gpu_answers" in b.outlet.codes)
    assert source.child_pid() == pid
    source.close()
    until(lambda: not alive(pid))


@needs_compiler
def test_a_child_that_died_is_started_again_after_a_while(tmp_path: Path) -> None:
    b = board_with_gpu(tmp_path)
    source = b.build(NvidiaSource, library=str(tmp_path / "libnone.so"))
    assert isinstance(source, NvidiaSource)
    until(lambda: [gap.reason for gap in source.sample(0).gaps] == ["no_library"])
    until(lambda: not source.sample(0).blocks and source.child_pid() == 0)
    assert [gap.reason for gap in source.sample(0).gaps] == ["no_library"], (
        "the reason stays until the next one tells another"
    )
    b.clock.advance_ns(1 * NS_PER_S)
    until(lambda: source.sample(0) and source.child_pid())
    source.close()


def test_a_keeper_waits_longer_each_time_and_starts_no_second_child(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    started: list[int] = []

    class Fake:
        pid, ended, gone = 1, False, False

        def __init__(self, options: Any, child: Path) -> None:
            started.append(clock.monotonic_ns() // NS_PER_S)
            self.ended = self.gone = len(started) < 9

        def messages(self) -> list[bytes]:
            return []

        def reaped(self) -> bool:
            return self.gone

        def close(self) -> None: ...

    monkeypatch.setattr("collectors.nvidia.parent.Process", Fake)
    keeper = Keeper(clock, {}, silent_s=5)
    for _ in range(400):
        keeper.poll()
        clock.advance_ns(NS_PER_S)
    waits = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert waits == sorted(waits)
    assert waits[-1] >= BACKOFF_MAX_S
    assert len(started) == 9
    assert keeper.silent, "the ninth says nothing"
    process = keeper._process
    assert process is not None
    process.ended = True  # its end of the socket is closed, but it hangs in the driver
    for _ in range(200):
        keeper.poll()
        clock.advance_ns(NS_PER_S)
    assert len(started) == 9


@needs_compiler
def test_a_batch_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(tmp_path / "stub", 1)
    monkeypatch.setenv("NVML_STUB_STATE", str(stub.path))
    own = tmp_path / "libone.so"
    own.write_bytes(built().read_bytes())
    library = Library(str(own))
    assert library.init() == abi.SUCCESS
    batch = Batch(library, fields_of(MEDIUM))
    code, found = batch.read(ctypes.c_void_p(1))
    assert (code, stub.made("DeviceGetFieldValues")) == (abi.SUCCESS, 1)
    assert len(found) > 25
    assert batch.took_us == 20 * sum(field in found for field in fields_of(MEDIUM) if field not in (193, 194))
