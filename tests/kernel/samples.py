"""One filled record of every kind, for golden bytes. Run as a program it prints the golden file."""

from __future__ import annotations

import json
import math

from trainwarden import records as r

_HEAD = {"cluster": "c", "node": "n0", "seq": 7, "observed_at_ns": 1_700_000_000_000_000_000, "boot_id": "b"}
_NODE = r.Entity(r.EntityKind.NODE, "n0", "n0")
_EVIDENCE = r.Evidence("local_ms", "ms", (1, 2), (50.0, 101.5), 40.0, 60.0, "note")

SAMPLES: tuple[r.Record, ...] = (
    r.Tick(
        **_HEAD,
        interval_ms=1000,
        blocks=(r.Block("host", "abcd1234", ("host",), r.pack_floats([0.5, math.nan])),),
        placements=(r.Placement("j", 1, 3, "gpu0"),),
        gaps=(r.Gap("nic", "deadline"),),
        spooled=True,
    ),
    r.StepReport(
        **_HEAD,
        job="j",
        attempt=1,
        rank=3,
        world=4,
        rows=(r.StepRow(17, "train", 5, 65.0, 1.0, 42.0, 8.0, 12.0, 2.0, 0.0, 9, 21.0, 0.3, 1.5, 1.4, 64, True, 0.25),),
    ),
    r.LogEvent(
        **_HEAD,
        source="kernel",
        severity="fatal",
        code="xid:79",
        line="NVRM: Xid",
        template_id="t",
        attributes={"pci": "0000:4e:00"},
        repeat=2,
        job="j",
        attempt=1,
        rank=3,
    ),
    r.TopologyEvent(
        **_HEAD,
        entity="job:j",
        origin="hook",
        valid_from_ns=5,
        attributes={"rack": "r1"},
        attempt=1,
        ranks=((0, "n0", "cpu"),),
    ),
    r.Catalog(
        **_HEAD, catalog_id="abcd1234", family="host", source="host", metrics=(r.Metric("load1", "1", "gauge", "help"),)
    ),
    r.FrameCut(**_HEAD, now_ns=5, positions={"tw.ticks/0": 9}),
    r.Verdict(
        **_HEAD,
        verdict_id="v",
        detector="straggler",
        version=1,
        config_hash="h",
        job="j",
        attempt=1,
        entity=_NODE,
        rank=3,
        kind="compute_slow",
        score=9.0,
        value=101.5,
        low=40.0,
        high=60.0,
        confidence=0.9,
        onset_at_ns=5,
        window_start_ns=5,
        window_end_ns=8,
        reach=r.Reach.ACT,
        text="slow",
        evidence=(_EVIDENCE,),
        victims=("n1",),
        clears=False,
    ),
    r.Incident(
        **_HEAD,
        incident_id="i",
        dedup_key="d",
        revision=2,
        status=r.IncidentStatus.ACTING,
        job="j",
        attempt=1,
        kind="compute_slow",
        severity="major",
        title="t",
        culprits=(_NODE,),
        culprit_rank=3,
        victims=("n1",),
        causes=(r.Cause("compute_slow", _NODE, 0.9),),
        confidence=0.9,
        reach=r.Reach.ACT,
        remedy=("isolate", "restart"),
        timeline=r.Timeline(1, 2, 3, 4, 5, 6, 7),
        report="text",
        evidence=(_EVIDENCE,),
        verdict_ids=("v",),
        recurrence=1,
        last_step=17,
        superseded_by="",
        close_reason="",
    ),
    r.Plan(
        **_HEAD,
        plan_id="p",
        incident_id="i",
        incident_revision=2,
        number=1,
        job="j",
        attempt=1,
        kind="compute_slow",
        steps=(r.PlanStep(r.Verb.ISOLATE, "n0", "k"),),
        mode=r.Mode.AUTO,
        reason="why",
        expires_at_ns=9,
        precondition="attempt=1",
        fence=4,
        policy_revision="r",
    ),
    r.ActionResult(
        **_HEAD,
        plan_id="p",
        incident_id="i",
        job="j",
        key="k",
        verb="isolate",
        target="n0",
        status=r.ActionStatus.DONE,
        mode=r.Mode.AUTO,
        rail="",
        reason="",
        fence=4,
        started_at_ns=5,
        finished_at_ns=6,
        detail={"a": "b"},
    ),
    r.Delivery(
        **_HEAD, incident_id="i", revision=2, receiver="oncall", cause="first", attempt=1, status="sent", reason=""
    ),
    r.StateSnapshot(**_HEAD, owner="worker", code_version="1", positions={"tw.ticks/0": 9}, payload=b"\x00\x01"),
    r.PolicyChange(**_HEAD, key="mode", value="auto", author="me", comment="c", expires_at_ns=9),
    r.CollectorOrder(
        **_HEAD, nodes="gpu[001-032]", key="interval_ms", value="5s", author="me", comment="c", expires_at_ns=9
    ),
    r.Summary(
        **_HEAD,
        block=3,
        at_ns=10,
        closed_at_ns=12,
        interval_ms=1000,
        nodes=("n0", "n1"),
        present=b"\x01\x00",
        sheets=(r.Sheet("host", ("load1",), ("up",), (("n0", ("host",)),), b"\x00\x00\x80?"),),
        gaps=(("n1", (r.Gap("nic", "deadline"),)),),
        inferred=(r.TopologyEvent(node="n0", entity="job:j", attempt=1, valid_from_ns=9, ranks=((0, "n0", "gpu0"),)),),
    ),
    r.DeadLetter(**_HEAD, topic="tw.ticks", partition=1, offset=5, reason="not a record", key=b"k", payload=b"\xff"),
)


def golden() -> dict[str, str]:
    """Hex of every sample by the name of its kind."""
    return {type(sample).__name__: r.encode(sample).hex() for sample in SAMPLES}


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
