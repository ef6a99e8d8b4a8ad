"""The drift source: what changed is told once, also over a restart; nothing of an environment is kept but what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectors.machine import inventory
from collectors.sources.drift import DriftSource
from tests.collectors.kit import Bench, bench

SECRET = "hunter2"
ENVIRONMENT = {
    "NCCL_IB_HCA": "mlx5_0,mlx5_1", "NCCL_NET_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "OMP_NUM_THREADS": "8", "HOME": "/root",
    "TRAINWARDEN_IMAGE": f"https://robot:{SECRET}@registry/train:1.4", "WANDB_API_KEY": SECRET, "HCCL_BUFFSIZE": "200",
}  # fmt: skip


def node(tmp_path: Path) -> Bench:
    board = bench(tmp_path)
    board.write("/proc/sys/kernel/osrelease", "5.15.0-1042\n")
    board.write("/proc/cmdline", f"BOOT_IMAGE=/vmlinuz root=UUID=4711 iommu=pt quiet console.password={SECRET}\n")
    board.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
    board.write("/sys/module/nvidia/version", "535.129.03\n")
    for number in range(8):
        board.write(f"/sys/class/infiniband/mlx5_{number}/fw_ver", "28.39.1002\n")
    return board


def environ(board: Bench, pid: int, **variables: str) -> None:
    board.write(f"/proc/{pid}/environ", "\0".join(f"{name}={value}" for name, value in variables.items()) + "\0")


def rank(board: Bench, job: str, number: int, pid: int) -> None:
    board.context.ranks.seen(job, 0, number, pid=pid, world=2)


def built(board: Bench, **settings: object) -> DriftSource:
    source = board.build(DriftSource, **settings)
    assert isinstance(source, DriftSource)
    source.start()
    return source


def look(board: Bench, source: DriftSource, seconds: float = 61.0) -> None:
    board.second(source, seconds)
    assert source.settle(60)
    source.sample(board.clock.now_ns())


def facts(board: Bench) -> dict[str, str]:
    return {key: claim.value for key, claim in board.context.facts.board.merged("node").items()}


def test_the_first_look_is_one_event_and_the_nodes_facts(tmp_path: Path) -> None:
    board = node(tmp_path)
    source = built(board)
    look(board, source)
    look(board, source)
    assert board.outlet.codes == ["drift:inventory"]
    assert facts(board) == {
        "kernel": "5.15.0-1042", "clock_source": "tsc", "driver.nvidia": "535.129.03", "firmware.nic": "28.39.1002 x8",
        "kernel_parameters": "console.password=*** iommu=pt quiet",
    }  # fmt: skip
    assert board.outlet.logs[0][0].attributes == facts(board)


def test_a_change_is_told_once_with_before_and_after(tmp_path: Path) -> None:
    board = node(tmp_path)
    source = built(board)
    look(board, source)
    board.write("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    board.write("/sys/class/infiniband/mlx5_3/fw_ver", "28.36.1010\n")
    look(board, source)
    look(board, source)
    assert board.outlet.codes[1:] == ["drift:clock_source", "drift:firmware.nic"]
    clock, firmware = (event for event, _ in board.outlet.logs[1:])
    assert (clock.severity, clock.attributes) == ("warning", {"item": "clock_source", "before": "tsc", "after": "hpet"})
    assert firmware.attributes["after"] == "28.39.1002 x7, 28.36.1010 x1"
    assert facts(board)["clock_source"] == "hpet"
    assert board.outlet.layout_changes == 1


def test_a_change_while_the_agent_was_away_is_told_at_its_start(tmp_path: Path) -> None:
    board = node(tmp_path)
    look(board, built(board))
    board.write("/sys/module/nvidia/version", "550.54.15\n")
    look(board, built(board))
    assert board.outlet.codes == ["drift:inventory", "drift:driver.nvidia", "drift:inventory"]


def test_what_cannot_be_read_for_a_while_is_no_change(tmp_path: Path) -> None:
    board = node(tmp_path)
    source = built(board)
    look(board, source)
    (board.root / "sys/module/nvidia/version").unlink()
    look(board, source)
    board.write("/sys/module/nvidia/version", "535.129.03\n")
    look(board, source)
    assert board.outlet.codes == ["drift:inventory"]


def test_of_a_ranks_environment_only_library_settings_are_kept(tmp_path: Path) -> None:
    board = node(tmp_path)
    environ(board, 11, **ENVIRONMENT)
    environ(board, 12, **{**ENVIRONMENT, "NCCL_IB_HCA": "mlx5_2"})
    rank(board, "train", 0, 11)
    rank(board, "train", 1, 12)
    source = built(board)
    look(board, source)
    found = facts(board)
    assert found["env.NCCL_IB_HCA"] == "mlx5_0,mlx5_1 | mlx5_2"  # the ranks do not agree
    assert {item for item in found if item.startswith("env.")} == {
        "env.NCCL_IB_HCA",
        "env.OMP_NUM_THREADS",
        "env.HCCL_BUFFSIZE",
    }
    assert found["image"] == "https://***@registry/train:1.4"
    everything = (
        "".join(str(event) for event, _ in board.outlet.logs) + str(found) + (tmp_path / "state/drift.json").read_text()
    )
    assert SECRET not in everything
    assert "/root" not in everything


def test_new_processes_are_looked_at_at_once(tmp_path: Path) -> None:
    board = node(tmp_path)
    environ(board, 11, NCCL_ALGO="Ring")
    rank(board, "train", 0, 11)
    source = built(board)
    look(board, source)
    environ(board, 13, NCCL_ALGO="Tree", NCCL_DEBUG="INFO")
    rank(board, "train", 0, 13)
    look(board, source, 1.0)
    assert board.outlet.codes[1:] == ["drift:env.NCCL_ALGO", "drift:env.NCCL_DEBUG"]
    assert board.outlet.logs[1][0].job == "train"
    assert "env.NCCL_DEBUG" in facts(board)


def test_two_jobs_of_one_node_do_not_look_like_changes(tmp_path: Path) -> None:
    board = node(tmp_path)
    for job, number, pid, algorithm in (("a", 0, 21, "Ring"), ("b", 0, 22, "Tree")):
        environ(board, pid, NCCL_ALGO=algorithm)
        rank(board, job, number, pid)
    source = built(board)
    for _ in range(3):
        look(board, source)
    assert board.outlet.codes == ["drift:inventory"]
    assert facts(board)["env.NCCL_ALGO"] == "Ring | Tree"


def test_the_image_of_a_pod_is_known_by_the_cluster_and_a_change_of_it_told(tmp_path: Path) -> None:
    board = node(tmp_path)
    rank(board, "train", 0, 11)
    environ(board, 11, PATH="/bin")
    say = board.context.facts.board.tell
    source = built(board)
    look(board, source)
    assert "image" not in facts(board)
    for image, codes in (("a:1", []), ("a:1@sha256:0123", ["drift:image"]), ("a:1@sha256:0123", [])):
        say("job:train", "kubernetes", "scheduler", {"k8s_image": image}, 0)
        before = len(board.outlet.codes)
        look(board, source)
        look(board, source)
        assert (board.outlet.codes[before:], facts(board)["image"]) == (codes, image)
    # after a restart the cluster is silent for a while: what was known stands
    say("job:train", "kubernetes", "scheduler", {}, 0)
    again = built(board)
    before = len(board.outlet.codes)
    for _ in range(3):
        look(board, again)
    assert (board.outlet.codes[before:], facts(board)["image"]) == (["drift:inventory"], "a:1@sha256:0123")
    environ(board, 11, TRAINWARDEN_IMAGE="own:2")
    look(board, again)
    assert facts(board)["image"] == "own:2", "what the rank itself says is believed"


def test_a_single_look_writes_nothing(tmp_path: Path) -> None:
    board = node(tmp_path)
    source = board.build(DriftSource)
    assert isinstance(source, DriftSource)
    look(board, source)
    assert board.outlet.codes == ["drift:inventory"]
    assert list((tmp_path / "state").iterdir()) == []
    assert source.explain().startswith("5 items of the machine")


def test_a_record_that_is_broken_is_a_first_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = node(tmp_path)
    (tmp_path / "state/drift.json").write_text("{")
    look(board, built(board))
    assert board.outlet.codes == ["drift:inventory"]
    assert "changes since the last run stay unknown" in caplog.text


def test_shapes() -> None:
    assert inventory.nvidia_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu") == "535.129.03"
    assert inventory.nvidia_version("") == ""
    assert inventory.os_name('NAME=x\nPRETTY_NAME="Ubuntu 22.04.3 LTS"\n') == "Ubuntu 22.04.3 LTS"
    assert inventory.memory_gib("MemTotal: 2113456789 kB\n") == "2016"
    assert inventory.memory_gib("MemTotal: x\n") == ""
    assert inventory.environment(b"NCCL_A\0=\0NCCL_B=\xff\0", ()) == {"env.NCCL_B": "\ufffd"}
    long = "x" * 500
    assert len(inventory.clean(long)) <= 200
    assert inventory.clean(long) != inventory.clean(long + "y")
