"""Slurm, torchrun and the announcer: facts of nodes and jobs, their precedence, their start, and what contradicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.announce import Announcer, event_origin
from collectors.base import Source
from collectors.outbox import Outbox
from collectors.sources.slurm import SlurmSource
from collectors.sources.torchrun import TorchrunSource
from collectors.spool import Spool
from collectors.topology.facts import Claim, FactBoard
from collectors.topology.launch import parallel_attributes
from collectors.topology.memory import NodeMemory
from collectors.topology.processes import Launch, device_of, parse_environment
from collectors.topology.slurm import job_of, place_in_environment
from tests.collectors.kit import FIXTURES, Bench, bench
from trainwarden.clock import NS_PER_S
from trainwarden.parallel import parallel_layout
from trainwarden.records import LogEvent, TopologyEvent, decode
from trainwarden.topology import Topology

S = TypeVar("S", bound=Source)

MEGATRON = [
    "python",
    "pretrain_gpt.py",
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size",
    "4",
    "--num-layers",
    "32",
]


def rank(board: Bench, pid: int, number: int, argv: list[str], world: int = 16, **environment: str) -> None:
    """A training process of job ``llama`` in the root tree, and its word through the hook."""
    variables = {"RANK": str(number), "SECRET_TOKEN": "hunter2", **environment}
    board.write(f"/proc/{pid}/environ", "\0".join(f"{key}={value}" for key, value in variables.items()))
    board.write(f"/proc/{pid}/cmdline", "\0".join(argv) + "\0")
    board.write(f"/proc/{pid}/cgroup", "0::/system.slice/slurmstepd.scope/job_7\n")
    board.context.ranks.seen("llama", 1, number, pid=pid, world=world, local_rank=number % 8)


def settle(board: Bench, *sources: Source) -> None:
    """Sample until every background answer has come."""
    for _ in range(2):
        for source in sources:
            source.sample(board.clock.now_ns())
            board.context.facts.processes.want(board.context.ranks.all(), board.context.files, board.clock).settle(60.0)
            answer = getattr(source, "_answer", None)
            assert answer is None or answer.settle(60.0)
    for source in sources:
        source.sample(board.clock.now_ns())


def facts(board: Bench, entity: str = "node") -> dict[str, str]:
    return {key: claim.value for key, claim in board.context.facts.board.merged(entity).items()}


def slurm(board: Bench, **keys: Any) -> SlurmSource:
    source = board.build(SlurmSource, **keys)
    assert isinstance(source, SlurmSource)
    return source


def test_topology_conf_places_the_node(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write(
        "/etc/slurm/topology.conf", (FIXTURES / "topology/topology.conf").read_text().replace("gpu[001-032]", "n[0-9]")
    )
    source = slurm(board)
    settle(board, source)
    assert facts(board) == {"leaf": "leaf1", "spine": "spine1 core"}
    assert board.context.facts.board.merged("node")["leaf"].origin == "scheduler"
    assert "leaf1" in source.explain()


def test_a_node_without_slurm_costs_and_says_nothing(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = slurm(board)
    settle(board, source)
    assert (facts(board), source.sample(0).gaps, source._answer.count) == ({}, (), 0)
    assert source.explain().startswith("no Slurm here")


def test_the_environment_of_a_rank_names_job_and_switch_and_where_it_differs_from_the_file_that_is_told(
    tmp_path: Path,
) -> None:
    board = bench(tmp_path)
    board.write("/etc/slurm/topology.conf", "SwitchName=leaf1 Nodes=n0\n")
    rank(board, 40, 0, ["train.py"], SLURM_JOB_ID="4711", SLURM_JOB_NAME="llama 70b", SLURM_JWT="secret", SLURM_RESTART_COUNT="2",
         SLURM_TOPOLOGY_ADDR="spine1.leaf9.n0", SLURM_TOPOLOGY_ADDR_PATTERN="switch.switch.node")  # fmt: skip
    source = slurm(board)
    settle(board, source)
    assert facts(board, "job:llama") == {"slurm_job_id": "4711", "slurm_job_name": "llama 70b", "slurm_restarts": "2"}
    [conflict] = board.context.facts.board.conflicts()
    assert {conflict.kept.value, conflict.other.value} == {"leaf1", "leaf9"}
    assert facts(board)["spine"] == "spine1"


@pytest.mark.parametrize(
    ("address", "pattern", "place"),
    [
        ("root.s1.n0", "switch.switch.node", {"leaf": "s1", "spine": "root"}),
        ("n0", "node", {}),
        ("b7.n0", "block.node", {"block": "b7"}),
        ("s1.n0.example.org", "switch.node", {}),
        ("", "", {}),
    ],
)
def test_topology_address(address: str, pattern: str, place: dict[str, str]) -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert place_in_environment(environment) == place


def test_scontrol_that_hangs_is_killed_and_a_gap(tmp_path: Path) -> None:
    board = bench(tmp_path)
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    source = slurm(board, scontrol=str(command), timeout_s=0.05)
    source._present = True
    settle(board, source)
    assert [gap.reason for gap in source.sample(0).gaps] == ["timeout"]
    command.write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = 'show topology' ] && sed s/gpu.001-032./n0/ {FIXTURES}/topology/scontrol.txt\n"
    )
    board.clock.advance_ns(601 * NS_PER_S)
    source.settings.__dict__["timeout_s"] = 60.0
    settle(board, source)
    assert (facts(board), source.sample(0).gaps) == ({"leaf": "leaf1", "spine": "spine1"}, ())


# --- how a job is parallel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "environment", "world", "sizes"),
    [
        (MEGATRON, {}, 16, {"tp": "2", "dp": "2", "pp": "4"}),
        ([*MEGATRON, "--expert-model-parallel-size=2", "--use-tp-pp-dp-mapping"], {}, 16, {"tp": "2", "ep": "2", "dp": "2", "pp": "4"}),
        (["torchtitan", "--parallelism.tensor_parallel_degree=8", "--parallelism.data_parallel_shard_degree=-1"], {}, 16,
         {"tp": "8", "dp": "2"}),
        (["t", "--parallelism.data_parallel_shard_degree", "4", "--parallelism.data_parallel_replicate_degree", "2"], {}, 8, {"dp": "8"}),
        (["nemo", "trainer.strategy.tensor_model_parallel_size=4", "++model.context_parallel_size=2"], {}, 16,
         {"tp": "4", "cp": "2", "dp": "2"}),
        (["train.py"], {"TENSOR_MODEL_PARALLEL_SIZE": "2"}, 4, {"tp": "2", "dp": "2"}),
        (MEGATRON, {"TRAINWARDEN_TP": "1", "TRAINWARDEN_PP": "2"}, 4, {"tp": "1", "dp": "2", "pp": "2"}),
    ],
)  # fmt: skip
def test_sizes_are_read_as_frameworks_write_them(
    argv: list[str], environment: dict[str, str], world: int, sizes: dict[str, str]
) -> None:
    found = parallel_attributes(environment, argv, world)
    assert {key: value for key, value in found.items() if key != "order"} == sizes
    assert parallel_layout(found, world) is not None


def test_the_pipeline_may_come_before_the_data_axis() -> None:
    found = parallel_attributes({}, [*MEGATRON, "--use-tp-pp-dp-mapping"], 16)
    layout = parallel_layout(found, 16)
    assert layout is not None
    assert [layout.coordinate(rank, "pp") for rank in (0, 2, 8)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("argv", "world"),
    [(MEGATRON, 12), (["train.py"], 8), (["--tensor-model-parallel-size"], 8), (["--tensor-model-parallel-size", "two"], 8),
     (["--tensor-model-parallel-size", "0"], 8), (["--tensor-model-parallel-size", "9" * 40], 8), (MEGATRON, 0), ([], 8)],
)  # fmt: skip
def test_what_does_not_fit_is_not_said(argv: list[str], world: int) -> None:
    assert parallel_attributes({}, argv, world) == {}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([*MEGATRON, "--tp", "-1", "=", "--x.y=3", "²"]), st.text(max_size=12)), max_size=12
    ),
    st.integers(-1, 64),
)
def test_any_command_line_is_a_layout_that_fits_or_nothing(argv: list[str], world: int) -> None:
    found = parallel_attributes({"TRAINWARDEN_EP": argv[0] if argv else ""}, argv, world)
    assert found == {} or parallel_layout(found, world) is not None


def test_coordinates_are_passed_on_when_they_fit() -> None:
    said = {"TRAINWARDEN_COORDINATES": "dp pp;0 0;1 0;0 1;1 1"}
    assert parallel_attributes(said, [], 4) == {"coordinates": "dp pp;0 0;1 0;0 1;1 1"}
    assert parallel_attributes(said, [], 5) == {}


def test_the_layout_reaches_the_workers_topology_and_secrets_do_not(tmp_path: Path) -> None:
    board = bench(tmp_path)
    rank(board, 40, 0, MEGATRON, TORCHELASTIC_RUN_ID="run7")
    rank(board, 41, 1, MEGATRON, TORCHELASTIC_RUN_ID="run7")
    source = board.build(TorchrunSource)
    settle(board, source)
    found = [
        event
        for event in announced(tmp_path, board)
        if isinstance(event, TopologyEvent) and event.entity == "job:llama"
    ]
    assert (found[0].attributes["torchrun_id"], found[0].attributes["dp"]) == ("run7", "2")
    topology = Topology()
    topology.apply(found[0])
    layout = topology.job("llama")
    assert layout is not None
    assert layout.attributes == {"tp": "2", "dp": "2", "pp": "4", "order": "tp-cp-ep-dp-pp"}
    launch = board.context.facts.processes.of(40)
    assert launch is not None
    assert "hunter2" not in repr(launch.environment)


def test_ranks_that_were_started_differently_are_a_conflict_that_is_told_once(tmp_path: Path) -> None:
    board = bench(tmp_path)
    rank(board, 40, 0, MEGATRON)
    rank(board, 41, 1, ["train.py", "--tensor-model-parallel-size", "4"])
    settle(board, board.build(TorchrunSource))
    said = [event for event in announced(tmp_path, board, rounds=3) if isinstance(event, LogEvent)]
    assert {(event.code, event.attributes["key"], event.attributes["kept"], event.attributes["other"]) for event in said} == {
        ("topology_conflict", "tp", "2", "4"), ("topology_conflict", "dp", "2", "4"),
    }  # fmt: skip
    assert len(said) == 2
    assert said[0].job == "llama"


def test_a_job_that_ended_is_forgotten_and_a_new_size_replaces_the_old_one(tmp_path: Path) -> None:
    board = bench(tmp_path)
    rank(board, 40, 0, MEGATRON)
    source = board.build(TorchrunSource)
    settle(board, source)
    board.clock.advance_ns(5 * NS_PER_S)
    board.context.ranks.seen("llama", 2, 0, pid=42, world=8)
    board.write("/proc/42/environ", "RANK=0")
    board.write("/proc/42/cmdline", "\0".join(MEGATRON))
    settle(board, source)
    assert facts(board, "job:llama")["dp"] == "1"
    board.context.ranks.forget("llama", 0)
    settle(board, source)
    assert facts(board, "job:llama") == {}
    assert board.context.facts.board.conflicts() == []


@pytest.mark.parametrize(
    ("environment", "local_rank", "device"),
    [({}, 3, "gpu3"), ({"CUDA_VISIBLE_DEVICES": "6"}, 3, "gpu6"), ({"CUDA_VISIBLE_DEVICES": "4,5"}, 1, "gpu5"),
     ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, 0, ""), ({"CUDA_VISIBLE_DEVICES": "4,5"}, 7, ""), ({"LOCAL_RANK": "2"}, -1, "gpu2"),
     ({}, 9, ""), ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, 2, "gpu2")],
)  # fmt: skip
def test_device_of_a_rank(environment: dict[str, str], local_rank: int, device: str) -> None:
    assert device_of(Launch(environment), local_rank, 8) == device


@given(st.binary(max_size=200))
def test_any_environment_is_read(data: bytes) -> None:
    assert all("SECRET" not in key for key in parse_environment(data + b"\0SECRET=1"))


# --- the announcer and the board ---------------------------------------------------------------------------------------------


def announced(tmp_path: Path, board: Bench, rounds: int = 1, rack: str = "") -> list[Any]:
    """What an announcer publishes about the bench's facts."""
    context = board.context
    spool = Spool(tmp_path / "spool", 1 << 20, context.metrics)
    outbox = Outbox("c", "n0", "boot", b"b", board.clock, spool, context.metrics)
    announcer = Announcer("n0", rack, board.clock, outbox, context.ranks, context.facts, [], tmp_path / "topology.json")
    for _ in range(rounds):
        announcer.announce(True)
        board.clock.advance_ns(60 * NS_PER_S)
    found = [decode(held.entry.value) for held in spool.peek()]
    spool.close()
    return found


