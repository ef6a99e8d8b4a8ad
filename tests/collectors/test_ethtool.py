"""The ethtool source on recorded answers: names of every driver, pauses, error correction, optics, drivers that refuse or hang."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from collectors.base import Sample
from collectors.network import ethtool, modules, optics
from collectors.network.counters import Deltas
from collectors.network.statistics import plan, row_of
from collectors.sources.ethtool import EthtoolSource
from tests.collectors.kit import FIXTURES, Bench, bench, values
from tests.collectors.waiting import until
from trainwarden.clock import NS_PER_S


class Recorded:
    """A driver that answers as recorded; what it was not given it does not support."""

    def __init__(
        self, name: str, statistics: Sequence[tuple[str, int]], module: bytes = b"", speed_mbps: int = 400_000
    ) -> None:
        self.name = name
        self.statistics = list(statistics)
        self.module = module
        self.speed_mbps = speed_mbps
        self.asked: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def __call__(self, interface: str, request: bytearray) -> None:
        (command,) = struct.unpack_from("=I", request)
        self.asked.append(command)
        assert self.hold.wait(60)
        answers = {
            ethtool.GDRVINFO: self._driver, ethtool.GSTRINGS: self._names, ethtool.GSTATS: self._values,
            ethtool.GLINKSETTINGS: self._link, ethtool.GMODULEINFO: self._module_info, ethtool.GMODULEEEPROM: self._module,
        }  # fmt: skip
        if command not in answers:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        answers[command](request)

    def _driver(self, request: bytearray) -> None:
        struct.pack_into("=32s32s32s32s", request, 4, self.name.encode(), b"5.0", b"28.39.1002", b"0000:18:00.0")
        struct.pack_into("=I", request, 180, len(self.statistics))

    def _names(self, request: bytearray) -> None:
        struct.pack_into("=I", request, 8, len(self.statistics))
        for i, (name, _) in enumerate(self.statistics):
            struct.pack_into("=32s", request, 12 + 32 * i, name.encode())

    def _values(self, request: bytearray) -> None:
        struct.pack_into("=I", request, 4, len(self.statistics))
        struct.pack_into(f"={len(self.statistics)}Q", request, 8, *(value for _, value in self.statistics))

    def _link(self, request: bytearray) -> None:
        if request[15] == 0:
            struct.pack_into("=b", request, 15, -4)  # "the masks have four words: ask again"
            return
        struct.pack_into("=IB", request, 4, self.speed_mbps, 1)

    def _module_info(self, request: bytearray) -> None:
        if not self.module:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        struct.pack_into("=II", request, 4, 3, len(self.module))

    def _module(self, request: bytearray) -> None:
        request[16:] = self.module[: len(request) - 16]


def mlx5(seconds: int) -> list[tuple[str, int]]:
    """Statistics of a made-up mlx5 port after so many seconds of steady trouble."""
    per_second = {
        "rx_packets": 9, "rx_bits_phy": 200_000_000_000, "rx_corrected_bits_phy": 20_000, "rx_pcs_symbol_err_phy": 2,
        "rx_symbol_err_phy": 1, "rx_discards_phy": 5, "rx_prio0_pause": 1, "rx_prio3_pause": 700, "tx_prio3_pause": 40,
        "rx_prio3_pause_duration": 250_000, "rx_prio3_marked": 11, "rx_prio4_marked": 4, "rx_err_lane_0_phy": 3,
        "rx_err_lane_1_phy": 90, "link_down_events_phy": 0, "rx_out_of_buffer": 6, "rx_pause_ctrl_phy": 0, "tx_pause_ctrl_phy": 0,
    }  # fmt: skip
    return [*((name, value * seconds) for name, value in per_second.items()), ("outbound_pci_stalled_rd", 12)]


def qsfp(rx_tenths_uw: Sequence[int], temperature_c: float = 47.0) -> bytes:
    memory = bytearray(256)
    memory[0] = 0x11
    struct.pack_into(">h2xH", memory, 22, int(temperature_c * 256), 33_000)
    struct.pack_into(">4H", memory, 34, *rx_tenths_uw)
    struct.pack_into(">4H", memory, 42, *[3300] * 4)
    struct.pack_into(">4H", memory, 50, *[9077] * 4)
    return bytes(memory)


def built(
    tmp_path: Path, driver: Recorded, ports: Sequence[str] = ("ens1",), **settings: object
) -> tuple[Bench, EthtoolSource]:
    board = bench(tmp_path)
    for port in ports:
        board.write(f"/sys/class/net/{port}/device/vendor", "0x15b3\n")
    board.write("/sys/class/net/docker0/mtu", "1500\n")
    source = board.build(EthtoolSource, **{"every_s": 1.0, "optics_every_s": 1.0, **settings})
    assert isinstance(source, EthtoolSource)
    source.ask = driver
    source.sample(0)
    assert source.settle(60)
    return board, source


def later(board: Bench, source: EthtoolSource, seconds: float) -> Sample:
    board.second(source, seconds)
    assert source.settle(60)
    return source.sample(0)


def test_a_row_of_an_mlx5_port(tmp_path: Path) -> None:
    driver = Recorded("mlx5_core", mlx5(0), qsfp([9077, 9077, 4000, 9077]))
    board, source = built(tmp_path, driver)
    driver.statistics = mlx5(2)
    sample = later(board, source, 2.0)
    row = values(source, sample, "port", "ens1")
    assert sample.blocks[0].devices == ("ens1",)  # docker0 has no device behind it
    expected = {
        "fec_corrected_per_s": 20_000, "bit_error_ratio": 1e-7, "symbol_errors_per_s": 1, "pcs_symbol_errors_per_s": 2,
        "rx_discards_per_s": 5, "pause_rx_per_s": 700, "pause_tx_per_s": 40, "pause_rx_all_per_s": 701, "pause_rx_prio0_per_s": 1,
        "pause_rx_time_ratio": 0.25, "ecn_marked_per_s": 15, "lane_errors_max_per_s": 90, "rx_out_of_buffer_per_s": 6,
        "pcie_stalled_read_ratio": 0.12, "link_speed_mbps": 400_000, "full_duplex": 1, "module_temp_c": 47.0,
        "module_voltage_v": 3.3, "rx_power_dbm": -3.98, "tx_power_dbm": -0.42, "bias_ma": 6.6, "rx_power_spread_db": 3.56,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-2)
    assert "allowance_exceeded_per_s" not in row


def test_names_are_asked_once_and_what_is_not_supported_not_again(tmp_path: Path) -> None:
    driver = Recorded("mlx5_core", mlx5(0))
    board, source = built(tmp_path, driver)
    for _ in range(3):
        later(board, source, 1.0)
    assert driver.asked.count(ethtool.GSTRINGS) == 1
    assert driver.asked.count(ethtool.GFECPARAM) == 1
    assert driver.asked.count(ethtool.GSTATS) == 4
    driver.statistics = [*mlx5(9), ("rx9_packets", 1)]
    later(board, source, 1.0)  # a channel more: another table
    assert driver.asked.count(ethtool.GSTRINGS) == 2


def test_the_priority_can_be_set() -> None:
    names, values = ["rx_prio3_pause", "rx_prio5_pause"], [[0, 0], [10, 100]]
    deltas = Deltas()
    row_of("e", plan(names), values[0], 0, deltas, 3)
    assert row_of("e", plan(names), values[1], NS_PER_S, deltas, 3)["pause_rx_per_s"] == 10


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["rx_pfc_ena_frames_pri3", "rx_corrected_bits", "rx_fec_uncorrectable_blocks", "rx_fcs_err_frames", "rx_pcs_symbol_err"],
         {"pause_rx_prio3_per_s", "fec_corrected_per_s", "fec_uncorrectable_per_s", "rx_crc_errors_per_s", "pcs_symbol_errors_per_s"}),
        (["priority_3_xoff_rx.nic", "rx_crc_errors.nic", "rx_dropped.nic", "link_xoff_tx.nic"],
         {"pause_rx_prio3_per_s", "rx_crc_errors_per_s", "rx_discards_per_s", "pause_tx_all_per_s"}),
        (["port.rx_dropped", "port.tx_priority_2_xoff"], {"rx_discards_per_s", "pause_tx_prio2_per_s"}),
        (["bw_in_allowance_exceeded", "pps_allowance_exceeded", "rx_drops"], {"allowance_exceeded_per_s", "rx_discards_per_s"}),
    ],
    ids=["bnxt_en", "ice", "i40e", "ena"],
)  # fmt: skip
def test_names_of_other_drivers(names: list[str], columns: set[str]) -> None:
    deltas = Deltas()
    row_of("e", plan(names), [0] * len(names), 0, deltas, -1)
    row = row_of("e", plan(names), [10] * len(names), NS_PER_S, deltas, -1)
    assert all(row[column] >= 10 for column in columns)


def test_the_recorded_statistics_of_an_ionic_adapter() -> None:
    text = (FIXTURES / "rocm-nic/ethtool_S_enp68s0.txt").read_text()
    pairs = [line.split(":") for line in text.splitlines()[1:] if ":" in line]
    places = plan([name for name, _ in pairs])
    assert {p.rule.column for p in places} >= {
        "rx_crc_errors_per_s",
        "pause_rx_us",
        "pause_tx_us",
        "rx_discards_per_s",
        "pause_rx_plain",
    }
    assert len(places) < 40  # of 600


def test_names_that_are_padded_or_repeat() -> None:
    assert [place.position for place in plan(["  rx_discards_phy  ", "rx_discards_phy", "no such thing", ""])] == [0]


def test_fewer_values_than_names_are_no_error() -> None:
    assert "rx_discards_per_s" not in row_of("e", plan(["a", "rx_discards_phy"]), [1], 0, Deltas(), -1)


def test_a_driver_that_hangs_is_a_gap_and_its_numbers_go(tmp_path: Path) -> None:
    driver = Recorded("mlx5_core", mlx5(0))
    board, source = built(tmp_path, driver)
    driver.hold.clear()
    sample = later(board, source, 1.0)
    assert {gap.reason.replace("late:", "hung:") for gap in sample.gaps} == {"statistics_hung:ens1", "optics_hung:ens1"}
    assert sample.blocks == ()
    driver.hold.set()
    assert until(lambda: later(board, source, 1.0).gaps == ())


def test_a_sick_port_keeps_its_thread_and_the_others_are_read(tmp_path: Path) -> None:
    """A call to one of three drivers never comes back, in turn after turn: one thread for each kind of question, and one row less."""
    driver = Recorded("mlx5_core", mlx5(0), qsfp([9077] * 4))
    held = threading.Event()

    def ask(interface: str, request: bytearray) -> None:
        if interface == "ens2":
            assert held.wait(60)
        driver(interface, request)

    board, source = built(tmp_path, driver, ports=("ens1", "ens2", "ens3"))
    threads = threading.active_count()
    source.ask = ask
    later(board, source, 1.0)
    source._ports._wait_s = source._modules._wait_s = 60.0  # from now on nobody waits for the one that hangs
    later(board, source, 1.0)
    for second in range(1, 4):
        driver.statistics = mlx5(second)
        sample = later(board, source, 1.0)
        assert sample.blocks[0].devices == ("ens1", "ens3")
        row = values(source, sample, "port", "ens3")
        assert row["rx_discards_per_s"] == pytest.approx(5)
        assert row["module_temp_c"] == pytest.approx(47)
        assert {gap.reason.rpartition(":")[2] for gap in sample.gaps} == {"ens2"}
    assert until(lambda: threading.active_count() <= threads + 2)  # the two that hang, of either kind of question
    held.set()
    assert until(lambda: later(board, source, 1.0).gaps == ())
    assert later(board, source, 1.0).blocks[0].devices == ("ens1", "ens2", "ens3")


def test_a_tree_that_is_not_this_machine_is_quiet(tmp_path: Path) -> None:
    assert bench(tmp_path, "node").build(EthtoolSource).sample(0) == Sample()


def test_an_interface_of_this_machine_answers() -> None:
    ask = ethtool.Kernel()
    found = {}
    for name in sorted(os.listdir("/sys/class/net")):
        try:
            found[name] = ethtool.driver(ask, name)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENODEV):
                raise
    if not found:
        pytest.skip("no interface of this machine has a driver that answers to ethtool")
    for name, driver in found.items():
        assert driver.name
        names = ethtool.names(ask, name, driver.statistics) if driver.statistics else []
        assert len(names) == driver.statistics
        assert not names or len(ethtool.statistics(ask, name, driver.statistics)) == len(names)
    ask.close()


def cmis_lower(temperature_c: int) -> bytearray:
    lower = bytearray(128)
    lower[0] = 0x19
    struct.pack_into(">hH", lower, 14, temperature_c * 256, 33_000)
    return lower


def test_a_module_that_the_ioctl_does_not_know_is_read_page_by_page(tmp_path: Path) -> None:
    board, source = built(tmp_path, Recorded("mlx5_core", mlx5(0)))
    asked: list[tuple[int, int]] = []

    def read(interface: str, page: int, offset: int) -> bytes:
        asked.append((page, offset))
        lanes = bytearray(128)
        for at in (154, 170, 186):
            struct.pack_into(">8H", lanes, at - 128, *[10_000] * 8)
        return bytes(lanes if page == 0x11 else cmis_lower(58))

    source.read_page = read
    row = values(source, later(board, source, 1.0), "port", "ens1")
    assert asked == [(0, 0), (0x11, 128)]
    assert (row["module_temp_c"], row["rx_power_dbm"]) == (58, 0)


def test_without_a_readable_module_its_temperature_comes_from_the_monitor(tmp_path: Path) -> None:
    board, source = built(tmp_path, Recorded("mlx5_core", mlx5(0)))
    board.write("/sys/class/net/ens1/device/hwmon/hwmon4/temp1_label", "asic\n")
    board.write("/sys/class/net/ens1/device/hwmon/hwmon4/temp1_input", "71000\n")
    board.write("/sys/class/net/ens1/device/hwmon/hwmon4/temp2_label", "Module0\n")
    board.write("/sys/class/net/ens1/device/hwmon/hwmon4/temp2_input", "49000\n")
    assert values(source, later(board, source, 1.0), "port", "ens1")["module_temp_c"] == 49


def test_the_kernel_understands_the_netlink_request() -> None:
    read = modules.Netlink()
    name = next((name for name in sorted(os.listdir("/sys/class/net")) if name != "lo"), "")
    if not name:
        pytest.skip("this machine has no interface but the loopback")
    # no module behind a virtual interface; a malformed request would be EINVAL
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        read(name, 0, 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
        read("nosuch0", 0, 0)
    read.close()


def test_netlink_answers_of_odd_shapes() -> None:
    assert list(modules.attributes(b"\x03\0\x01\0")) == []
    assert list(modules.attributes(b"\xff\0\x01\0abc")) == []
    assert list(modules.attributes(modules.attribute(7, b"abcde") + modules.attribute(1, b""))) == [
        (7, b"abcde"),
        (1, b""),
    ]
    with pytest.raises(OSError, match="too short"):
        modules.answer(b"x")
    assert modules.memory_by_pages(lambda *_: b"", "e") == b""


# --- optics ------------------------------------------------------------------------------------------------------------------------


def test_a_dark_lane_is_minus_forty_and_copper_has_no_light() -> None:
    assert optics.decode(qsfp([9077, 0, 9077, 9077]))["rx_power_dbm"] == -40.0
    copper = bytearray(qsfp([0] * 4))
    copper[42:58] = bytes(16)
    row = optics.decode(bytes(copper))
    assert row["module_temp_c"] == 47.0
    assert row["rx_power_dbm"] != row["rx_power_dbm"]
    assert optics.decode(bytes([0x11]) + bytes(255)) == {}


def test_an_sfp_with_and_without_calibrated_sensors() -> None:
    memory = bytearray(512)
    memory[0], memory[92] = 0x03, 0x60
    struct.pack_into(">hHHHH", memory, 256 + 96, -5 * 256, 33_100, 3000, 5000, 4000)
    row = optics.decode(bytes(memory))
    assert row["module_temp_c"] == -5.0
    assert row["rx_power_dbm"] == pytest.approx(-3.98, abs=0.01)
    memory[92] = 0x50  # needs coefficients: better no number than a wrong one
    assert optics.decode(bytes(memory)) == {}


def test_lanes_that_the_mode_of_a_cmis_module_leaves_out_are_not_dark() -> None:
    memory = bytearray(optics.CMIS_LANES_AT + 256)
    memory[0] = 0x19
    struct.pack_into(">hH", memory, 14, 61 * 256, 33_000)
    for at, value in ((154, 10_000), (170, 40_000), (186, 8_000)):
        struct.pack_into(">4H", memory, optics.CMIS_LANES_AT + at, *[value] * 4)
    row = optics.decode(bytes(memory))
    assert row["module_temp_c"] == 61.0
    assert row["rx_power_dbm"] == pytest.approx(-0.97, abs=0.01)
    assert row["tx_power_dbm"] == pytest.approx(0.0)
    assert "rx_power_dbm" in optics.decode(bytes(memory[:256]))
    assert optics.decode(bytes(memory[:10])) == {}
