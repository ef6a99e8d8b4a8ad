"""Wiring: PCI affinity, LLDP, InfiniBand; every parser against its golden file, cut files and noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.sources.fabric import FabricSource, Wiring, interface_of, leaf_of
from collectors.topology import ibnet, inventory, kubernetes, lldp, pci, slurm
from collectors.topology.hostlist import HostlistError, expand_hosts, matches
from tests.collectors.kit import FIXTURES, Bench, bench

FORMS = FIXTURES / "topology"


def text(name: str) -> str:
    return (FORMS / name).read_text(encoding="utf-8")


def parsed() -> dict[str, Any]:
    """What every parser makes of every fixture: written to expected.json when the change is meant."""
    nodes = ("gpu001", "gpu033", "old2", "nobody")
    pods = kubernetes.pods_of_list(json.loads(text("pods.json")))
    return {
        **{name: [asdict(link) for link in ibnet.parse_fabric(text(name))] for name in ("ibnetdiscover.txt", "iblinkinfo.txt")},
        **{name: [asdict(near) for near in lldp.parse_lldp(text(name))] for name in ("lldpctl.json", "lldpctl.json0")},
        **{name: {node: slurm.place_of(node, slurm.parse_topology(text(name))) for node in nodes}
           for name in ("topology.conf", "blocks.conf", "scontrol.txt")},
        **{name: kubernetes.parse_checkpoint(text(name)) for name in ("checkpoint.json", "checkpoint-1.19.json")},
        "node.json": kubernetes.chosen(kubernetes.labels_of_node(json.loads(text("node.json"))), kubernetes.NODE_LABELS),
        "pods.json": {uid: pod.attributes() for uid, pod in pods.items()},
        "podinfo-labels": kubernetes.parse_downward(text("podinfo-labels")),
        "nodes.csv": inventory.attributes_of(text("nodes.csv"), "gpu017", toml=False),
        "nodes.toml": inventory.attributes_of(text("nodes.toml"), "gpu017", toml=True),
    }  # fmt: skip


def test_every_form_is_read_as_its_golden_file_says() -> None:
    assert json.loads(json.dumps(parsed())) == json.loads(text("expected.json"))


PARSERS: dict[str, Callable[[str], object]] = {
    "ibnetdiscover.txt": ibnet.parse_fabric,
    "iblinkinfo.txt": ibnet.parse_fabric,
    "lldpctl.json": lldp.parse_lldp,
    "lldpctl.json0": lldp.parse_lldp,
    "topology.conf": lambda t: slurm.place_of("gpu001", slurm.parse_topology(t)),
    "checkpoint.json": kubernetes.parse_checkpoint,
    "podinfo-labels": kubernetes.parse_downward,
    "nodes.csv": lambda t: inventory.attributes_of(t, "gpu017", toml=False),
    "nodes.toml": lambda t: inventory.attributes_of(t, "gpu017", toml=True),
}


def refusal(name: str, content: str) -> Exception | None:
    """Why a parser refuses `content`; anything but its own errors is a failure."""
    try:
        PARSERS[name](content)
    except (ibnet.FormatError, inventory.InventoryError) as error:
        return error
    return None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.data())
def test_cut_and_damaged_files_are_refused_with_a_sentence_or_read_in_part(name: str, data: st.DataObject) -> None:
    whole = text(name)
    start = data.draw(st.integers(0, len(whole)))
    damage = data.draw(st.sampled_from(["", "\0", "[", '"', "{", "\ufffd", "9" * 30, "=" * 3, "\n\n", "[1-"]))
    broken = whole[:start] + damage + whole[start + data.draw(st.integers(0, 80)) :]
    assert refusal(name, broken) is None or len(str(refusal(name, broken))) > 10


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.text(max_size=300))
def test_noise_is_refused_or_empty(name: str, noise: str) -> None:
    assert refusal(name, noise) is None or len(str(refusal(name, noise))) > 10


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 4))
def test_a_name_matches_exactly_when_the_written_out_list_holds_it(low: int, more: int, width: int) -> None:
    hosts = f"n[{low:0{width}d}-{low + more:0{width}d}]-x,m{low}"
    names = expand_hosts(hosts)
    assert len(names) == more + 2
    for name in (*names[:3], *names[-2:]):
        assert matches(hosts, name)
    for name in (f"n{low + more + 1}-x", f"n{low}", "m", f"n0{names[0][1:]}"):
        assert matches(hosts, name) == (name in names)


@pytest.mark.parametrize(
    "wrong", ["n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[1-99999999]", "n[1-9999][1-9999]", "n[]", "n[1-9][1-", "n[²]"]
)
def test_a_wrong_host_list_is_named(wrong: str) -> None:
    with pytest.raises(HostlistError, match="host list"):
        expand_hosts(wrong)


# --- sysfs ---------------------------------------------------------------------------------------------------------------


def device(root: Path, path: str, numa: int, vendor: str = "0x10de", kind: str = "0x030200") -> Path:
    """A PCI device as sysfs shows it: a folder below its bridges, and a link from the bus."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    (folder / "numa_node").write_text(f"{numa}\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / folder.name).symlink_to(f"../../../devices/{path}")
    return folder


