"""The RDMA source: words of four octets, counters that stick or wrap, ports that refuse, names of every driver."""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
from pathlib import Path

import pytest

from collectors.base import Sample
from collectors.files import Files
from collectors.network.counters import Deltas
from collectors.network.rdma import LEFT_ALONE_NS, PortReader, gigabits, hardware_plan, number_of_state, plain, width_of
from collectors.sources.rdma import RdmaSource
from tests.collectors.kit import Bench, bench, devices, values
from trainwarden.clock import NS_PER_S

PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def built(board: Bench, **settings: object) -> RdmaSource:
    source = board.build(RdmaSource, **{"counters_every_s": 1.0, **settings})
    assert isinstance(source, RdmaSource)
    return source


def later(board: Bench, source: RdmaSource, seconds: float = 1.0) -> Sample:
    """The sample after the counters asked for at this moment have come."""
    board.second(source, seconds)
    assert source.settle(60)
    return source.sample(0)


def started(board: Bench, **settings: object) -> RdmaSource:
    source = built(board, **settings)
    later(board, source, 0.0)
    return source


def test_data_counters_count_words_of_four_octets(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = started(board)
    board.write(f"{PORT}/counters/port_rcv_data", str(230539874932483 + 12_500_000_000))
    board.write(f"{PORT}/counters/port_rcv_packets", str(317548853677 + 1000))
    board.write(f"{PORT}/hw_counters/out_of_sequence", "8")
    board.write(f"{PORT}/hw_counters/rp_cnp_handled", "0")
    row = values(source, later(board, source, 2.0), "nic", "mlx5_0/1")
    assert row["rx_bytes_per_s"] == pytest.approx(25e9)  # 12.5e9 words in 2 s
    assert row["tx_bytes_per_s"] == 0
    assert row["rx_packets_per_s"] == pytest.approx(500)
    assert row["out_of_sequence_per_s"] == pytest.approx(4)
    assert (row["up"], row["carrier"], row["speed_mbps"]) == (1, 1, 400_000)
    assert row["saturated_count"] == 1  # excessive_buffer_overrun_errors stands at 15 of 15


def test_what_only_rdma_has_is_a_family_of_its_own(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = started(board)
    board.write(f"{PORT}/hw_counters/packet_seq_err", "30")
    board.write(f"{PORT}/hw_counters/rnr_nak_retry_err", "6")
    row = values(source, later(board, source, 3.0), "rdma", "mlx5_0/1")
    assert (row["state"], row["phys_state"]) == (4, 5)
    assert (row["packet_seq_errors_per_s"], row["rnr_naks_per_s"], row["duplicate_requests_per_s"]) == (10, 2, 0)
    assert "keep_alives_per_s" not in row


def test_states_are_read_every_tick_and_counters_repeated_until_they_are_stale(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = started(board, counters_every_s=10.0)
    later(board, source, 10.0)
    board.write(f"{PORT}/state", "1: DOWN")
    board.write(f"{PORT}/phys_state", "2: Polling")
    row = values(source, board.second(source), "nic", "mlx5_0/1")
    assert (row["up"], row["carrier"], row["rx_bytes_per_s"]) == (0, 0, 0)
    source._counters._every_ns = 3 * NS_PER_S
    source._counters._asked_ns = 1 << 60  # as if the adapter's firmware did not answer
    assert "rx_bytes_per_s" not in values(source, board.second(source, 9.0), "nic", "mlx5_0/1")


def test_a_counter_at_its_maximum_is_told_once(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    (board.root / PORT.lstrip("/") / "counters/excessive_buffer_overrun_errors").unlink()
    shutil.rmtree(board.root / "sys/class/infiniband/mlx5_bond_0")
    board.write(f"{PORT}/counters/symbol_error", "65535")
    board.write(f"{PORT}/counters/link_downed", "255")
    source = started(board)
    for _ in range(3):
        sample = later(board, source)
    assert values(source, sample, "nic", "mlx5_0/1")["saturated_count"] == 2
    assert board.outlet.codes == ["counter_saturated"] * 2
    assert {e.attributes["counter"] for e, _ in board.outlet.logs} == {"symbol_error", "link_downed"}


def test_a_wider_counter_that_passes_the_maximum_of_the_narrow_one_is_not_stuck(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    board.write(f"{PORT}/counters/symbol_error", "70000")
    board.write(f"{PORT}/counters/excessive_buffer_overrun_errors", "0")
    source = started(board)
    assert values(source, later(board, source), "nic", "mlx5_0/1")["saturated_count"] == 0


def test_a_counter_that_says_na_is_absent_and_the_others_go_on(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    board.write(f"{PORT}/counters/port_rcv_data", "N/A (no PMA)")
    source = started(board)
    row = values(source, later(board, source), "nic", "mlx5_0/1")
    assert "rx_bytes_per_s" not in row
    assert "tx_bytes_per_s" in row


def test_a_driver_reload_restarts_the_rates(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = started(board)
    board.write(f"{PORT}/counters/port_xmit_data", "5")
    assert "tx_bytes_per_s" not in values(source, later(board, source), "nic", "mlx5_0/1")
    board.write(f"{PORT}/counters/port_xmit_data", "105")
    assert values(source, later(board, source), "nic", "mlx5_0/1")["tx_bytes_per_s"] == 400


def test_queue_counters_of_32_bits_wrap_and_64_bit_ones_do_not() -> None:
    deltas = Deltas()
    deltas.per_second("a", 2**32 - 10, 0)
    assert deltas.per_second("a", 10, NS_PER_S, wraps_at_bits=32) == 20
    assert deltas.per_second("a", 5, 2 * NS_PER_S, wraps_at_bits=32) != deltas.per_second(
        "a", 5, 2 * NS_PER_S, 32
    )  # NaN: a reset
    deltas.per_second("b", 2**40, 0)
    assert math.isnan(deltas.per_second("b", 3, NS_PER_S))


class Refusing(Files):
    """A tree whose counters answer with an error; each attempt is counted."""

    attempts = 0

    def read(self, name: str) -> bytes:
        if "/counters/" in name:
            Refusing.attempts += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().read(name)


def test_a_port_that_refuses_is_left_alone_for_an_hour(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    Refusing.attempts = 0
    reader = PortReader(Refusing(board.root, board.clock), "mlx5_0", "1")
    for second in range(0, 3600, 10):
        reader.read(second * NS_PER_S)
    assert Refusing.attempts == 3
    reader.read(LEFT_ALONE_NS + NS_PER_S)
    assert Refusing.attempts == 6


def test_all_ports_refusing_is_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = built(board)
    source.tree = lambda: Refusing(board.root, board.clock)
    later(board, source)
    assert [gap.reason for gap in later(board, source).gaps] == ["counters_refused"]


class Hanging(Files):
    """A tree whose counters do not answer until they are let go."""

    let_go = threading.Event()

    def read(self, name: str) -> bytes:
        if "/counters/" in name:
            assert Hanging.let_go.wait(60)
        return super().read(name)


def test_counters_that_hang_are_a_gap_and_the_states_go_on(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    source = built(board)
    source.tree = lambda: Hanging(board.root, board.clock)
    source.sample(0)
    sample = board.second(source, 3.0)
    assert [gap.reason for gap in sample.gaps] == ["counters_hung"]
    assert values(source, sample, "nic", "mlx5_0/1")["carrier"] == 1
    Hanging.let_go.set()
    assert source.settle(60)
    assert later(board, source).gaps == ()


def test_within_the_lifespan_of_the_drivers_cache_it_is_not_asked_again(tmp_path: Path) -> None:
    board = bench(tmp_path, "h100")
    board.write(f"{PORT}/hw_counters/lifespan", "5000")
    reader = PortReader(board.context.files, "mlx5_0", "1")
    first, second, third = (reader.read(s * NS_PER_S) for s in (0, 2, 6))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.hardware_ns, second.hardware_ns, third.hardware_ns) == (0, 0, 6 * NS_PER_S)
    assert second.at_ns == 2 * NS_PER_S


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["out_of_sequence", "np_cnp_sent", "rp_cnp_handled", "rx_icrc_encapsulated"],
         {"out_of_sequence_per_s", "cnp_sent_per_s", "cnp_handled_per_s", "rx_icrc_errors_per_s"}),
        (["to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "oos_drop_count", "max_retry_exceeded", "rx_bytes"],
         {"retransmit_timeouts_per_s", "packet_seq_errors_per_s", "rnr_naks_per_s", "out_of_sequence_per_s", "retries_exceeded_per_s",
          "rx_bytes_per_s"}),
        (["cnpSent", "cnpHandled", "RxECNMrkd", "tcpRetransSegs", "RNR received", "Nak Sequence Error", "Rcvd Out of order packets"],
         {"cnp_sent_per_s", "cnp_handled_per_s", "ecn_marked_per_s", "retransmits_per_s", "rnr_naks_per_s", "packet_seq_errors_per_s",
          "out_of_sequence_per_s"}),
        (["retrans_pkts", "retrans_bytes", "unresponsive_remote_events", "rx_bytes", "tx_pkts", "keep_alive_rcvd", "no_completion_cmds"],
         {"retransmits_per_s", "retransmitted_bytes_per_s", "unresponsive_remotes_per_s", "rx_bytes_per_s", "tx_packets_per_s",
          "keep_alives_per_s", "commands_unanswered_per_s"}),
        (["tx_rdma_cnp_pkts", "req_rx_pkt_seq_err", "resp_rx_outouf_seq", "req_tx_retry_excd_err"],
         {"cnp_sent_per_s", "packet_seq_errors_per_s", "out_of_sequence_per_s", "retries_exceeded_per_s"}),
    ],
    ids=["mlx5", "bnxt_re", "irdma", "efa", "ionic"],
)  # fmt: skip
def test_names_of_every_driver(names: list[str], columns: set[str]) -> None:
    plan = hardware_plan([*names, "lifespan", "of no interest"], set(), 64)
    assert {counter.column for counter in plan.values()} == columns
    assert all(counter.factor == 1 for counter in plan.values())  # true octets, never words


def test_the_columns_of_the_port_itself_win_over_those_of_the_driver() -> None:
    assert hardware_plan(["rx_bytes"], {"rx_bytes_per_s"}, 64) == {}


def test_names_with_commas_and_blanks() -> None:
    assert (plain("SwLinkUp,32"), plain(" RNR  received "), plain("VL15_dropped")) == (
        "swlinkup",
        "rnr_received",
        "vl15_dropped",
    )
    assert (width_of("SwLinkUp,32", 64), width_of("cnpSent", 64), width_of("x,999", 64)) == (32, 64, 64)


def test_an_efa_device_without_standard_counters(tmp_path: Path) -> None:
    board = bench(tmp_path)
    base = "/sys/class/infiniband/rdmap16s27"
    for name, value in {"ports/1/state": "4: ACTIVE", "ports/1/phys_state": "5: LinkUp", "ports/1/rate": "100 Gb/sec (4X EDR)",
                        "ports/1/hw_counters/rx_bytes": "1000", "hw_counters/keep_alive_rcvd": "7"}.items():  # fmt: skip
        board.write(f"{base}/{name}", value)
    source = started(board)
    board.write(f"{base}/ports/1/hw_counters/rx_bytes", "5000")
    board.write(f"{base}/hw_counters/keep_alive_rcvd", "8")
    sample = later(board, source, 2.0)
    assert values(source, sample, "nic", "rdmap16s27/1")["rx_bytes_per_s"] == 2000
    assert values(source, sample, "rdma", "rdmap16s27/1")["keep_alives_per_s"] == 0.5


def test_captured_adapters_of_other_makers(tmp_path: Path) -> None:
    board = bench(tmp_path, "rdma")
    source = started(board)
    base = "/sys/class/infiniband/hfi1_0/ports/1/counters"
    board.write(f"{base}/port_xmit_data", str(273558326543 + 250))
    sample = later(board, source)
    assert devices(sample, "nic") == ("hfi1_0/1", "i40iw0/1", "mlx4_0/1", "mlx4_0/2")
    omni_path = values(source, sample, "nic", "hfi1_0/1")
    assert (omni_path["tx_bytes_per_s"], omni_path["speed_mbps"], omni_path["carrier"]) == (1000, 100_000, 1)
    assert values(source, sample, "nic", "mlx4_0/2")["speed_mbps"] == 40_000
    without_counters = values(source, sample, "nic", "i40iw0/1")  # each of them says "N/A (no PMA)"
    assert without_counters == {"up": 1, "carrier": 1, "speed_mbps": 10_000, "role": 0}
    assert sample.gaps == ()


def test_a_node_without_rdma_is_quiet(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    assert built(board).sample(0) == Sample()


def test_sixty_four_devices_and_one_left_out(tmp_path: Path) -> None:
    board = bench(tmp_path)
    for number in range(64):
        board.write(f"/sys/class/infiniband/mlx5_{number}/ports/1/state", "4: ACTIVE")
        for counter in ("port_rcv_data", "port_xmit_data", "symbol_error"):
            board.write(f"/sys/class/infiniband/mlx5_{number}/ports/1/counters/{counter}", "0")
    before = len(os.listdir("/proc/self/fd"))
    source = started(board, ignore="mlx5_7")
    assert len(devices(later(board, source), "nic")) == 63
    assert (
        len(os.listdir("/proc/self/fd")) - before <= 63 * 2 + 8
    )  # those of the states; for so many counters none is kept


def test_states_and_rates_of_odd_shapes() -> None:
    assert [number_of_state(t) for t in ("4: ACTIVE", "", "x: y", "nan: ?", "inf: ?")] == [4, None, None, None, None]
    assert [gigabits(t) for t in ("400 Gb/sec (4X NDR)", "2.5 Gb/sec", "0 Gb/sec (X )", "N/A", "1.2.3 Gb/sec")] == [
        400,
        2.5,
        0,
        None,
        None,
    ]
