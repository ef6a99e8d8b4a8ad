"""The action service commands real wardens around a real training job of three nodes."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from actions.service import ActionService, make_parts
from tests.actions.builders import incident
from tests.actions.harness import wait_for
from tests.hook.cluster import Cluster
from trainwarden.bus import connect
from trainwarden.clock import SystemClock
from trainwarden.config import from_table
from trainwarden.records import ActionResult, ActionStatus, Entity, EntityKind, Plan, Verb, decode, encode
from trainwarden.topics import ACTIONS, INCIDENTS

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 180.0


@dataclass
class Stage:
    """A running job under a running service."""

    cluster: Cluster
    service: ActionService
    url: str

    def report(self, kind: str, node: str, incident_id: str) -> ActionResult:
        """Publish an incident about the job as it is and wait for the end of its plan."""
        bus, job = connect(self.url), self.cluster.job
        state = self.service.watch.job(job)
        made = incident(
            incident_id=incident_id, job=job, attempt=state.generation, kind=kind, culprits=(Entity(EntityKind.NODE, node),),
            last_step=max(row["step"] for row in self.cluster.rows()), observed_at_ns=time.time_ns(),
        )  # fmt: skip
        reader = bus.subscriber([ACTIONS.name], start="latest")
        bus.publisher().publish(INCIDENTS.name, incident_id.encode(), encode(made))
        seen: list[Any] = []

        def look() -> ActionResult | None:
            seen.extend(decode(message.value) for message in reader.poll(0.05))
            rows = [r for r in seen if not isinstance(r, Plan) and not r.verb and r.incident_id == incident_id]
            return next(
                (r for r in rows if r.status in (ActionStatus.VERIFIED, ActionStatus.FAILED, ActionStatus.DENIED)), None
            )

        found: ActionResult = wait_for("the plan to end", look, LIMIT_S)
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    script = ["--steps", "100000", "--rows", str(tmp_path / "rows")]
    with serving(tmp_path, Cluster(tmp_path, 3, script, ["--nnodes", "2:3", "--nproc-per-node", "1"])) as made:
        yield made


@contextmanager
def serving(tmp_path: Path, cluster: Cluster) -> Iterator[Stage]:
    """The job of `cluster` running, and the service over its wardens."""
    try:
        for name in cluster.names:
            cluster.start_warden(name)
        cluster.wait_rows(1, 20, 3)
        url = f"memory://{uuid.uuid4()}"
        nodes = {name: f"http://127.0.0.1:{port}" for name, port in cluster.ports.items()}
        config = from_table({
            "run_dir": str(tmp_path / "service"), "kafka": {"url": url}, "policy": {"mode": "auto"},
            "actions": {"listen": "127.0.0.1:0"}, "rails": {"cool_down": {"job_s": 0, "node_s": 0}, "budget": {"restarts": 1000}},
            "backends": {"warden": {"nodes": nodes, "secret_file": str(tmp_path / "secret")}},
        })  # fmt: skip
        service = ActionService(make_parts(config, SystemClock()), catch_up_s=0.05)
        service.start()
        wait_for("the service to lead", lambda: service.leading and service.caught_up)
        yield Stage(cluster, service, url)
        service.stop()
    finally:
        cluster.close()


def healed(stage: Stage, kind: str, node: str, generation: int) -> ActionResult:
    """Report it and see the job in this generation, once everything was done."""
    end = stage.report(kind, node, f"i{generation}")
    assert (end.status, end.detail["generation"]) == (ActionStatus.VERIFIED, str(generation)), end.reason
    return end


def test_a_kill_a_slow_node_its_return_and_a_frozen_rank(stage: Stage) -> None:
    """Four in a row on one job: healed in place, saved and isolated, admitted again, replaced."""
    cluster, ledger = stage.cluster, stage.service.ledger
    os.kill(cluster.pid_on("n1", 1), signal.SIGKILL)
    healed(stage, "rank_killed", "n1", 2)
    assert set(cluster.status("n0")["members"]) == {"n0", "n1", "n2"}

    end = healed(stage, "compute_slow", "n2", 3)
    rows = {(r.verb, r.status.value): r for r in ledger.rows_of(end.plan_id)}
    assert ("checkpoint", "done") in rows, [(r.verb, r.status.value, r.reason) for r in ledger.rows_of(end.plan_id)]
    assert cluster.status("n2")["state"] == "excluded"
    assert cluster.status("n0")["members"] == ["n0", "n1"]
    saved = int(rows["checkpoint", "done"].detail["step"])
    # the service verifies by what the hook reports; a rank writes its own row of the same step a moment later
    first = min(row["step"] for row in cluster.wait_rows(3, saved, 2))
    assert first >= saved, "the coordinated save is what the job went on from"

    # the node that returns holds an older save than the others: all must go on from the newest
    stage.service.watch.refresh()
    plan = stage.service.desk.return_node("c", "n2", "ann", "repaired")
    ended: Any = wait_for("the return", lambda: (s := ledger.plan(plan.plan_id)) and s.ended, LIMIT_S)
    assert ended.status is ActionStatus.VERIFIED, ended.reason
    assert set(cluster.status("n0")["members"]) == {"n0", "n1", "n2"}
    rows_4 = cluster.wait_rows(4, saved, 3)
    assert min(row["step"] for row in rows_4) >= first

    os.kill(cluster.pid_on("n2", 4), signal.SIGSTOP)
    healed(stage, "rank_frozen", "n2", 5)


def test_a_job_that_heals_in_the_process_is_left_alone(tmp_path: Path) -> None:
    """The incident arrives while the survivors meet: no order ends the processes that are being kept."""
    rows = ["--rows", str(tmp_path / "rows")]
    with serving(tmp_path, Cluster(tmp_path, 3, rows, ["--nnodes", "3:3", "--in-process"], "steady.py")) as stage:
        cluster = stage.cluster
        wait_for("a picture of all", lambda: stage.service.watch.job(cluster.job).heals_s > 0, LIMIT_S)
        kept = {node: cluster.pid_on(node, 1) for node in ("n0", "n2")}
        before = max(row["step"] for row in cluster.rows())
        os.kill(cluster.pid_on("n1", 1), signal.SIGKILL)
        end = stage.report("rank_killed", "n1", "i1")
        assert end.status is ActionStatus.DENIED, end.reason
        cluster.wait_rows(2, before + 40, 3)
        wait_for("nothing more to decide", lambda: not stage.service.desk._again_ns, LIMIT_S)
        assert {node: cluster.pid_on(node, 2) for node in kept} == kept
        assert not [row for row in stage.service.ledger.rows_since(0) if row.verb == Verb.RESTART.value]
        assert {cluster.status(name)["generation"] for name in cluster.names} == {2}
