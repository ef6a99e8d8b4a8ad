"""The end of this package: after all kills, restarts and poison the store holds exactly what the topics hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from streams.store.connect import connect
from tests.faults.theatre import Theatre, text_of, wait_for
from trainwarden.records import ActionResult, Incident, LogEvent, Plan, StepReport, Tick, Verdict

pytestmark = [pytest.mark.kafka, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

TOPICS = ("tw.ticks", "tw.steps", "tw.events", "tw.logs", "tw.verdicts", "tw.incidents", "tw.actions")
FAMILIES = ("host", "process", "nic", "mesh")
COMPACTED = ("incident_revisions",)
OURS = "WHERE cluster = 'demo'"


def of_topics(play: Theatre) -> Counter[str]:
    """Rows that our records make, table by table."""
    rows: Counter[str] = Counter()
    keys: dict[str, set[Any]] = {
        name: set() for name in ("ticks once", "verdict_log", "incident_revisions", "plan_log", "action_log")
    }
    for record in (r for topic in TOPICS for r in play.records(topic) if r.cluster == "demo"):
        if isinstance(record, Tick):
            rows.update({f"{block.family}_ticks": len(block.devices) for block in record.blocks})
            if any(block.family == "host" for block in record.blocks):  # a forger's have none
                keys["ticks once"].add((record.node, record.boot_id, record.seq))
        elif isinstance(record, StepReport):
            rows["steps"] += len(record.rows)
        elif isinstance(record, LogEvent):
            rows["log_events"] += 1
        elif isinstance(record, Verdict):
            keys["verdict_log"].add(record.verdict_id)
        elif isinstance(record, Incident):
            keys["incident_revisions"].add((record.incident_id, record.revision))
        elif isinstance(record, Plan):
            keys["plan_log"].add(record.plan_id)
        elif isinstance(record, ActionResult):
            keys["action_log"].add((record.plan_id, record.seq))
    rows.update({name: len(found) for name, found in keys.items()})
    return Counter(
        {name: rows[name] for name in (*(f"{family}_ticks" for family in FAMILIES), "steps", "log_events", *keys)}
    )


def of_store(client: Any) -> Counter[str]:
    ask = {f"{family}_ticks": f"SELECT count() FROM {family}_ticks {OURS}" for family in FAMILIES}
    ask |= {
        "steps": f"SELECT count() FROM steps {OURS}",
        "log_events": f"SELECT count() FROM log_events {OURS}",
        "ticks once": f"SELECT uniqExact(node, boot_id, seq) FROM host_ticks {OURS}",
        "verdict_log": f"SELECT count() FROM verdict_log FINAL {OURS}",
        "incident_revisions": f"SELECT uniqExact(incident_id, revision) FROM incident_revisions {OURS}",
        "plan_log": f"SELECT uniqExact(plan_id) FROM plan_log {OURS}",
        "action_log": f"SELECT uniqExact(plan_id, seq) FROM action_log {OURS}",
    }
    return Counter({name: int(client.query(question).result_rows[0][0]) for name, question in ask.items()})


def rollups(client: Any) -> dict[str, tuple[int, int]]:
    """(rows, rows counted by the roll-up) of each roll-up."""
    pairs = {f"{family}_1m": (f"{family}_ticks", "samples") for family in FAMILIES[:3]} | {
        "steps_1m": ("steps", "steps")
    }
    return {
        name: (
            int(client.query(f"SELECT count() FROM {table} {OURS}").result_rows[0][0]),
            int(client.query(f"SELECT sum({name}.{column}) FROM {name} {OURS}").result_rows[0][0]),
        )
        for name, (table, column) in pairs.items()
    }


def assert_equal(stored: Counter[str], expected: Counter[str]) -> None:
    """Row for row; of incidents, whose topic is compacted, the store may have more revisions than are left there."""
    exact = {name: count for name, count in expected.items() if name not in COMPACTED}
    assert {name: stored[name] for name in exact} == exact, text_of({"store": stored, "topics": expected})
    assert all(stored[name] >= expected[name] for name in COMPACTED), text_of({"store": stored, "topics": expected})


def test_the_store_holds_exactly_what_the_topics_hold(play: Theatre) -> None:
    for child in play.cluster.children.all():
        if child.name.startswith("collector") or child.name in ("worker", "actions"):
            play.cluster.children.stop(child.name)
    expected = of_topics(play)
    client = connect(play.cluster.store_url)
    try:
        wait_for(
            "the store to catch up", lambda: all(of_store(client)[name] >= count for name, count in expected.items())
        )
        assert_equal(of_store(client), expected)
        for name, (rows, counted) in rollups(client).items():
            assert counted == rows, f"{name} counted {counted} of {rows} rows"
    finally:
        client.close()
    print("rows:", dict(expected))
