"""Real faults, recorded: the adaptor gives what agents would have sent, and the whole pipeline names the right node in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from streams.recordings import real_faults
from streams.recordings.real_faults import Label, RecordingError
from streams.replay import replay_records
from streams.scoring import Score, score
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config
from trainwarden.records import Catalog, Incident, LogEvent, Placement, Reach, Record, StepReport, Tick, TopologyEvent

DATA = Path(__file__).parent / "data"
CONFIG = Config()
DELAY_S = {"kill9": 2.0, "sigstop": 5.0}
EVERY_OTHER_DELAY_S = 15.0
KINDS = frozenset({"rank_killed", "rank_frozen", "compute_slow", "data_slow", "link_slow", "link_down", "fabric_slow", "save_failed",
                   "non_finite", "silent_corruption", "job_slow"})  # fmt: skip


@cache
def told(run: str) -> tuple[Incident, ...]:
    """Incidents of a run as it was recorded."""
    return tuple(replay_records(real_faults.read(DATA, run), CONFIG).newest())


def judged(run: str, records: Sequence[Record], labels: Sequence[Label]) -> tuple[Score, list[Incident]]:
    incidents = replay_records(records, CONFIG).newest()
    return score(run, incidents, labels, KINDS), incidents


def assert_in_time(result: Score) -> None:
    assert result.right, result.line()
    for fault in result.found:
        assert fault.delay_s <= DELAY_S.get(fault.kind, EVERY_OTHER_DELAY_S), result.line()


@pytest.mark.parametrize("run", real_faults.runs(DATA))
def test_culprit_is_named_in_time_and_nobody_else(run: str) -> None:
    labels = real_faults.labels(DATA, run)
    incidents = told(run)
    assert_in_time(score(run, incidents, labels, KINDS))
    guilty = {node for label in labels for node in label.nodes}
    accused = {culprit.node for incident in incidents for culprit in incident.culprits if culprit.node}
    assert accused <= guilty


@pytest.mark.parametrize("run", ["clean1", "clean2", "clean3", "cpu_throttle_mild"])
def test_health_and_what_hardly_binds_raise_nothing(run: str) -> None:
    assert told(run) == ()


def test_five_flaps_are_one_incident() -> None:
    assert [[culprit.node for culprit in incident.culprits] for incident in told("link_flap")] == [["node3"]]


def test_a_slow_fabric_blames_nobody() -> None:
    incidents = told("fabric_slow")
    assert {incident.kind for incident in incidents} == {"fabric_slow"}
    assert not any(incident.reach is Reach.ACT or incident.remedy for incident in incidents)


def _renamed(records: Sequence[Record], names: dict[str, str], ranks: dict[int, int]) -> list[Record]:
    """The same run on other nodes: names and ranks change places."""
    out: list[Record] = []
    for record in records:
        node = names.get(record.node, record.node)
        if isinstance(record, StepReport):
            out.append(replace(record, node=node, rank=ranks[record.rank]))
        elif isinstance(record, LogEvent):
            attributes = {**record.attributes, "rank": str(ranks.get(record.rank, record.rank))}
            out.append(replace(record, node=node, rank=ranks.get(record.rank, record.rank), attributes=attributes))
        elif isinstance(record, Tick):
            blocks = tuple(
                replace(b, devices=tuple(names.get(d, _device(d, ranks)) for d in b.devices)) for b in record.blocks
            )
            placements = tuple(
                Placement(p.job, p.attempt, ranks.get(p.rank, p.rank), p.device) for p in record.placements
            )
            out.append(replace(record, node=node, blocks=blocks, placements=placements))
        elif isinstance(record, TopologyEvent):
            kind, _, name = record.entity.partition(":")
            placed = tuple((ranks[rank], names[where], device) for rank, where, device in record.ranks)
            out.append(replace(record, node=node, entity=f"{kind}:{names.get(name, name)}", ranks=placed))
        else:
            out.append(record)
    return out


def _device(device: str, ranks: dict[int, int]) -> str:
    number = device.removeprefix("rank")
    return f"rank{ranks[int(number)]}" if device.startswith("rank") and number.isdigit() else device


@pytest.mark.parametrize(
    "run", ["sigstop", "kill9", "cpu_throttle", "slow_loader", "net_delay", "link_down", "nan_grad"]
)
def test_other_nodes_and_a_shorter_past_change_nothing(run: str) -> None:
    """The guilty node has another name and rank, and only 20 s of health come before the fault."""
    names = {f"node{i}": f"host-{(i * 3 + 2) % 4:02d}" for i in range(4)}
    ranks = {i: (i + 1) % 4 for i in range(4)}
    labels = [replace_label(label, names) for label in real_faults.labels(DATA, run)]
    start_ns = labels[0].start_ns - 20 * NS_PER_S
    records = [
        r for r in real_faults.read(DATA, run) if isinstance(r, Catalog | TopologyEvent) or r.observed_at_ns >= start_ns
    ]
    result, _ = judged(run, _renamed(records, names, ranks), labels)
    assert_in_time(result)


def replace_label(label: Label, names: dict[str, str]) -> Label:
    return Label(label.kind, tuple(names[node] for node in label.nodes), label.start_ns, label.end_ns)


# --- the adaptor ---------------------------------------------------------------------------------------------------------


def test_stream_is_in_order_of_time_with_catalogues_first() -> None:
    records = real_faults.read(DATA, "sigstop")
    kinds = [type(record) for record in records]
    assert set(kinds[: kinds.count(Catalog)]) == {Catalog}
    times = [record.observed_at_ns for record in records if not isinstance(record, Catalog)]
    assert times == sorted(times)
    assert {StepReport, Tick, TopologyEvent, LogEvent} <= set(kinds)


def test_stream_betrays_no_label() -> None:
    for run in ("nan_grad", "kill9", "disk_full", "slow_loader_intermittent"):
        for record in real_faults.read(DATA, run):
            if isinstance(record, LogEvent):
                assert record.code.startswith(("worker_exit", "save_failed"))


def test_stopped_process_is_seen_in_state_t() -> None:
    start_ns = real_faults.labels(DATA, "sigstop")[0].start_ns
    states = set()
    for record in real_faults.read(DATA, "sigstop"):
        if isinstance(record, Tick) and record.node == "node2" and 0 < record.observed_at_ns - start_ns < 4 * NS_PER_S:
            states |= {values[1] for block in record.blocks if block.family == "process" for _, values in block.rows()}
    assert states == {4.0}


def test_lost_probes_have_no_round_trip() -> None:
    start_ns = real_faults.labels(DATA, "link_down")[0].start_ns
    rows = {}
    for record in real_faults.read(DATA, "link_down"):
        if (
            isinstance(record, Tick)
            and record.node == real_faults.CONTROLLER
            and record.observed_at_ns - start_ns > 3 * NS_PER_S
        ):
            rows = dict(record.blocks[0].rows())
            break
    assert math.isnan(rows["node1"][0])
    assert rows["node1"][2] == rows["node1"][3] == 4.0
    assert rows["node0"][3] == 0.0


def test_every_restart_is_a_new_attempt() -> None:
    attempts = {record.attempt for record in real_faults.read(DATA, "kill9") if isinstance(record, StepReport)}
    assert attempts == {0, 3}


def test_rows_of_one_rank_come_a_second_at_a_time() -> None:
    reports = [r for r in real_faults.read(DATA, "clean3") if isinstance(r, StepReport) and r.rank == 1]
    assert all(0 < len(report.rows) < 40 for report in reports)
    steps = [row.step for report in reports for row in report.rows]
    assert steps == sorted(set(steps))


def test_absent_recording_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nowhere\.csv: not found, expected it or nowhere\.csv\.gz"):
        real_faults.read(tmp_path, "nowhere")


def test_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    with pytest.raises(RecordingError, match="no column 'ar_wait_ms'"):
        real_faults.read(tmp_path, "odd")