def test_precedence_of_all_origins_and_whose_word_it_is(tmp_path: Path) -> None:
    board = bench(tmp_path)
    facts_board = board.context.facts.board
    facts_board.tell("node", "fabric", "discovered", {"leaf": "sw9", "uplinks": "x=sw9"}, 1)
    facts_board.tell("node", "slurm", "scheduler", {"leaf": "leaf1", "rack": "r8"}, 2)
    facts_board.tell("node", "guess", "inferred", {"leaf": "l?", "zone": "z"}, 0)
    events = announced(tmp_path, board, rounds=2, rack="r7")
    [first, second] = [event for event in events if isinstance(event, TopologyEvent)]
    assert (first.origin, first.entity) == ("scheduler", "node:n0")
    assert first.attributes == {
        "leaf": "leaf1", "rack": "r7", "uplinks": "x=sw9", "zone": "z",
        "origins": "scheduler:slurm=leaf operator:configuration=rack discovered:fabric=uplinks inferred:guess=zone",
    }  # fmt: skip
    assert second.valid_from_ns == first.valid_from_ns, "what has not changed holds since then"
    told = [
        event.attributes["key"] + ":" + event.attributes["other"] for event in events if isinstance(event, LogEvent)
    ]
    assert told == ["leaf:sw9", "leaf:l?", "rack:r8"]


