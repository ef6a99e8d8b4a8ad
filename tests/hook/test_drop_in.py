"""Drop-in for torchrun: every flag is taken, and means what it means there or is said to mean nothing."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser
from trainwarden_hook import outputs
from trainwarden_hook.addresses import UsageError, first_line
from trainwarden_hook.environment import Environment
from trainwarden_hook.giving_up import GivenUp, Judge, Notice
from trainwarden_hook.options import Options, parse
from trainwarden_hook.torchrun_flags import FLAGS, SHORT
from trainwarden_hook.workers import Worker


def options(*argv: str, **environment: str) -> Options:
    return parse([*argv, "train.py", "--lr", "1"], {"TRAINWARDEN_NODE": "n0", **environment})


def test_every_flag_of_torchrun_is_known_under_every_spelling() -> None:
    ours = {name for flag in FLAGS for name in (f"--{flag}", "--" + flag.replace("-", "_"))} | set(SHORT.values())
    actions = [action for action in get_args_parser()._actions if action.dest != "help"]
    theirs = {name for action in actions for name in action.option_strings}
    assert theirs <= ours, theirs - ours
    switches = {action.dest.replace("_", "-") for action in actions if action.nargs == 0}
    assert {flag for flag, (kind, _) in FLAGS.items() if kind == "switch"} == switches


def test_the_command_lines_that_people_have() -> None:
    one = options("--standalone", "--nproc_per_node=4", "--max_restarts=0", "--role", "w", "--tee", "3", "-r", "0:1")
    assert (one.workers_per_node, one.max_restarts, one.role, one.redirects) == (4, 0, "w", {0: 1})
    assert one.script == ["train.py", "--lr", "1"]
    assert any("--tee" in note for note in one.notes)
    many = options("--nnodes", "2:4", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:29400", "--rdzv_id", "7")
    assert (many.min_nodes, many.max_nodes, many.rdzv_id, many.hosts_store) == (2, 4, "7", True)
    far = ("--nnodes", "2", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1")
    assert not options(*far, "--rdzv-endpoint", "192.0.2.7:29400").hosts_store, "an address of another machine"
    told = (*far, "--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-conf", "is_host=0")
    assert not options(*told).hosts_store
    assert options("--nproc-per-node", "2").standalone, "one node and no endpoint: the plainest command line there is"
    assert options("--standalone", "--nproc-per-node", "auto").workers_per_node >= 1
    assert options("--standalone", "--nproc-per-node", "cpu").workers_per_node == os.cpu_count()
    assert options("--standalone", "--shutdown-timeout", "9").grace_s == 9
    assert options("--standalone", "-m").script == ["-m", "train.py", "--lr", "1"]
    assert options("--standalone", "--no-python").script[0] == "--no-python"
    assert int(signal.SIGQUIT) in options("--standalone", "--signals-to-handle", "SIGQUIT").signals


def test_flags_from_the_environment() -> None:
    found = options(PET_NNODES="1", PET_STANDALONE="1", PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="7")
    assert (found.standalone, found.workers_per_node, found.max_restarts) == (True, 2, 7)


def test_a_static_rendezvous_has_its_ranks_by_number() -> None:
    argv = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "29511", "train.py"]
    found = parse(argv, {})
    assert (found.node, found.node_rank, found.endpoint, found.hosts_store) == ("node1", 1, ("127.0.0.1", 29511), False)
    argv[3] = "0"
    assert parse(argv, {}).hosts_store


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--rdzv-backend", "etcd-v2"], "--rdzv-backend is 'etcd-v2', expected c10d"),
        (["--nnodes", "2:4", "--node-rank", "1"], "static rendezvous has a fixed number"),
        (["--nnodes", "2", "--node-rank", "5"], "--node-rank is 5, expected 0 to 1"),
        (["--standalone", "-r", "7"], "--redirects is '7'"),
        (["--standalone", "--local-ranks-filter", "a"], "--local-ranks-filter"),
        (["--standalone", "--signals-to-handle", "SIGNOPE"], "SIGNOPE"),
        (["--standalone", "--max-restarts", "x"], "--max-restarts is 'x', expected a whole number"),
        (["--standalone", "--nproc-per-node", "many"], "--nproc-per-node is 'many'"),
        (["--standalone", "-m", "--no-python"], "exclude each other"),
        (["--standalone", "--nproc-per-node", "xpu"], "no accelerator"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(argv: list[str], word: str) -> None:
    with pytest.raises(UsageError, match=word.replace("(", r"\(")):
        options(*argv)


def test_where_output_goes(tmp_path: Path) -> None:
    def paths(local_rank: int, *flags: str) -> list[str]:
        found = outputs.paths_of(options("--standalone", *flags), Worker(local_rank, local_rank, 1))
        return [path.replace(str(tmp_path), "") for path in found]

    assert paths(0) == ["", ""]
    assert paths(0, "--run-dir", str(tmp_path)) == [f"/logs/generation-1/rank-0.{end}" for end in ("out", "err")]
    logged = ("--log-dir", str(tmp_path), "-r", "0:3,1:2")
    assert paths(0, *logged) == ["/generation-1/rank-0.out", "/generation-1/rank-0.err"]
    assert paths(1, *logged) == ["", "/generation-1/rank-1.err"]
    assert paths(2, *logged) == ["", ""]
    assert paths(1, "--local-ranks-filter", "0,2") == [outputs.NOWHERE] * 2
    assert paths(2, "--local-ranks-filter", "0,2") == ["", ""]


def test_a_virtual_local_rank_is_0_for_the_script_and_real_for_us() -> None:
    seen = outputs.virtual({"LOCAL_RANK": "2", "RANK": "6"}, "4,5,6,7")
    assert (seen["LOCAL_RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert Environment.read(seen).local_rank == 2


class TestGivingUp:
    def test_an_exit_code_that_says_so(self) -> None:
        judge = Judge(frozenset({3}), 3)
        assert judge.failed({1: -9, 2: 1}, 5) == ""
        assert "rank 2 ended with exit code 3" in judge.failed({1: 1, 2: 3}, 50)

    def test_failures_in_a_row_without_a_new_step(self) -> None:
        judge = Judge(frozenset(), 2)
        said = [judge.failed({0: 1}, reached) for reached in (10, 10, 11, 11, 11)]
        assert said[:4] == [""] * 4, "progress starts the count anew"
        assert said[4] == "2 failures in a row without a step beyond 11"

    def test_a_script_that_never_says_its_step_is_left_to_max_restarts(self) -> None:
        judge = Judge(frozenset(), 1)
        assert [judge.failed({0: 1}, -1) for _ in range(5)] == [""] * 5

    def test_the_other_nodes_hear_of_it_and_a_new_run_does_not(self) -> None:
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = ("127.0.0.1", store.port)
        other: Any = Notice("j")
        other.look(place, lambda: 10.0)
        Notice("j").tell(place, "rank 2 said so")
        other.look(place, lambda: 11.0)
        with pytest.raises(GivenUp, match="rank 2 said so"):
            other.look(place, lambda: 20.0)
        Notice("j").take_down(place)
        other.look(place, lambda: 30.0)


def test_an_exception_that_says_nothing_is_named() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    assert first_line(RendezvousTimeoutError()) == "RendezvousTimeoutError", (
        "a spare meets it each time that it has waited"
    )
    assert first_line(ValueError("one\ntwo")) == "one"


def test_help_names_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    shown = capsys.readouterr().out
    assert all(f"--{flag}" in shown for flag in FLAGS)
    assert isinstance(get_args_parser(), argparse.ArgumentParser)
