"""Recordings of a real 4-node DDP job: per-step and per-node tables with a labels file, one set of files per run.

A run named ``x`` is ``x.csv`` (a row per rank and step), ``x.nodes.csv`` (node telemetry and a central prober, 4 Hz), ``x.host.csv``
(1 Hz), ``x.events.jsonl`` and ``x.labels.json``; each may be gzipped. The adaptor gives what agents on those nodes would have sent,
in the order of time. Labels and anything that betrays an injected fault are never part of the stream.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.errors import TrainwardenError
from trainwarden.records import (
    Block,
    Catalog,
    LogEvent,
    Metric,
    Placement,
    Record,
    StepReport,
    StepRow,
    Tick,
    TopologyEvent,
    catalog_id_of,
    pack_floats,
)

CLUSTER = "recording"
CONTROLLER = "controller"
REPORT_NS = NS_PER_S

_STATES = {"-": 0, "R": 1, "S": 2, "D": 3, "T": 4, "t": 4, "Z": 5}
_PROCESS = (Metric("alive", "1", "state"), Metric("state", "1", "state"), Metric("cpu_cores", "cores"),
            Metric("throttled_ratio", "1"))  # fmt: skip
_NIC = (Metric("up", "1", "state"), Metric("carrier", "1", "state"), Metric("rx_bytes_per_s", "B/s"), Metric("tx_bytes_per_s", "B/s"),
        Metric("rx_packets_per_s", "1/s"), Metric("tx_packets_per_s", "1/s"),
        Metric("carrier_changes_per_s", "1/s"), Metric("role", "1", "state"))  # fmt: skip
_HOST = (
    Metric("tcp_retrans_per_s", "1/s"),
    Metric("run_dir_free_bytes", "B"),
    Metric("cpu_busy_ratio", "1"),
    Metric("load1", "1"),
)
_MESH = (Metric("rtt_ms", "ms"), Metric("rtt_max_ms", "ms"), Metric("sent_count", "1"), Metric("lost_count", "1"))
_FAMILIES = {"process": _PROCESS, "nic": _NIC, "host": _HOST, "mesh": _MESH}
_RAIL = 1.0


class RecordingError(TrainwardenError):
    """A recording's file is absent or does not have the columns it should."""


@dataclass(frozen=True)
class Label:
    """Ground truth of one fault: kind, guilty nodes by name, start and end in unix nanoseconds."""

    kind: str
    nodes: tuple[str, ...]
    start_ns: int
    end_ns: int


def node_name(number: str | int) -> str:
    """Name of node `number` in the stream."""
    return f"node{int(number)}"


def runs(folder: Path) -> tuple[str, ...]:
    """Names of the runs in a folder, sorted."""
    return tuple(sorted({path.name.split(".")[0] for path in folder.iterdir() if ".nodes.csv" in path.name}))


def labels(folder: Path, run: str) -> tuple[Label, ...]:
    """Ground truth of a run, for scoring only."""
    found = json.loads(_text(folder, f"{run}.labels.json"))["labels"]
    return tuple(
        Label(entry["kind"], tuple(map(node_name, entry["nodes"])), _ns(entry["start"]), _ns(entry["end"]))
        for entry in found
    )


def catalogs() -> tuple[Catalog, ...]:
    """Meaning of the columns that the stream's blocks carry."""
    return tuple(
        Catalog(
            cluster=CLUSTER,
            catalog_id=catalog_id_of(family, metrics),
            family=family,
            source="recording",
            metrics=metrics,
        )
        for family, metrics in _FAMILIES.items()
    )


def read(folder: Path, run: str) -> list[Record]:
    """All records of a run, catalogues and topology first, then by time.

    Parameters
    ----------
    folder
        Where the run's files lie.
    run
        Name of the run, for example ``"sigstop"``.

    Raises
    ------
    RecordingError
        When the node or step table is absent, or lacks a column.
    """
    steps, nodes = _table(folder, f"{run}.csv"), _table(folder, f"{run}.nodes.csv")
    hosts = _table(folder, f"{run}.host.csv") if _find(folder, f"{run}.host.csv") else []
    generations = _generations(folder, run)
    _mark_end(generations, steps)
    timed: list[Record] = [*_step_records(run, steps, generations), *_node_records(run, nodes, hosts, generations)]
    timed += _topologies(run, generations)
    timed.sort(
        key=lambda record: (record.observed_at_ns, type(record).__name__ != "TopologyEvent", record.node, record.seq)
    )
    return [*catalogs(), *timed]