def test_a_start_survives_a_restart_and_what_went_away_is_said_to_be_empty(tmp_path: Path) -> None:
    memory = NodeMemory(tmp_path / "m.json")
    [first] = memory.events("node:n0", "inferred", {"leaf": "a", "rack": "r"}, 1000)
    again = NodeMemory(tmp_path / "m.json")
    [same] = again.events("node:n0", "inferred", {"leaf": "a", "rack": "r"}, 5000)
    [less] = again.events("node:n0", "inferred", {"leaf": "a"}, 500)
    assert (same.valid_from_ns, less.attributes) == (first.valid_from_ns, {"rack": "", "leaf": "a"})
    assert less.valid_from_ns == 1001, "a clock that was set back must not make the new word the older one"


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"origin": 3}', b"[]"])
def test_a_broken_memory_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.json").write_bytes(content)
    [event] = NodeMemory(tmp_path / "m.json").events("node:n0", "inferred", {"a": "b"}, 7)
    assert (event.valid_from_ns, event.attributes) == (7, {"a": "b"})


def test_a_stronger_origin_that_fell_silent_is_withdrawn_after_ten_minutes() -> None:
    memory, topology = NodeMemory(), Topology()
    second = NS_PER_S

    def hear(origin: str, leaf: str, at_ns: int) -> dict[str, str]:
        for event in memory.events("node:n0", origin, {"leaf": leaf}, at_ns):
            topology.apply(event)
        return topology.attributes("n0")

    assert hear("operator", "L1", second) == {"leaf": "L1"}
    assert hear("inferred", "sw1", 2 * second) == {"leaf": "sw1"}, (
        "the new word counts at once, under the standing of the old one"
    )
    assert memory._kept.origin == "operator"
    assert hear("inferred", "sw1", 700 * second) == {"leaf": "sw1"}
    assert memory._kept.origin == "inferred"
    assert hear("inferred", "sw2", 701 * second) == {"leaf": "sw2"}


def test_a_claim_repeated_keeps_its_start_and_one_withdrawn_goes() -> None:
    board = FactBoard()
    board.tell("node", "a", "discovered", {"leaf": "x", "rack": ""}, 10)
    board.tell("node", "b", "discovered", {"leaf": "y"}, 5)
    board.tell("node", "b", "discovered", {"leaf": "y"}, 50)
    assert board.merged("node") == {"leaf": Claim("y", "discovered", "b", 5)}
    board.tell("node", "b", "discovered", {}, 60)
    assert board.merged("node") == {"leaf": Claim("x", "discovered", "a", 10)}
    assert event_origin(board.merged("node").values()) == "inferred"
    with pytest.raises(ValueError, match="expected one of operator"):
        board.tell("node", "a", "hearsay", {}, 1)


def test_job_keys() -> None:
    assert job_of({"SLURM_JOB_ID": "7", "SLURM_NNODES": "", "HOME": "/"}) == {"slurm_job_id": "7"}
