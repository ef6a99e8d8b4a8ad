"""Records: the only thing that parts of Trainwarden share.

Every record is a frozen struct written as a MessagePack array ``[tag, schema, cluster, node, seq, ...]``: fields are known
by position, so a field may only ever be *added at the end with a default*. A reader of an older version ignores what it does not
know, a newer one fills the defaults; an unknown tag or major version is a dead letter, never a guess.

Numbers travel as little-endian float32 blocks, NaN where there is no value (absent is absent, never zero). float32 holds
integers exactly only to 16.7 million: sources send rates or differences, never raw counters.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union

import msgspec

from trainwarden.errors import DecodeError

SCHEMA = 1
"""Major version written by this build. Additive changes keep it."""

Int = Annotated[int, msgspec.Meta(le=2**63 - 1)]
"""A whole number of a record: the wire could carry larger ones, arrays, snapshots and the store could not."""


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Header of every record.

    Records are frozen and hold no records that hold them, so the collector of cycles need not walk them (``gc=False``): a worker with a
    thousand nodes spent a quarter of its reading there.

    Attributes
    ----------
    schema
        Major version of the wire form.
    cluster, node
        Who speaks. `node` is empty for records of a whole cluster or job.
    seq
        Number within (node, boot_id, record kind), rising by one: gaps are loss, repeats are redelivery.
    observed_at_ns
        Unix nanoseconds on the speaker's clock.
    boot_id
        Changes when the speaker starts again; orders `seq` across restarts.
    """

    schema: Int = SCHEMA
    cluster: str = ""
    node: str = ""
    seq: Int = 0
    observed_at_ns: Int = 0
    boot_id: str = ""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of structs that live inside records."""


# --- telemetry ---------------------------------------------------------------------------------------------------------


class Metric(Part, frozen=True):
    """One column of a family: name with its unit, unit, kind (gauge, counter rate, state), meaning."""

    name: str
    unit: str
    kind: str = "gauge"
    help: str = ""


class Catalog(Record, frozen=True, tag="catalog"):
    """Meaning of the columns of one family; sent to a compacted topic under its id.

    Parameters
    ----------
    catalog_id
        `catalog_id_of(family, metrics)`: the same columns have the same id everywhere.
    """

    catalog_id: str = ""
    family: str = ""
    source: str = ""
    metrics: tuple[Metric, ...] = ()


class Placement(Part, frozen=True):
    """Which rank of which job runs here. `device` is the device name ("gpu0", "cpu")."""

    job: str
    attempt: Int
    rank: Int
    device: str = ""


class Block(Part, frozen=True):
    """Samples of one family at one moment: devices × metrics float32, row-major, NaN = absent."""

    family: str
    catalog_id: str
    devices: tuple[str, ...]
    values: bytes

    def rows(self) -> list[tuple[str, tuple[float, ...]]]:
        """(device, values) pairs; raises `DecodeError` when the block's size does not fit its devices."""
        flat = array("f")
        if len(self.values) % 4 or not self.devices or (len(self.values) // 4) % len(self.devices):
            raise DecodeError(
                f"block {self.family}: {len(self.values)} bytes do not divide into {len(self.devices)} devices of float32"
            )
        flat.frombytes(self.values)
        width = len(flat) // len(self.devices)
        return [(device, tuple(flat[i * width : (i + 1) * width])) for i, device in enumerate(self.devices)]


class Gap(Part, frozen=True):
    """Why a source has nothing to say in this tick: `reason` is a short code such as ``deadline`` or ``permission``."""

    source: str
    reason: str


class Tick(Record, frozen=True, tag="tick"):
    """One node, one interval: everything numeric that its collector read.

    `blocks` hold samples by family; `placements` the ranks on this node; `gaps` the sources that failed and why;
    `spooled` says that the record waited on disk while the broker was away. `succeeds` is the boot id of the collector that ran on the
    node before: who knows it has a right to the node.
    """

    interval_ms: Int = 1000
    blocks: tuple[Block, ...] = ()
    placements: tuple[Placement, ...] = ()
    gaps: tuple[Gap, ...] = ()
    spooled: bool = False
    succeeds: str = ""


class StepRow(Part, frozen=True):
    """One training step of one rank. Milliseconds; NaN where the job does not say.

    `wait_ms` is the time from handing over the last gradient bucket to the end of the backward pass; `arrived_at_ns` the
    moment of handing over. Local time is everything before that moment.
    """

    step: Int
    phase: str
    started_at_ns: Int
    duration_ms: float
    data_ms: float = math.nan
    forward_ms: float = math.nan
    backward_ms: float = math.nan
    wait_ms: float = math.nan
    optimizer_ms: float = math.nan
    checkpoint_ms: float = math.nan
    arrived_at_ns: Int = 0
    cpu_ms: float = math.nan
    loss: float = math.nan
    grad_norm_local: float = math.nan
    grad_norm: float = math.nan
    samples: Int = 0
    finite: bool = True
    param_checksum: float = math.nan


class StepReport(Record, frozen=True, tag="steps"):
    """Steps of one rank since its last report (one message per tick, not per step)."""

    job: str = ""
    attempt: Int = 0
    rank: Int = 0
    world: Int = 0
    rows: tuple[StepRow, ...] = ()


class LogEvent(Record, frozen=True, tag="log"):
    """A log line, or an event that behaves like one (a worker's exit, a failed save).

    `code` names what is known (``xid:79``, ``worker_exit:-9``, ``nccl_timeout``); empty when the line is only text.
    `attributes` are the parsed parameters. `repeat` counts identical lines folded into this one.
    """

    source: str = ""
    severity: str = "info"
    code: str = ""
    line: str = ""
    template_id: str = ""
    attributes: dict[str, str] = {}
    repeat: Int = 1
    job: str = ""
    attempt: Int = 0
    rank: Int = -1


class TopologyEvent(Record, frozen=True, tag="topology"):
    """A fact with a start: what a node, link or job is made of from `valid_from_ns` on.

    `entity` is ``node:<name>`` or ``job:<name>``; `origin` (operator, scheduler, hook, inferred) decides precedence.
    For jobs `ranks` lists (rank, node, device).
    """

    entity: str = ""
    origin: str = "inferred"
    valid_from_ns: Int = 0
    attributes: dict[str, str] = {}
    attempt: Int = 0
    ranks: tuple[tuple[Int, str, str], ...] = ()
    removed: bool = False


class Sheet(Part, frozen=True):
    """One family of a block of nodes at one grid point: `rows` are (node, devices), `values` float32 of all devices x `metrics`."""

    family: str
    metrics: tuple[str, ...]
    states: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    values: bytes


class Summary(Record, frozen=True, tag="summary"):
    """One block of nodes at one grid point, aligned: what the second stage puts together to see all nodes at once.

    `closed_at_ns` is when the block's cell was cut, `present` one byte per node of `nodes`, `inferred` the placements that the block
    learnt from its ticks in that cut. `boots` says whose word each node's row is, `heard` when he said it (8 bytes per node):
    `succeeds` whom he names as the one before him: "" and 0 for a node that is absent, all empty from an older worker.
    Identity is (`block`, `at_ns`): a successor's repeat is the same record.
    """

    block: Int = 0
    at_ns: Int = 0
    closed_at_ns: Int = 0
    interval_ms: Int = 1000
    nodes: tuple[str, ...] = ()
    present: bytes = b""
    sheets: tuple[Sheet, ...] = ()
    gaps: tuple[tuple[str, tuple[Gap, ...]], ...] = ()
    inferred: tuple[TopologyEvent, ...] = ()
    boots: tuple[str, ...] = ()
    heard: bytes = b""
    succeeds: tuple[str, ...] = ()


class FrameCut(Record, frozen=True, tag="cut"):
    """How the live pipeline cut its input into frames; with it a replay is the same computation.

    `positions` maps "topic/partition" to the next offset *not* contained in the frame that ended at `now_ns`; of its grid points one in
    `keep_every` was shown to the detectors that follow levels and trends (`streams.shedding`).
    """

    now_ns: Int = 0
    positions: dict[str, Int] = {}
    keep_every: Int = 1


# --- opinions ------------------------------------------------------------------------------------------------------------


class EntityKind(StrEnum):
    """What can be sick."""

    RANK = "rank"
    NODE = "node"
    LINK = "link"
    RAIL = "rail"
    LEAF = "leaf"
    FABRIC = "fabric"
    JOB = "job"
    SERIES = "series"
    TELEMETRY = "telemetry"


class Entity(Part, frozen=True):
    """A thing that can be sick. `name` is unique within kind and cluster; `node` the node it lives on, if one."""

    kind: EntityKind
    name: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class Evidence(Part, frozen=True):
    """A short excerpt of a series that a reader can check: name with unit, times, values, and the expected band."""

    name: str
    unit: str
    at_ns: tuple[Int, ...] = ()
    values: tuple[float, ...] = ()
    low: float = math.nan
    high: float = math.nan
    note: str = ""


class Reach(StrEnum):
    """How far a verdict may go: each level includes those before it."""

    STORE = "store"
    CORRELATE = "correlate"
    NOTIFY = "notify"
    ACT = "act"


class Verdict(Record, frozen=True, tag="verdict"):
    """One detector's opinion about one entity. `verdict_id` is a hash of what it says, so a repeat is the same record.

    `onset_at_ns` is the detector's estimate of when the fault began, `window_*` what it looked at, `clears` true when it takes
    an earlier opinion of the same kind and entity back.
    """

    verdict_id: str = ""
    detector: str = ""
    version: Int = 1
    config_hash: str = ""
    job: str = ""
    attempt: Int = 0
    entity: Entity = Entity(EntityKind.JOB, "")
    rank: Int = -1
    kind: str = ""
    score: float = 0.0
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    confidence: float = 0.0
    onset_at_ns: Int = 0
    window_start_ns: Int = 0
    window_end_ns: Int = 0
    reach: Reach = Reach.STORE
    text: str = ""
    evidence: tuple[Evidence, ...] = ()
    victims: tuple[str, ...] = ()
    clears: bool = False


class IncidentStatus(StrEnum):
    """Life of an incident."""

    OPEN = "open"
    ACTING = "acting"
    RECOVERED = "recovered"
    CLOSED = "closed"
    SUPERSEDED = "superseded"


class Cause(Part, frozen=True):
    """A candidate cause and the probability given to it."""

    kind: str
    entity: Entity
    probability: float


class Timeline(Part, frozen=True):
    """The moments by which a healing system is judged; 0 = not yet. Unix nanoseconds."""

    fault_at_ns: Int = 0
    first_signal_at_ns: Int = 0
    verdict_at_ns: Int = 0
    decided_at_ns: Int = 0
    acted_at_ns: Int = 0
    recovered_at_ns: Int = 0
    closed_at_ns: Int = 0


class Incident(Record, frozen=True, tag="incident"):
    """What happened, to whom, because of whom, and what is done about it. Updated by `revision`.

    `incident_id` is the hash of its first verdict's id and never changes; `dedup_key` is what receivers see, frozen at the first
    publish; `remedy` is the ordered list of verbs that policy recommends for `kind`.
    """

    incident_id: str = ""
    dedup_key: str = ""
    revision: Int = 0
    status: IncidentStatus = IncidentStatus.OPEN
    job: str = ""
    attempt: Int = 0
    kind: str = ""
    severity: str = "warning"
    title: str = ""
    culprits: tuple[Entity, ...] = ()
    culprit_rank: Int = -1
    victims: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    confidence: float = 0.0
    reach: Reach = Reach.CORRELATE
    remedy: tuple[str, ...] = ()
    timeline: Timeline = Timeline()
    report: str = ""
    evidence: tuple[Evidence, ...] = ()
    verdict_ids: tuple[str, ...] = ()
    recurrence: Int = 0
    last_step: Int = -1
    superseded_by: str = ""
    close_reason: str = ""


# --- actions -------------------------------------------------------------------------------------------------------------


class Verb(StrEnum):
    """What the action service can do."""

    SAVE = "checkpoint"
    ISOLATE = "isolate"
    RESTART = "restart"
    REBALANCE = "rebalance"
    REROUTE = "reroute"
    RETURN_NODE = "return_node"
    NOTIFY = "notify"


class Mode(StrEnum):
    """How far the operator lets the service go; the strictest of all that apply wins."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    APPROVE = "approve"
    AUTO = "auto"


class PlanStep(Part, frozen=True):
    """One verb on one target; `key` is the idempotency key (incident, plan number, verb, target)."""

    verb: Verb
    target: str
    key: str


class Plan(Record, frozen=True, tag="plan"):
    """What the planner wants to do about an incident, before any rail has spoken."""

    plan_id: str = ""
    incident_id: str = ""
    incident_revision: Int = 0
    number: Int = 1
    job: str = ""
    attempt: Int = 0
    kind: str = ""
    steps: tuple[PlanStep, ...] = ()
    mode: Mode = Mode.RECOMMEND
    reason: str = ""
    expires_at_ns: Int = 0
    precondition: str = ""
    fence: Int = 0
    policy_revision: str = ""


class ActionStatus(StrEnum):
    """State of one step of a plan in the ledger."""

    PLANNED = "planned"
    RECOMMENDED = "recommended"
    WAITING = "waiting"
    DENIED = "denied"
    EXPIRED = "expired"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"
    REVERTED = "reverted"
    VERIFIED = "verified"


class ActionResult(Record, frozen=True, tag="action"):
    """One row of the ledger, published. `verb` is empty for rows about a whole plan (denied, verified)."""

    plan_id: str = ""
    incident_id: str = ""
    job: str = ""
    key: str = ""
    verb: str = ""
    target: str = ""
    status: ActionStatus = ActionStatus.PLANNED
    mode: Mode = Mode.RECOMMEND
    rail: str = ""
    reason: str = ""
    fence: Int = 0
    started_at_ns: Int = 0
    finished_at_ns: Int = 0
    detail: dict[str, str] = {}


class Delivery(Record, frozen=True, tag="delivery"):
    """One attempt to tell somebody about an incident."""

    incident_id: str = ""
    revision: Int = 0
    receiver: str = ""
    cause: str = ""
    attempt: Int = 1
    status: str = ""
    reason: str = ""


class StateSnapshot(Record, frozen=True, tag="state"):
    """A worker's detector state and the positions it was taken at (`tw.state`, compacted by `owner`)."""

    owner: str = ""
    code_version: str = ""
    positions: dict[str, Int] = {}
    payload: bytes = b""


class PolicyChange(Record, frozen=True, tag="policy"):
    """An operator's live change: `key` is ``mode`` or ``kill_switch``."""

    key: str = ""
    value: str = ""
    author: str = ""
    comment: str = ""
    expires_at_ns: Int = 0


class CollectorOrder(Record, frozen=True, tag="order"):
    """Another setting for the collectors of some nodes, for some time: `key` is ``interval_ms`` or ``log_level``.

    `nodes` selects by name, host list (``gpu[001-032]``), pattern (``rack7-*``) or attribute (``rack=r7``), separated by commas. The order
    ends at `expires_at_ns`, at most 24 hours after `observed_at_ns`; a later order of the same key replaces an earlier one.
    """

    nodes: str = ""
    key: str = ""
    value: str = ""
    author: str = ""
    comment: str = ""
    expires_at_ns: Int = 0


class DeadLetter(Record, frozen=True, tag="dead"):
    """Bytes nobody could read, where they lay and why they were refused."""

    topic: str = ""
    partition: Int = 0
    offset: Int = -1
    reason: str = ""
    key: bytes = b""
    payload: bytes = b""


AnyRecord = Union[  # noqa: UP007 - msgspec needs a runtime union
    Tick, StepReport, LogEvent, TopologyEvent, Catalog, FrameCut, Verdict, Incident, Plan, ActionResult, Delivery,
    StateSnapshot, PolicyChange, DeadLetter, CollectorOrder, Summary,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)

R = TypeVar("R", bound=Record)


def encode(record: Record) -> bytes:
    """Wire form of a record.

    Examples
    --------
    >>> decode(encode(LogEvent(node="n0", code="xid:79"))).code
    'xid:79'
    """
    return _encoder.encode(record)


def decode(payload: bytes) -> Any:
    """The record in `payload`, of whatever kind.

    Raises
    ------
    DecodeError
        For anything that is not a record of a version that this build reads; the reason is meant for the dead-letter topic.
    """
    try:
        record = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a record: {error}") from None
    if record.schema != SCHEMA:
        raise DecodeError(f"record of schema {record.schema}, this build reads {SCHEMA}: upgrade the reader first")
    return record


def decode_as(kind: type[R], payload: bytes) -> R:
    """Like `decode`, and the record must be of `kind`."""
    record = decode(payload)
    if not isinstance(record, kind):
        raise DecodeError(f"a {type(record).__name__} where {kind.__name__} was expected")
    return record


def pack_floats(values: Sequence[float]) -> bytes:
    """Little-endian float32 bytes of `values`; the inverse of `Block.rows`."""
    return array("f", values).tobytes()


def stable_id(*parts: object) -> str:
    """16 hex digits that depend on `parts` only: the identity of verdicts, incidents and plans."""
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()[:16]


def catalog_id_of(family: str, metrics: Sequence[Metric]) -> str:
    """Identity of a column layout: same names in the same order, same id."""
    return stable_id("catalog", family, *[f"{m.name}|{m.unit}|{m.kind}" for m in metrics])[:8]
