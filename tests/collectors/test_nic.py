"""The network source: units, states, roles, RDMA counters that stick at their maximum."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.sources.nic import Links, NicSource, number_of_state, parse_dev
from tests.collectors.kit import bench, devices, values
from trainwarden.errors import ConfigError

PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def test_golden_values_of_an_interface(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(NicSource, roles={"eth0": "storage"})
    first = source.sample(0)
    assert devices(first, "nic") == ("eth0",)  # lo, docker0 and the container's veth are left out
    assert values(source, first, "nic", "eth0") == {"up": 1, "carrier": 1, "speed_mbps": 1000, "role": 3}
    board.edit("/proc/net/dev", "eth0: 874354587 1036395    0    0", "eth0: 874356587 1036405    4    2")
    board.edit("/proc/net/dev", "563352563  732147    0    0", "563353563  732167    0    6")
    board.write("/sys/class/net/eth0/carrier_changes", "6\n")
    board.write("/sys/class/net/eth0/carrier", "0\n")
    row = values(source, board.second(source, 2.0), "nic", "eth0")
    assert row == {
        "up": 1, "carrier": 0, "role": 3, "rx_bytes_per_s": 1000, "rx_packets_per_s": 5, "rx_errors_per_s": 2, "rx_dropped_per_s": 1,
        "tx_bytes_per_s": 500, "tx_packets_per_s": 10, "tx_errors_per_s": 0, "tx_dropped_per_s": 3, "carrier_changes_per_s": 2,
    }  # fmt: skip


def test_an_interface_that_is_switched_off_has_no_carrier(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write("/sys/class/net/eth0/flags", "0x1002\n")
    (board.root / "sys/class/net/eth0/carrier").unlink()
    source = board.build(NicSource)
    row = values(source, source.sample(0), "nic", "eth0")
    assert (row["up"], row["carrier"]) == (0, 0)
    assert "speed_mbps" not in row


def test_no_interface_is_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path)
    assert [g.reason for g in board.build(NicSource).sample(0).gaps] == ["no_interfaces"]


def test_data_counters_count_words_of_four_octets(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = board.build(NicSource, rdma_every_s=1.0)
    source.sample(0)
    board.write(f"{PORT}/counters/port_rcv_data", str(230539874932483 + 12_500_000_000))
    board.write(f"{PORT}/counters/port_rcv_packets", str(317548853677 + 1000))
    board.write(f"{PORT}/hw_counters/out_of_sequence", "8")
    row = values(source, board.second(source, 2.0), "nic", "mlx5_0/1")
    assert row["rx_bytes_per_s"] == pytest.approx(25e9)  # 12.5e9 words in 2 s
    assert row["tx_bytes_per_s"] == 0
    assert row["rx_packets_per_s"] == pytest.approx(500)
    assert row["out_of_sequence_per_s"] == pytest.approx(4)
    assert (row["up"], row["carrier"], row["speed_mbps"]) == (1, 1, 400_000)
    assert row["saturated_count"] == 1  # excessive_buffer_overrun_errors stands at 15 of 15


def test_a_saturated_counter_is_told(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    board.write(f"{PORT}/counters/symbol_error", "65535")
    board.write(f"{PORT}/counters/link_downed", "255")
    source = board.build(NicSource)
    assert values(source, source.sample(0), "nic", "mlx5_0/1")["saturated_count"] == 3


def test_states_of_a_port_are_read_every_tick_and_counters_are_not(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = board.build(NicSource, rdma_every_s=5.0)
    source.sample(0)
    board.write(f"{PORT}/state", "1: DOWN")
    board.write(f"{PORT}/phys_state", "2: Polling")
    row = values(source, board.second(source), "nic", "mlx5_0/1")
    assert (row["up"], row["carrier"]) == (0, 0)
    assert "rx_bytes_per_s" not in row
    assert "rx_bytes_per_s" in values(source, board.second(source, 4.0), "nic", "mlx5_0/1")


def test_a_counter_that_says_na_is_absent_and_left_alone(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    board.write(f"{PORT}/counters/port_rcv_data", "N/A (no PMA)")
    source = board.build(NicSource, rdma_every_s=1.0)
    source.sample(0)
    row = values(source, board.second(source), "nic", "mlx5_0/1")
    assert "rx_bytes_per_s" not in row
    assert "tx_bytes_per_s" in row


def test_parsers_survive_odd_lines() -> None:
    assert parse_dev("Inter-| Receive\n face |bytes\n eth0:1 2 3\n junk\n x: " + " ".join("1" * 16)) == {
        "x": [1.0] * 16
    }
    assert number_of_state("4: ACTIVE") == 4
    assert number_of_state("") is None


def test_loopback_on_the_real_tree_is_known_to_the_kernel(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.context.files.root = ""
    links = Links(board.context)
    assert links.is_rail("lo", "127.0.0.1")
    assert not links.is_rail("lo", "10.9.9.9")
    assert links._flags("lo") & 1
    assert links._flags("nosuch0") == -1


def test_an_expression_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collector\.sources\.nic\.ignore: '\(' is no regular expression"):
        bench(tmp_path).build(NicSource, ignore="(")
