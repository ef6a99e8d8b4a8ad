"""Real jobs of two and three nodes on this machine: killed, stopped, ordered, left alone, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from json import loads
from pathlib import Path
from typing import Any

import pytest

from tests.hook.cluster import ANSWER_S, Cluster, wait_for

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(240)]
Make = Callable[..., Cluster]
PRELOAD = "torch,torch._dynamo,torch.nn.parallel"


class Collector:
    """The nodes' collector: keeps every datagram.

    The kernel queues ten and the hook never waits, so nothing but reading is done by the thread that reads, and it goes first where it may.
    """

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "collector.sock")
        self._datagrams: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        while True:
            self._datagrams.append(self._socket.recv(65536))

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """What was told of a kind, where `fields` are these."""
        rows = [loads(datagram) for datagram in list(self._datagrams)]
        return [row for row in rows if row["t"] == kind and all(row.get(name) == fields[name] for name in fields)]

    def wait(self, kind: str, nodes: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """The same once so many nodes have told it: what a process sends is read later than what it writes or answers."""

        def look() -> list[dict[str, Any]] | None:
            rows = self.of(kind, **fields)
            return rows if len({row["node"] for row in rows}) >= nodes else None

        return wait_for(f"{kind} {fields} from {nodes} nodes", look)


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Collector:
    made = Collector(tmp_path)
    monkeypatch.setenv("TRAINWARDEN_SOCKET", made.path)
    return made


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Cluster] = []

    def build(
        nodes: int, *, steps: int = 100000, every: int = 5, flags: tuple[str, ...] = (), script: str = "tiny.py"
    ) -> Cluster:
        arguments = ["--steps", str(steps), "--every", str(every), "--rows", str(tmp_path / "rows")]
        cluster = Cluster(tmp_path, nodes, arguments, [*flags, "--preload", PRELOAD], script)
        made.append(cluster)
        return cluster

    yield build
    for cluster in made:
        cluster.close()


def with_wardens(cluster: Cluster) -> Cluster:
    for node in cluster.names:
        cluster.start_warden(node)
    cluster.wait_rows(1, 7, len(cluster.names))
    return cluster


def nothing_is_left(cluster: Cluster) -> None:
    """By itself, soon: the kernel ends the children of a process after it."""
    wait_for("the last process and segment to go", lambda: not cluster.leftovers())


def all_failed(cluster: Cluster) -> None:
    wait_for("all nodes to fail", lambda: all(cluster.status(node)["state"] == "failed" for node in cluster.names))


def assert_resumed(cluster: Cluster, collector: Collector, rows: list[dict[str, Any]], **held: Any) -> int:
    """All ranks went on from one step, none older than a save that was told of (by nodes that still hold it) and none that nobody began.

    Whoever outlives the death of a rank saves the step it broke off, and may be stopped before it has told so.
    """
    first: dict[int, int] = {rank: min(row["step"] for row in rows if row["rank"] == rank) for rank in range(2)}
    assert len(set(first.values())) == 1, first
    told = max(row["step"] for row in collector.of("save", generation=1, where="memory", ok=True, **held))
    written = max(row["step"] for row in cluster.rows_of(1))
    # the step behind the newest row may have ended, too, its row unwritten, and the one behind that was broken off
    assert told <= first[0] <= written + 2
    return first[0]


def assert_from_own_memory(collector: Collector, rows: list[dict[str, Any]]) -> None:
    """Each node whose save was sealed went on from its own memory; one whose rank was killed before that has it from the others."""
    resumed = min(row["step"] for row in rows)
    sealed = {row["node"] for row in collector.wait("save", generation=1, where="memory", ok=True, step=resumed)}
    sources = {row["node"]: row["from"] for row in rows}
    assert {node: sources[node] for node in sealed} == dict.fromkeys(sealed, "memory")
    assert {sources[node] for node in sources.keys() - sealed} <= {"memory", "peer"}


def test_a_killed_rank_resumes_by_order_from_memory(make: Make, collector: Collector) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2")))
    victim = cluster.pid_of(1, 1)
    os.kill(victim, signal.SIGKILL)
    all_failed(cluster)
    (told,) = collector.wait("exit", pid=victim)
    assert (told["exit_code"], told["rank"], told["generation"]) == (-9, 1, 1)
    answers = cluster.order(2, cluster.names)
    assert {answer["status"] for answer in answers.values()} == {"accepted"}
    rows = cluster.wait_rows(2, max(row["step"] for row in cluster.rows_of(1)) + 3, 2)
    resumed = assert_resumed(cluster, collector, rows)
    assert_from_own_memory(collector, rows)
    assert all(row["position"] == row["step"] + 1 for row in rows)
    status = cluster.status("n0")
    assert (status["state"], status["generation"], status["members"]) == ("running", 2, ["n0", "n1"])
    assert cluster.order(2, cluster.names)["n0"]["status"] == "refused"
    restored = collector.wait("restore", 2, generation=2)
    assert {row["step"] for row in restored} == {resumed}
    assert {row["from"] for row in restored if row["node"] != told["node"]} == {"memory"}


def test_a_stopped_rank_is_left_behind_and_its_node_stays_out(make: Make) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "1:2")))
    frozen = cluster.pid_of(1, 1)
    node = next(name for name in cluster.names if any(rank["rank"] == 1 for rank in cluster.status(name)["ranks"]))
    other = next(name for name in cluster.names if name != node)
    os.kill(frozen, signal.SIGSTOP)
    answers = cluster.order(2, [other], reason="a test")
    assert answers[node]["status"] == "done"
    rows = cluster.wait_rows(2, 20, 1)
    assert {row["world"] for row in rows} == {1}
    wait_for("the stopped rank to go", lambda: not Path(f"/proc/{frozen}").exists())
    status = cluster.status(node)
    assert status["state"] == "excluded"
    assert "a test" in status["exclusions"][0]["reason"]
    mark = f"trainwarden-{cluster.job}-{node}-"
    wait_for("its segments to go", lambda: not [name for name in os.listdir("/dev/shm") if mark in name])
    cluster.processes[node].terminate()
    cluster.processes[node].wait(ANSWER_S)
    cluster.start_warden(node)
    assert cluster.status(node)["state"] == "excluded"
    assert cluster.command(node, "admit", {})[1]["status"] == "done"
    assert cluster.status(node)["launcher_pid"] is None
    cluster.order(3, [other, node])
    rows = cluster.wait_rows(3, max(row["step"] for row in rows), 2)
    came_back = [row for row in rows if row["rank"] == 1]
    assert came_back[0]["from"] in {"peer", "disk"}
    assert {min(row["step"] for row in rows if row["rank"] == rank) for rank in range(2)} == {came_back[0]["step"]}


def test_without_a_warden_the_job_restarts_by_itself(make: Make, collector: Collector) -> None:
    cluster = make(2, flags=("--nnodes", "2", "--rdzv-conf", "last_call_timeout=1"))
    for node in cluster.names:
        cluster.start_launcher(node)
    cluster.wait_rows(1, 7, 2)
    os.kill(cluster.pid_of(0, 1), signal.SIGKILL)
    rows = cluster.wait_rows(2, 10, 2)
    assert_from_own_memory(collector, rows)


def test_a_silent_control_plane_is_not_waited_for_for_ever(make: Make) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2", "--order-timeout", "1")))
    os.kill(cluster.pid_of(0, 1), signal.SIGKILL)
    cluster.wait_rows(2, 10, 2)
    assert cluster.status("n0")["generation"] == 2
    cluster.order(3, cluster.names)
    cluster.wait_rows(3, 12, 2)


def test_an_order_ends_the_waiting_for_members_that_never_come(make: Make) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "1:2")))
    cluster.command("n0", "world", {"generation": 2, "members": ["n0", "elsewhere"], "rendezvous_id": "x.2"})
    wait_for("generation 2 to be awaited", lambda: cluster.status("n0")["state"] == "starting")
    cluster.order(3, cluster.names)
    cluster.wait_rows(3, 10, 2)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_segment(make: Make, how: signal.Signals) -> None:
    cluster = make(1, flags=("--standalone", "--nproc-per-node", "2"))
    cluster.endpoint = "127.0.0.1:1"
    cluster.start_launcher("n0")
    cluster.wait_rows(1, 7, 2)
    os.kill(cluster.pid_of(1, 1), signal.SIGSTOP)
    launcher = cluster.processes["n0"]
    launcher.send_signal(how)
    assert launcher.wait(ANSWER_S) == 128 + how
    store = cluster.processes["store"]
    store.terminate()
    store.wait(ANSWER_S)
    nothing_is_left(cluster)
    assert not (cluster.root / "n0" / "run" / "mailbox.sock").exists()


def test_a_killed_launcher_takes_its_workers_along_and_is_replaced(make: Make, collector: Collector) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2")))
    old = cluster.status("n1")
    os.kill(old["launcher_pid"], signal.SIGKILL)
    wait_for("the worker to go", lambda: not Path(f"/proc/{old['ranks'][0]['pid']}").exists())
    assert collector.wait("exit", pid=old["ranks"][0]["pid"])[0]["exit_code"] == -9
    wait_for("n0 to fail", lambda: cluster.status("n0")["state"] == "failed")
    cluster.order(2, cluster.names)
    rows = cluster.wait_rows(2, max(row["step"] for row in cluster.rows_of(1)) + 3, 2)
    assert cluster.status("n1")["launcher_pid"] != old["launcher_pid"]
    assert_resumed(cluster, collector, rows)
    assert_from_own_memory(collector, rows)


def test_a_killed_warden_stops_nothing_and_its_successor_takes_over(make: Make) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2")))
    before = cluster.status("n0")
    cluster.command("n0", "status", {}, fence=9)
    cluster.processes["n0"].kill()
    cluster.processes["n0"].wait()
    step = max(row["step"] for row in cluster.rows())
    cluster.wait_rows(1, step + 5, 2)
    cluster.start_warden("n0")
    after = wait_for("the launcher to report", lambda: (now := cluster.status("n0"))["state"] == "running" and now)
    assert (after["launcher_pid"], after["fence"]) == (before["launcher_pid"], 9)
    assert cluster.command("n0", "kill", {"rank": 0}, fence=8)[0] == 409
    cluster.fence = 9
    os.kill(cluster.pid_of(0, 1), signal.SIGKILL)
    all_failed(cluster)
    cluster.order(2, cluster.names)
    cluster.wait_rows(2, 8, 2)


def armed(cluster: Cluster, node: str) -> dict[str, Any]:
    """The answer of a node all of whose ranks have said where they are; each is given a second for that."""

    def look() -> dict[str, Any] | None:
        answer = cluster.command(node, "save", {"phase": "arm"})[1]
        return answer if answer["status"] == "done" else None

    return wait_for(f"the ranks of {node} to answer", look)


def save_together(cluster: Cluster, ahead: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """Order a save of the step so far ahead of the newest; the step and the nodes' answers."""
    steps: dict[str, int] = {}
    for node in cluster.names:
        steps.update(armed(cluster, node)["result"]["steps"])
    assert set(steps) == {"0", "1"}
    step = max(steps.values()) + ahead
    answers: dict[str, dict[str, Any]] = {}

    def commit(node: str) -> None:
        answers[node] = cluster.command(node, "save", {"phase": "commit", "step": step, "deadline_ms": 20000})[1]

    threads = [threading.Thread(target=commit, args=(node,)) for node in cluster.names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return step, answers


def test_a_coordinated_save_over_two_nodes(make: Make, collector: Collector) -> None:
    cluster = with_wardens(make(2, every=0, flags=("--nnodes", "2")))
    # as the action service does: an order that came too late is given again with more time
    for ahead in (20, 200, 500):
        step, answers = save_together(cluster, ahead)
        if not any(answer["result"].get("late") for answer in answers.values()):
            break
    assert {answer["status"] for answer in answers.values()} == {"done"}, answers
    assert {**answers["n0"]["result"]["steps"], **answers["n1"]["result"]["steps"]} == {"0": step, "1": step}
    late = cluster.command("n0", "save", {"phase": "commit", "step": step, "deadline_ms": 20000})[1]
    assert late["status"] == "failed"
    assert late["result"]["late"]
    assert "several nodes" in cluster.command("n0", "save", {"deadline_ms": 1000})[1]["reason"]
    cluster.order(2, cluster.names)
    rows = cluster.wait_rows(2, step + 1, 2)
    # the rank that is stopped last may have saved the step it broke off, and then the other has that one from it
    assert assert_resumed(cluster, collector, rows) >= step
    assert_from_own_memory(collector, rows)


def test_nan_gradients_name_their_rank_and_are_never_saved(
    make: Make, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    # between two saves, where the budget may leave the whole norm out
    monkeypatch.setenv("TRAINWARDEN_TEST_NAN_AT", "22")
    cluster = with_wardens(make(2, flags=("--nnodes", "2"), script="bad_loss.py"))
    cluster.wait_rows(1, 32, 2)
    rows = collector.wait("step", 2, step=22)
    assert {row["rank"]: row.get("grad_norm_local") == "nan" for row in rows} == {0: False, 1: True}

    def refused() -> list[dict[str, Any]]:
        return [row for row in collector.of("save", ok=False) if "not finite" in row["error"]]

    wait_for("both to refuse", lambda: {row["rank"] for row in refused()} == {0, 1})
    assert min(row["step"] for row in refused()) > 22
    cluster.order(2, cluster.names)
    rows = cluster.wait_rows(2, 26, 2)
    assert assert_resumed(cluster, collector, rows) <= 20
    assert all(abs(row["loss"]) < 1e6 for row in rows)


def test_a_corrupt_copy_is_replaced_by_the_peers(make: Make, collector: Collector) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2")))
    cluster.wait_rows(1, 12, 2)
    os.kill(cluster.pid_of(0, 1), signal.SIGKILL)
    all_failed(cluster)
    for name in os.listdir("/dev/shm"):
        if f"trainwarden-{cluster.job}-n1-" in name:
            with open(f"/dev/shm/{name}", "r+b") as segment:
                segment.seek(4500)
                segment.write(b"\xff" * 64)
    for path in (cluster.root / "n1" / "checkpoints").rglob("*.twck"):
        path.unlink()
    cluster.order(2, cluster.names)
    rows = cluster.wait_rows(2, max(row["step"] for row in cluster.rows_of(1)) + 3, 2)
    assert {row["from"] for row in rows if row["node"] == "n1"} == {"peer"}
    assert_resumed(cluster, collector, rows, node="n0")  # or newer: n0 also holds a replica of what n1 saved last
    assert {row["from"] for row in collector.wait("restore", generation=2, node="n1")} == {"peer"}


def test_a_rollback_order_restores_nothing_above_its_step(make: Make) -> None:
    cluster = with_wardens(make(2, flags=("--nnodes", "2")))
    cluster.wait_rows(1, 32, 2)
    cluster.order(2, cluster.names, max_step=27)
    rows = cluster.wait_rows(2, 30, 2)
    assert min(row["step"] for row in rows) <= 27


def test_a_finished_job_ends_everything_but_the_wardens(make: Make) -> None:
    cluster = with_wardens(make(2, steps=40, flags=("--nnodes", "2")))
    wait_for("the end", lambda: all(cluster.status(node)["state"] == "finished" for node in cluster.names))
    assert {row["step"] for row in cluster.rows()} == set(range(40))
    assert (
        cluster.command("n0", "world", {"generation": 2, "members": ["n0"], "rendezvous_id": "x"})[1]["status"]
        == "refused"
    )
    cluster.close()
    nothing_is_left(cluster)


def test_a_script_that_always_fails_is_not_started_for_ever(make: Make, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('always')")
    cluster = make(1, flags=("--standalone", "--order-timeout", "0.2", "--max-restarts", "1"), script=str(broken))
    cluster.start_warden("n0")
    status = wait_for("failure", lambda: (now := cluster.status("n0"))["reason"] and now)
    assert (status["state"], status["launcher_pid"]) == ("failed", None)
    assert "max-restarts" in status["reason"]
    logs = [path.read_text() for path in (cluster.root / "n0" / "run" / "logs").rglob("*.err")]
    assert len(logs) == 2
    assert all("ValueError: always" in text for text in logs)
