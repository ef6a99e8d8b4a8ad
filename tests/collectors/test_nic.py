"""The network source: units, states, roles, lost carriers."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.network.carrier import Carriers
from collectors.network.roles import bridges, default_routes, role_by_name
from collectors.sources.nic import Interface, NicSource, parse_dev
from tests.collectors.kit import Bench, bench, devices, values
from trainwarden.clock import NS_PER_S
from trainwarden.errors import ConfigError

ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


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


def test_a_link_that_came_back_slower_is_seen_at_once_and_any_other_change_within_ten_seconds(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(NicSource)

    def speed(seconds: float) -> float | None:
        return values(source, board.second(source, seconds), "nic", "eth0").get("speed_mbps")

    assert speed(0) == 1000
    board.write("/sys/class/net/eth0/speed", "100\n")
    assert (speed(1), speed(9)) == (1000, 100)
    carrier(board, 0, 3)
    assert speed(1) is None
    board.write("/sys/class/net/eth0/speed", "10\n")
    carrier(board, 1, 4)
    assert speed(1) == 10


def test_no_interface_is_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path)
    assert [g.reason for g in board.build(NicSource).sample(0).gaps] == ["no_interfaces"]


def test_parsers_survive_odd_lines() -> None:
    assert parse_dev("Inter-| Receive\n face |bytes\n eth0:1 2 3\n junk\n x: " + " ".join("1" * 16)) == {
        "x": [1.0] * 16
    }


def test_loopback_on_the_real_tree_is_known_to_the_kernel(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.context.files.root = ""
    loopback = Interface(board.context, "lo")
    assert (loopback.address(), loopback.flags() & 1) == ("127.0.0.1", 1)
    assert loopback.read().row["up"] == 1
    assert Interface(board.context, "nosuch0").flags() == -1


def test_an_expression_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"collector\.sources\.nic\.ignore: '\(' is no regular expression"):
        bench(tmp_path).build(NicSource, ignore="(")


def test_a_role_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"collector\.sources\.nic\.roles\.eth0: 'rale' is no role: known are rail, management, storage",
    ):
        bench(tmp_path).build(NicSource, roles={"eth0": "rale"})


# --- roles -----------------------------------------------------------------------------------------------------------------------


def machine(tmp_path: Path) -> Bench:
    """Four interfaces: one below the switch of a GPU, one with the default route, one called after storage, one of no mark."""
    board = bench(tmp_path)
    lines = [f"{name}: " + " ".join("0" * 16) for name in ("ens1", "ens2", "storage0", "ens9")]
    board.write("/proc/net/dev", "\n".join(lines))
    board.write("/proc/net/route", ROUTES + "ens2\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    switch = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"
    board.write(f"{switch}/0000:17:00.0/class", "0x030200\n")
    board.write(f"{switch}/0000:18:00.0/class", "0x020000\n")
    board.write("/sys/devices/pci0000:00/0000:00:1f.0/0000:01:00.0/class", "0x020000\n")
    for address in ("15:01.0/0000:16:00.0/0000:17:00.0", "15:01.0/0000:16:00.0/0000:18:00.0"):
        link(board, f"sys/bus/pci/devices/{address.rpartition('/')[2]}", f"sys/devices/pci0000:15/0000:{address}")
    link(board, "sys/class/net/ens1/device", f"{switch}/0000:18:00.0".lstrip("/"))
    link(board, "sys/class/net/ens2/device", "sys/devices/pci0000:00/0000:00:1f.0/0000:01:00.0")
    return board


def link(board: Bench, name: str, target: str) -> None:
    path = board.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(board.root / target)


def roles(board: Bench, **settings: object) -> dict[str, float]:
    source = board.build(NicSource, **settings)
    sample = source.sample(0)
    return {name: values(source, sample, "nic", name)["role"] for name in devices(sample, "nic")}


def test_the_neighbour_of_a_gpu_is_a_rail_and_the_default_route_is_for_management(tmp_path: Path) -> None:
    assert roles(machine(tmp_path)) == {"ens1": 1, "ens2": 2, "storage0": 3, "ens9": 0}


def test_a_setting_overrides_what_is_inferred(tmp_path: Path) -> None:
    assert roles(machine(tmp_path), roles={"ens1": "storage", "ens9": "rail"}) == {
        "ens1": 3,
        "ens2": 2,
        "storage0": 3,
        "ens9": 1,
    }


def test_the_only_interface_is_not_put_aside_for_its_default_route(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write("/proc/net/route", ROUTES + "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    assert roles(board) == {"eth0": 0}


def test_marks_of_roles() -> None:
    assert default_routes("", "0" * 32 + " 00 " + "0" * 32 + " 00 fe80 00000400 1 0 00000003 eth1") == {"eth1"}
    assert default_routes("x\neth0 00000000", "bad") == set()
    assert [role_by_name(n) for n in ("ibp26s0", "nvmf1", "eno1", "eth3")] == ["rail", "storage", "management", ""]
    assert bridges("/sys/devices/virtual/net/bond0") == ()


# --- lost carriers -----------------------------------------------------------------------------------------------------------------


def carrier(board: Bench, state: int, changes: int) -> None:
    board.write("/sys/class/net/eth0/carrier", f"{state}\n")
    board.write("/sys/class/net/eth0/carrier_changes", f"{changes}\n")


def test_a_carrier_that_stays_away_is_one_drop_and_its_return_is_told(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    source = board.build(NicSource, drop_after_s=30)
    source.sample(0)
    carrier(board, 0, 3)
    for _ in range(40):
        board.second(source)
    assert board.outlet.codes == ["link_drop"]
    event, urgent = board.outlet.logs[0]
    assert (urgent, event.severity, event.attributes["interface"], event.attributes["down_s"]) == (
        True,
        "warning",
        "eth0",
        "30",
    )
    carrier(board, 1, 4)
    board.second(source)
    assert board.outlet.codes == ["link_drop", "link_back"]


def test_a_flap_between_two_ticks_is_seen_by_the_count_of_changes(tmp_path: Path) -> None:
    board = bench(tmp_path, "node")
    board.write("/sys/class/net/eth0/carrier_down_count", "4\n")
    source = board.build(NicSource)
    carrier(board, 1, 2)
    source.sample(0)
    carrier(board, 1, 8)
    board.second(source)
    (event, urgent) = board.outlet.logs[0]
    assert (event.code, event.attributes["count"], urgent) == ("link_flap", "3", False)
    assert event.attributes["carrier_down_count"] == "4"


def test_flaps_are_folded_and_forgotten_after_the_window() -> None:
    carriers = Carriers(drop_after_s=240, window_s=100)
    told = []
    for second in range(0, 130):
        news = carriers.follow("ib0", 0.0 if second % 10 == 5 else 1.0, None, second * NS_PER_S)
        told += [news] if news else []
    assert [(n.kind, n.count) for n in told] == [("flap", 1), ("flap", 6), ("flap", 6)]
    assert told[-1].flaps_in_window == 11


def test_a_link_that_was_never_up_is_no_news() -> None:
    carriers = Carriers(drop_after_s=5, window_s=100)
    assert [carriers.follow("eth3", 0.0, None, second * NS_PER_S) for second in range(20)] == [None] * 20
    assert carriers.follow("eth3", float("nan"), 7, 21 * NS_PER_S) is None
