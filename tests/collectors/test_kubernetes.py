"""Kubernetes: labels, the kubelet's checkpoint, pods of ranks; the API server refused, slow, absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collectors.announce import rank_device
from collectors.sources.kubernetes import KubernetesSource
from collectors.topology.apiserver import ApiServer, parse_answer
from collectors.topology.kubernetes import images_of, pod_of_cgroup
from tests.collectors.kit import FIXTURES, Bench, bench
from tests.collectors.test_slurm import facts, settle

FORMS = FIXTURES / "topology"
UID = "3f6f9c6e-6a0e-4b0e-9b2a-0c1d2e3f4a5b"
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"


class FakeApi:
    """Answers with the fixtures, or with `problem`."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.asked: list[str] = []

    def node(self, name: str) -> Any:
        return self._answer(f"node {name}", "node.json")

    def pods(self, node: str) -> Any:
        return self._answer(f"pods {node}", "pods.json")

    def _answer(self, question: str, name: str) -> Any:
        self.asked.append(question)
        if self.problem is not None:
            raise self.problem
        return json.loads((FORMS / name).read_text(encoding="utf-8"))


def in_pod(board: Bench, pid: int = 40, number: int = 0, **environment: str) -> None:
    """A rank whose cgroup is that of a pod, as systemd names it."""
    slice_name = UID.replace("-", "_")
    board.write(f"/proc/{pid}/environ", "\0".join(f"{key}={value}" for key, value in environment.items()))
    board.write(f"/proc/{pid}/cmdline", "train.py")
    board.write(
        f"/proc/{pid}/cgroup", f"0::/kubepods.slice/kubepods-burstable-pod{slice_name}.slice/cri-containerd-0a.scope\n"
    )
    board.context.ranks.seen("llama", 1, number, pid=pid, world=8, local_rank=number)


def source_on(board: Bench, api: FakeApi | None = None, **keys: Any) -> KubernetesSource:
    source = board.build(KubernetesSource, **keys)
    assert isinstance(source, KubernetesSource)
    if api is not None:
        source._api, source._present = api, True  # type: ignore[assignment]
    return source


def test_place_pod_job_object_and_devices(tmp_path: Path) -> None:
    board, api = bench(tmp_path), FakeApi()
    board.write(CHECKPOINT, (FORMS / "checkpoint.json").read_text())
    in_pod(board)
    source = source_on(board, api, node="gpu001")
    settle(board, source)
    assert api.asked[:2] == ["node gpu001", "pods gpu001"]
    node = facts(board)
    assert (node["leaf"], node["spine"], node["block"], node["zone"]) == ("leaf1", "spine1", "nvl-7", "eu-1a")
    job = facts(board, "job:llama")
    assert (job["k8s_namespace"], job["k8s_job"], job["k8s_index"], job["k8s_restart"]) == (
        "research",
        "llama",
        "0",
        "2",
    )
    assert (job["k8s_pod_uid"], job["k8s_devices"].count("GPU-")) == (UID, 3)
    assert source.sample(0).gaps == ()
    assert "leaf1" in source.explain()


def test_without_the_api_server_the_pods_own_environment_speaks(tmp_path: Path) -> None:
    board = bench(tmp_path)
    board.write(CHECKPOINT, (FORMS / "checkpoint-1.19.json").read_text())
    podinfo = tmp_path / "podinfo"
    podinfo.mkdir()
    (podinfo / "labels").write_text((FORMS / "podinfo-labels").read_text())
    in_pod(board, POD_NAMESPACE="research", HOSTNAME="llama-0", JOB_COMPLETION_INDEX="5")
    source = source_on(board, podinfo=str(podinfo))
    settle(board, source)
    assert facts(board) == {"zone": "eu-1a"}
    job = facts(board, "job:llama")
    assert (job["k8s_namespace"], job["k8s_pod"], job["k8s_index"], job["k8s_devices"]) == (
        "research",
        "llama-0",
        "5",
        "GPU-a,GPU-b",
    )


def test_a_node_without_kubernetes_costs_and_says_nothing(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = source_on(board, podinfo=str(tmp_path / "none"))
    settle(board, source)
    assert (facts(board), source.sample(0).gaps, source._answer.count) == ({}, (), 0)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [(PermissionError("API server answers 403"), "api_permission"),
     (TimeoutError("late"), "api_unreachable"), (ValueError("no JSON"), "api_unreachable")],
)  # fmt: skip
def test_an_api_server_that_refuses_is_a_gap_and_the_rest_goes_on(
    tmp_path: Path, problem: Exception, reason: str
) -> None:
    board = bench(tmp_path)
    board.write(CHECKPOINT, "{broken")
    source = source_on(board, FakeApi(problem))
    settle(board, source)
    assert [gap.reason for gap in source.sample(0).gaps] == ["checkpoint_malformed", reason]


def test_a_pod_that_has_a_part_of_the_node_does_not_say_which_device_a_rank_uses(tmp_path: Path) -> None:
    board = bench(tmp_path)
    in_pod(board, LOCAL_RANK="1")
    settle(board, source_on(board, FakeApi()))
    state = board.context.ranks.all()[0]
    board.context.facts.gpus = 8
    board.context.facts.pod_devices = {UID: 4}
    assert rank_device(state, board.context.facts) == ""
    board.context.facts.pod_devices = {UID: 8}
    assert rank_device(state, board.context.facts) == "gpu0"
    board.context.facts.gpus = 0
    assert rank_device(state, board.context.facts) == "cpu"


@pytest.mark.parametrize(
    ("cgroup", "uid"),
    [
        (f"0::/kubepods/burstable/pod{UID}/0123", UID),
        (f"12:cpuset:/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/crio-1.scope", UID),
        ("0::/kubepods/besteffort/pod0123456789abcdef0123456789abcdef/1", "0123456789abcdef0123456789abcdef"),
        ("0::/system.slice/podman.service", ""),
        ("", ""),
    ],
)
def test_pod_of_a_cgroup(cgroup: str, uid: str) -> None:
    assert pod_of_cgroup(cgroup) == uid


@pytest.mark.parametrize("pod", [{}, {"spec": 1, "status": []}, {"spec": {"containers": [1, {"name": 2, "image": 3}, {}]}},
                                 {"spec": {"containers": {}}, "status": {"containerStatuses": [{"imageID": None}]}}])  # fmt: skip
def test_pods_without_images(pod: dict[str, Any]) -> None:
    assert images_of(pod) == ""


def test_answers_of_the_api_server() -> None:
    assert parse_answer(200, b'{"a": 1}', "/api/v1/nodes/x?y") == {"a": 1}
    with pytest.raises(PermissionError, match="403 to GET /api/v1/nodes/x: the service account needs that right"):
        parse_answer(403, b"", "/api/v1/nodes/x?resourceVersion=0")
    with pytest.raises(OSError, match="answers 500"):
        parse_answer(500, b"", "/p")
    with pytest.raises(ValueError, match="no JSON"):
        parse_answer(200, b"<html>", "/p")


def test_the_api_server_is_known_only_in_a_pod_with_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert ApiServer.of_pod(1.0) is None
    monkeypatch.setattr("collectors.topology.apiserver.ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert ApiServer.of_pod(1.0) is None
    (tmp_path / "token").write_text("t")
    found = ApiServer.of_pod(1.0)
    assert found is not None
    assert (found.host, found.port) == ("10.0.0.1", 6443)
    with pytest.raises(OSError):
        found.node("x")  # there is no certificate to trust: it is not asked
