"""Topics: what each carries, how it is keyed, kept and split. The one place that creates and checks them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

NODE_BLOCKS = 64
"""Hash buckets of nodes without a rack: a node never moves when its job does."""


@dataclass(frozen=True)
class Topic:
    """Layout of one topic. `retention_ms` is ignored when `compacted`."""

    name: str
    key: str
    carries: str
    partitions: int = 1
    retention_ms: int = 24 * 3600 * 1000
    compacted: bool = False

    def settings(self) -> dict[str, str]:
        """Broker settings of the topic, in Kafka's own names."""
        if self.compacted:
            return {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.2", "segment.ms": "600000"}
        return {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms)}


TICKS = Topic("tw.ticks", "node block", "Tick", partitions=4, retention_ms=6 * 3600 * 1000)
EVENTS = Topic("tw.events", "node block", "LogEvent", partitions=4)
"""Log events with a code, as long as none comes in floods (docs/design/0012)."""
LOGS = Topic("tw.logs", "node block", "LogEvent", partitions=4)
"""The rest: lines without a code, what a node repeats too often, and all that a collector of before `EVENTS` says."""
STEPS = Topic("tw.steps", "job", "StepReport", partitions=4, retention_ms=6 * 3600 * 1000)
SUMMARIES = Topic("tw.summaries", "block", "Summary", partitions=4, retention_ms=6 * 3600 * 1000)
UNITS = Topic("tw.units", "nothing", "nothing: who is assigned a partition has that unit", partitions=9)
CATALOG = Topic("tw.catalog", "catalog_id", "Catalog", compacted=True)
TOPOLOGY = Topic("tw.topology", "entity", "TopologyEvent", compacted=True)
CUTS = Topic("tw.cuts", "cluster", "FrameCut", retention_ms=6 * 3600 * 1000)
VERDICTS = Topic("tw.verdicts", "cluster", "Verdict", retention_ms=30 * 24 * 3600 * 1000)
INCIDENTS = Topic("tw.incidents", "incident_id", "Incident", compacted=True)
ACTIONS = Topic("tw.actions", "incident_id", "Plan and ActionResult and Delivery", retention_ms=30 * 24 * 3600 * 1000)
POLICY = Topic("tw.policy", "key", "PolicyChange", compacted=True)
CONTROL = Topic("tw.control", "key", "CollectorOrder")
STATE = Topic("tw.state", "owner", "StateSnapshot", compacted=True)
DEAD = Topic("tw.dead", "topic", "DeadLetter", retention_ms=14 * 24 * 3600 * 1000)

ALL: tuple[Topic, ...] = (
    TICKS,
    EVENTS,
    LOGS,
    STEPS,
    CATALOG,
    TOPOLOGY,
    CUTS,
    VERDICTS,
    INCIDENTS,
    ACTIONS,
    POLICY,
    CONTROL,
    STATE,
    DEAD,
)
STAGED: tuple[Topic, ...] = (SUMMARIES, UNITS)
"""Needed beside the others where detection runs in two stages."""
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in (*ALL, *STAGED)}

READ_BY_COLLECTORS: frozenset[str] = frozenset({TOPOLOGY.name, CONTROL.name})
"""Topics that a collector has to read, and so whoever took one over: no record in them may hold what proves who speaks for a node."""

RAW: tuple[Topic, ...] = (TICKS, STEPS, EVENTS, LOGS, CATALOG, TOPOLOGY)
"""What the detection stage reads."""


def needed(stages: int) -> tuple[Topic, ...]:
    """Topics of a cluster whose detection runs in so many stages."""
    return (*ALL, *STAGED) if stages > 1 else ALL


def of_code(code: str) -> Topic:
    """Where a log event with this code belongs, or one without.

    Examples
    --------
    >>> of_code("xid:79").name, of_code("").name
    ('tw.events', 'tw.logs')
    """
    return EVENTS if code else LOGS


def node_block(node: str, rack: str = "") -> bytes:
    """Key of a node's raw records: its rack, or a hash bucket that outlives any job.

    Examples
    --------
    >>> node_block("gpu-0142") == node_block("gpu-0142")
    True
    """
    return rack.encode() if rack else b"b%02d" % (zlib.crc32(node.encode()) % NODE_BLOCKS)