@dataclass
class _Generation:
    attempt: int
    start_ns: int
    ranks: dict[int, str] = field(default_factory=dict)
    pids: dict[int, str] = field(default_factory=dict)
    finished_ns: int = 2**63 - 1

    def rank_on(self, node: str) -> int:
        """Rank that runs on `node`, -1 when none does."""
        return next((rank for rank, where in self.ranks.items() if where == node), -1)


def _generations(folder: Path, run: str) -> list[_Generation]:
    """Rounds of the launcher: a new one begins when a rank starts that the present one already has."""
    found: list[_Generation] = []
    for event in (json.loads(line) for line in _text(folder, f"{run}.events.jsonl").splitlines() if line.strip()):
        if event["kind"] != "proc_start":
            continue
        rank = int(event["rank"])
        if not found or rank in found[-1].ranks:
            found.append(_Generation(len(found), _ns(event["t"])))
        found[-1].ranks[rank] = node_name(event["node"])
        found[-1].pids[rank] = str(event["pid"])
    return found


def _mark_end(generations: list[_Generation], steps: list[dict[str, str]]) -> None:
    """The table of nodes has no exit codes: processes that end after the last step of the last generation have finished their work.

    The launcher starts a new generation after every failure, so an end with nothing after it is the end of the job.
    """
    if generations and steps:
        last_ns = max(_ns(row["wall"]) for row in steps)
        if last_ns > generations[-1].start_ns:
            generations[-1].finished_ns = last_ns


def _attempt_at(generations: list[_Generation], at_ns: int) -> _Generation:
    past = [generation for generation in generations if generation.start_ns <= at_ns]
    return past[-1] if past else generations[0]


def _topologies(run: str, generations: list[_Generation]) -> list[Record]:
    events: list[Record] = []
    names = sorted({node for generation in generations for node in generation.ranks.values()})
    first_ns = generations[0].start_ns if generations else 0
    for seq, node in enumerate(names):
        events.append(TopologyEvent(cluster=CLUSTER, node=node, seq=seq, observed_at_ns=first_ns, entity=f"node:{node}",
                                    origin="scheduler", valid_from_ns=first_ns, attributes={"leaf": "leaf0"}))  # fmt: skip
    for generation in generations:
        ranks = tuple((rank, node, "cpu") for rank, node in sorted(generation.ranks.items()))
        at_ns = generation.start_ns
        events.append(TopologyEvent(cluster=CLUSTER, seq=generation.attempt, observed_at_ns=at_ns, entity=f"job:{run}", origin="scheduler",
                                    valid_from_ns=at_ns, attempt=generation.attempt, ranks=ranks))  # fmt: skip
    return events


# --- steps ---------------------------------------------------------------------------------------------------------------


