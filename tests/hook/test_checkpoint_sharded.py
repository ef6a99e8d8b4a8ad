"""FSDP2 states: saved by N ranks, restored by M, and read back by torch.distributed.checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trainwarden_hook as tw
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainwarden_hook import segments
from trainwarden_hook.depot import Depot
from trainwarden_hook.export import export, files_under, main, newest_state
from trainwarden_hook.packing import Refused
from trainwarden_hook.sharding import Region, whole

from tests.hook.cluster import wait_for
from trainwarden.embedded.ports import free_port

pytestmark = pytest.mark.torch
SAVED_AT = 3


def build() -> torch.nn.Sequential:
    torch.manual_seed(5)
    # Uneven: 7 and 3 rows over 2 and 3 ranks leave parts of different sizes.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def one_rank(rank: int, world: int, port: int, where: dict[str, str], steps: int, answers: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TRAINWARDEN_NODE=f"n{rank}", TRAINWARDEN_RACK="ab"[rank % 2], TRAINWARDEN_DEPOT=where.get(f"n{rank}", ""),
        TRAINWARDEN_GENERATION=str(world), TRAINWARDEN_MAILBOX="/nowhere", **where,
    )  # fmt: skip
    dist.init_process_group("gloo")
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    job = tw.attach(model, optimizer, checkpoint_every=SAVED_AT, extra={"position": 0})
    for step in range(job.start_step, job.start_step + steps):
        with job.step(step):
            torch.manual_seed(step)
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        job.extra["position"] = step + 1
    assert job._saver is not None
    assert job._saver.wait_idle(60)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    moments = [entries["exp_avg_sq"].full_tensor() for _, entries in sorted(optimizer.state_dict()["state"].items())]
    told = {"start": job.start_step, "from": job.restored_from, "refused": job.refused, "extra": dict(job.extra)}
    answers.put((rank, told, [value.tolist() for value in full.values()], [value.tolist() for value in moments]))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, where: dict[str, str], steps: int) -> list[Any]:
    port = free_port()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=one_rank, args=(rank, world, port, where, steps, answers)) for rank in range(world)]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(120)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three ranks have made four steps and saved before the fourth."""
    folder = tmp_path_factory.mktemp("sharded")
    where = {"TRAINWARDEN_JOB": f"t{uuid.uuid4().hex[:8]}", "TRAINWARDEN_CHECKPOINT_DIR": str(folder)}
    depots = [Depot("127.0.0.1", where["TRAINWARDEN_JOB"], f"n{node}") for node in range(3)]
    where |= {depot._node: depot.address for depot in depots}
    ended = run(3, where, SAVED_AT + 1)
    # a depot counts after it has answered, and the ranks end when they are answered
    wait_for("a replica in each depot", lambda: [depot.kept for depot in depots] == [1, 1, 1])
    yield where, ended
    for depot in depots:
        depot.close()
    for node in range(3):
        segments.unlink_all(where["TRAINWARDEN_JOB"], f"n{node}")


def test_a_node_that_lost_its_memory_has_its_part_from_the_peer_and_the_others_from_their_own(saved: Any) -> None:
    where, ended = saved
    segments.unlink_all(where["TRAINWARDEN_JOB"], "n1")
    again = run(3, {**where, "TRAINWARDEN_CHECKPOINT_DIR": ""}, 1)
    assert [told["from"] for _, told, *_ in again] == ["memory", "peer", "memory"]
    assert [told["start"] for _, told, *_ in again] == [SAVED_AT] * 3
    # One step from the save is the state that the first run ended with, bit for bit.
    assert [rest for _, _, *rest in again] == [rest for _, _, *rest in ended]


def test_two_ranks_put_together_what_three_saved_on_disk(saved: Any, tmp_path: Path) -> None:
    where, ended = saved
    for node in range(3):
        segments.unlink_all(where["TRAINWARDEN_JOB"], f"n{node}")
    fewer = run(2, where, 1)
    assert [told["start"] for _, told, *_ in fewer] == [SAVED_AT] * 2
    assert fewer[0][1]["extra"] == {"position": SAVED_AT + 1}
    for wanted, got in zip(ended[0][2:], fewer[0][2:], strict=True):
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-6)
    for node in range(3):
        segments.unlink_all(where["TRAINWARDEN_JOB"], f"n{node}")
    export_is_read_back(where["TRAINWARDEN_CHECKPOINT_DIR"], tmp_path / "dcp")


def export_is_read_back(folder: str, target: Path) -> None:
    """By torch.distributed.checkpoint.load, into a model and optimizer of one process."""
    assert main(["export", folder, str(target), "--step", str(SAVED_AT)]) == 0
    _, state, _ = newest_state(files_under(folder), SAVED_AT)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    wanted: dict[str, Any] = {"model": model_state, "optim": optimizer_state}
    dcp.load(wanted, checkpoint_id=str(target), no_dist=True)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, state["model"][name])
    for number, entries in optimizer.state_dict()["state"].items():
        assert torch.equal(entries["exp_avg"], state["optimizer"]["state"][number]["exp_avg"])
        assert int(entries["step"]) == SAVED_AT


def test_without_the_part_of_one_rank_there_is_no_save(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no whole save in 0 files"):
        newest_state([])
    with pytest.raises(Refused, match="none"):
        export([], str(tmp_path / "x"))


@pytest.mark.parametrize(("a", "common"), [(0, 0), (2, 2), (3, 1), (5, 0)])
def test_boxes_meet_where_both_are(a: int, common: int) -> None:
    first, second = Region((a, 0), (2, 4)), Region((2, 1), (2, 2))
    assert first.meet(second).elements == common * 2
    assert whole((3, 4)).meet(first).elements == max(0, min(3, a + 2) - a) * 4