def adapter(root: Path, path: str, numa: int, name: str, guid: str, netdev: str) -> None:
    folder = device(root, path, numa, "0x15b3", "0x020700")
    (folder / "net" / netdev).mkdir(parents=True)
    home = folder / "infiniband" / name
    home.mkdir(parents=True)
    (home / "device").symlink_to("../..")
    (home / "node_guid").write_text(f"{guid}\n")
    links = root / "sys/class/infiniband"
    links.mkdir(parents=True, exist_ok=True)
    (links / name).symlink_to(f"../../devices/{path}/infiniband/{name}")


def wired(root: Path) -> None:
    """Two GPUs, each below a switch with an adapter; the adapters are numbered the other way round. A VGA console is no accelerator."""
    device(root, "pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0", 0)
    device(root, "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:00.0", 1)
    device(root, "pci0000:00/0000:00:02.0", 0, "0x1a03", "0x030000")
    adapter(root, "pci0000:17/0000:17:01.0/0000:18:01.0/0000:1a:00.0", 0, "mlx5_1", "0c42:a103:00aa:0002", "ibs1")
    adapter(root, "pci0000:97/0000:97:01.0/0000:98:01.0/0000:9a:00.0", 1, "mlx5_0", "0c42:a103:00aa:0001", "ibs0")


def fabric(tmp_path: Path, **keys: Any) -> tuple[Bench, FabricSource]:
    board = bench(tmp_path)
    wired(board.root)
    source = board.build(FabricSource, **keys)
    assert isinstance(source, FabricSource)
    return board, source


def settled(board: Bench, source: FabricSource) -> dict[str, str]:
    """Facts of the node after the background answer came."""
    source.sample(1)
    assert source._answer.settle(60.0)
    source.sample(2)
    return {key: claim.value for key, claim in board.context.facts.board.merged("node").items()}


def gaps(source: FabricSource) -> list[str]:
    return [gap.reason for gap in source.sample(3).gaps]


def test_each_gpu_has_the_adapter_below_its_own_switch(tmp_path: Path) -> None:
    board, source = fabric(tmp_path)
    facts = settled(board, source)
    assert facts == {
        "gpu_nic": "gpu0=mlx5_1 gpu1=mlx5_0", "numa": "gpu0=0 gpu1=1 mlx5_0=1 mlx5_1=0",
        "gpu_pci": "gpu0=0000:19:00.0 gpu1=0000:99:00.0",
    }  # fmt: skip
    assert (board.context.facts.gpus, gaps(source), board.outlet.layout_changes) == (2, [], 1)
    assert "2 accelerators" in source.explain()


@pytest.mark.parametrize("form", ["ibnetdiscover.txt", "iblinkinfo.txt"])
def test_infiniband_cables_are_found_by_guid_and_the_leaf_by_the_rail(tmp_path: Path, form: str) -> None:
    board, source = fabric(tmp_path, ib_file=str(FORMS / form), rail_interface="ibs0")
    facts = settled(board, source)
    assert facts["leaf"] == "MF0;leaf1-rail0:MQM9700/U1"
    assert facts["uplinks"].split()[0] == "mlx5_0=MF0;leaf1-rail0:MQM9700/U1:1"


def test_lldp_cables(tmp_path: Path) -> None:
    board, source = fabric(tmp_path, lldp_file=str(FORMS / "lldpctl.json"), rail_interface="ens1np0")
    facts = settled(board, source)
    assert facts["leaf"] == "leaf1-rail0"
    assert (
        facts["uplinks"] == "eth0=mgmt-sw1:swp12 ens1np0=leaf1-rail0:swp1s0 ens2np0=44:38:39:00:00:12:44:38:39:00:00:13"
    )


def test_what_cannot_be_read_is_a_gap_and_the_rest_is_still_said(tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("no JSON")
    board, source = fabric(tmp_path, lldp_file=str(tmp_path / "wrong"), ib_file=str(tmp_path / "absent"))
    assert settled(board, source)["gpu_nic"]
    assert gaps(source) == ["lldp_malformed", "infiniband_unreadable"]


def test_a_node_without_devices_says_nothing(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = board.build(FabricSource)
    assert isinstance(source, FabricSource)
    assert settled(board, source) == {}
    assert (gaps(source), board.outlet.layout_changes) == ([], 0)


def test_which_leaf() -> None:
    cables = {"mlx5_0": ("leafA", "1"), "mlx5_1": ("leafB", "1")}
    wiring = Wiring({}, cables, 2, {"mlx5_0": "ibs0"})
    assert [leaf_of(wiring, rail) for rail in ("mlx5_1", "ibs0", "eth9", "")] == ["leafB", "leafA", "", ""]
    assert leaf_of(Wiring({}, {"eth0": ("sw", "1"), "eth1": ("sw", "2")}, 0, {}), "") == "sw"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.250") == ""


def test_one_adapter_serves_several_gpus_when_there_are_too_few() -> None:
    gpus = [pci.Device(f"gpu{i}", ("pci0000:00", f"0000:0{i}:00.0"), 0) for i in range(3)]
    nic = pci.Device("mlx5_0", ("pci0000:00", "0000:09:00.0"), 0)
    assert pci.affinity(gpus, [nic])["gpu_nic"] == "gpu0=mlx5_0 gpu1=mlx5_0 gpu2=mlx5_0"
    assert "gpu_nic" not in pci.affinity([pci.Device("gpu0", ("pci0000:80", "0000:81:00.0"), 1)], [nic])