def _step_records(run: str, table: list[dict[str, str]], generations: list[_Generation]) -> Iterator[Record]:
    """Each rank's rows, sent a second at a time once the second is over, and an event for each failed save."""
    batches: dict[tuple[str, int, int, int], list[StepRow]] = {}
    failures: list[Record] = []
    for row in table:
        step = _step_row(row)
        ended_ns = step.started_at_ns + int(step.duration_ms * NS_PER_MS)
        attempt = _attempt_at(generations, step.started_at_ns).attempt
        key = (node_name(row["node"]), int(row["rank"]), attempt, ended_ns // REPORT_NS)
        batches.setdefault(key, []).append(step)
        if row["ckpt_ok"] == "0":
            failures.append(_failed_save(run, row, attempt, ended_ns, len(failures)))
    worlds = {int(row["rank"]): int(row["world"]) for row in table}
    for seq, (key, rows) in enumerate(sorted(batches.items(), key=lambda item: item[0][3])):
        node, rank, attempt, second = key
        ordered = tuple(sorted(rows, key=lambda r: r.step))
        yield StepReport(cluster=CLUSTER, node=node, seq=seq, observed_at_ns=(second + 1) * REPORT_NS, boot_id=run, job=run,
                         attempt=attempt, rank=rank, world=worlds[rank], rows=ordered)  # fmt: skip
    yield from failures


def _step_row(row: dict[str, str]) -> StepRow:
    def number(name: str) -> float:
        return float(row[name])

    checkpoint_ms = number("ckpt_ms")
    loss, local = number("loss"), number("local_gnorm")
    return StepRow(
        step=int(row["step"]), phase="checkpoint" if checkpoint_ms > 0 else "train", started_at_ns=_ns(row["wall"]),
        duration_ms=number("step_ms"), data_ms=number("data_ms"), forward_ms=number("fwd_ms"), backward_ms=number("bwd_ms"),
        wait_ms=number("ar_wait_ms"), optimizer_ms=number("opt_ms"), checkpoint_ms=checkpoint_ms, arrived_at_ns=_ns(row["arrive"]),
        cpu_ms=number("cpu_ms"), loss=loss, grad_norm_local=local, grad_norm=number("gnorm"), samples=64,
        finite=math.isfinite(loss) and math.isfinite(local), param_checksum=number("param_sum"),
    )  # fmt: skip


def _failed_save(run: str, row: dict[str, str], attempt: int, at_ns: int, seq: int) -> LogEvent:
    attributes = {"step": row["step"], "rank": row["rank"], "where": "node", "error": "checkpoint not written"}
    line = f"checkpoint of step {row['step']} failed"
    return LogEvent(cluster=CLUSTER, node=node_name(row["node"]), seq=seq, observed_at_ns=at_ns, boot_id=run, source="hook",
                    severity="error", code="save_failed", line=line, attributes=attributes, job=run, attempt=attempt,
                    rank=int(row["rank"]))  # fmt: skip


# --- nodes ---------------------------------------------------------------------------------------------------------------


def _node_records(
    run: str, table: list[dict[str, str]], hosts: list[dict[str, str]], generations: list[_Generation]
) -> Iterator[Record]:
    """One tick per node and second out of four samples, one of the prober's, and an event where a trainer vanished between samples."""
    by_second: dict[int, dict[str, list[dict[str, str]]]] = {}
    for row in table:
        by_second.setdefault(int(float(row["wall"])), {}).setdefault(node_name(row["node"]), []).append(row)
    before: dict[str, dict[str, str]] = {}
    busy = _Hosts(hosts)
    for second, nodes in sorted(by_second.items()):
        yield _probes(run, second, nodes)
        for node, rows in nodes.items():
            window = [before[node], *rows] if node in before else rows
            yield _tick(run, _Span(node, window, rows), second, generations, busy)
            yield from _exits(run, _Span(node, window, rows), second, generations)
            before[node] = rows[-1]


@dataclass(frozen=True)
class _Span:
    """A node's samples of one second; `window` has the last one of the second before in front."""

    node: str
    window: list[dict[str, str]]
    rows: list[dict[str, str]]

    def rate(self, column: str, scale: float = 1.0) -> float:
        """Growth per second of a counter over the window; NaN where it was not running throughout."""
        first, last = self.window[0], self.window[-1]
        span_s = float(last["wall"]) - float(first["wall"])
        if span_s <= 0 or min(float(first[column]), float(last[column])) < 0:
            return math.nan
        return max(0.0, float(last[column]) - float(first[column])) / span_s * scale

    def changes(self, column: str) -> float:
        """How often a state changed, per second."""
        values = [row[column] for row in self.window]
        span_s = float(self.window[-1]["wall"]) - float(self.window[0]["wall"])
        return sum(a != b for a, b in itertools.pairwise(values)) / span_s if span_s > 0 else math.nan


def _probes(run: str, second: int, nodes: dict[str, list[dict[str, str]]]) -> Tick:
    rows: list[tuple[float, ...]] = []
    for samples in nodes.values():
        answers = [float(row["probe_ms"]) for row in samples if float(row["probe_ms"]) >= 0]
        middle, longest = (statistics.median(answers), max(answers)) if answers else (math.nan, math.nan)
        rows.append((middle, longest, float(len(samples)), float(len(samples) - len(answers))))
    at_ns = max(_ns(samples[-1]["wall"]) for samples in nodes.values())
    block = _block("mesh", tuple(nodes), rows)
    return Tick(cluster=CLUSTER, node=CONTROLLER, seq=second, observed_at_ns=at_ns, boot_id=run, blocks=(block,))


def _tick(run: str, span: _Span, second: int, generations: list[_Generation], busy: _Hosts) -> Tick:
    row = span.rows[-1]
    at_ns = _ns(row["wall"])
    generation = _attempt_at(generations, at_ns)
    rank = generation.rank_on(span.node)
    state = _STATES.get(row["proc_state"], 6)
    nic = (float(row["link_up"]), float(row["link_running"]), span.rate("rx_bytes"), span.rate("tx_bytes"), span.rate("rx_pkts"),
           span.rate("tx_pkts"), span.changes("link_running"), _RAIL)  # fmt: skip
    host = (span.rate("tcp_retrans"), float(row["ckpt_free_kb"]) * 1024.0, *busy.at(float(row["wall"])))
    blocks = [_block("nic", ("eth0",), [nic]), _block("host", ("host",), [host])]
    if rank >= 0 and generation.start_ns <= at_ns:
        process = (float(state not in (0, 5)), float(state), span.rate("cpu_s"), span.rate("thr_ms", 1e-3))
        blocks.append(_block("process", (f"rank{rank}",), [process]))
    placements = (Placement(run, generation.attempt, rank, "cpu"),) if rank >= 0 else ()
    return Tick(
        cluster=CLUSTER,
        node=span.node,
        seq=second,
        observed_at_ns=at_ns,
        boot_id=run,
        blocks=tuple(blocks),
        placements=placements,
    )


def _exits(run: str, span: _Span, second: int, generations: list[_Generation]) -> Iterator[LogEvent]:
    """A trainer that was there is a zombie or no more: what an agent that watches its process would report as an exit."""
    for number, (last, row) in enumerate(itertools.pairwise(span.window)):
        if last["proc_state"] in ("-", "Z") or row["proc_state"] not in ("-", "Z"):
            continue
        generation = _attempt_at(generations, _ns(row["wall"]))
        rank = generation.rank_on(span.node)
        code = "0" if _ns(row["wall"]) >= generation.finished_ns else "unknown"
        attributes = {"rank": str(rank), "pid": generation.pids.get(rank, ""), "generation": str(generation.attempt)}
        line = f"rank {rank} is no more (exit code {code})"
        yield LogEvent(cluster=CLUSTER, node=span.node, seq=second * 10 + number, observed_at_ns=_ns(row["wall"]), boot_id=run,
                       source="agent", severity="error", code=f"worker_exit:{code}", line=line, attributes=attributes, job=run,
                       attempt=generation.attempt, rank=rank)  # fmt: skip


class _Hosts:
    """The host's busy share and load at a time: the last sample not later than it."""

    def __init__(self, table: Iterable[dict[str, str]]) -> None:
        self._rows = [(float(row["wall"]), float(row["host_busy"]), float(row["load1"])) for row in table]
        self._next = 0

    def at(self, wall_s: float) -> tuple[float, float]:
        """Busy share and load; NaN before the first sample. Times asked for must not go back by more than a sample."""
        while self._next < len(self._rows) and self._rows[self._next][0] <= wall_s:
            self._next += 1
        return self._rows[self._next - 1][1:] if self._next else (math.nan, math.nan)


def _block(family: str, devices: tuple[str, ...], rows: list[tuple[float, ...]]) -> Block:
    return Block(
        family, catalog_id_of(family, _FAMILIES[family]), devices, pack_floats([value for row in rows for value in row])
    )


# --- files ---------------------------------------------------------------------------------------------------------------


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _text(folder: Path, name: str) -> str:
    path = _find(folder, name)
    if path is None:
        raise RecordingError(
            f"{folder / name}: not found, expected it or {name}.gz: is this the folder of the recording?"
        )
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def _table(folder: Path, name: str) -> list[dict[str, str]]:
    reader = csv.DictReader(io.StringIO(_text(folder, name)))
    needed = {"nodes": "probe_ms", "host": "host_busy"}.get(name.split(".")[-2], "ar_wait_ms")
    if needed not in (reader.fieldnames or ()):
        raise RecordingError(f"{folder / name}: no column {needed!r} in {reader.fieldnames}")
    return [dict(row) for row in reader]


def _ns(seconds: Any) -> int:
    return round(float(seconds) * 1e6) * 1000
