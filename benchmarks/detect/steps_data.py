"""Public step times as what a hook on those jobs would have sent: a topology event and step reports.

What the publishers do not say is chosen here and nowhere else:

* one traced rank stands for one worker on a node of its own;
* ByteDance's traced steps are a sample: they are laid one after another. Alibaba's tables hold every tenth iteration: the nine between
  take as long as the recorded one, and are not reported;
* a norm unit of Alibaba's tables counts as a millisecond;
* waiting is what is left of a step after the rank's own work (ByteDance: forward, backward, optimizer; sends, receives and reductions are
  waiting). Alibaba's workers are timed without their waiting: it is the time to the slowest worker's end, as if they met after each step.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import StepReport, StepRow, TopologyEvent

DATA = Path(__file__).resolve().parent.parent / "data"
START_NS = 1_700_000_000 * NS_PER_S
WORKERS = 10
COV_STEP_MS = 500.0

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """A job as records. `ends_ns` are the ends of its steps, `onset_ns` when its fault begins (0: not known, or from the beginning)."""

    name: str
    ranks: int
    topology: TopologyEvent
    reports: tuple[StepReport, ...]
    numbers: tuple[int, ...]
    ends_ns: tuple[int, ...]
    start_ns: int = START_NS
    onset_ns: int = 0

    @property
    def steps(self) -> int:
        return len(self.numbers)

    def step_at(self, at_ns: int) -> int:
        """How many steps had ended by then."""
        return sum(end <= at_ns + NS_PER_S for end in self.ends_ns)


@dataclass(frozen=True)
class Times:
    """Milliseconds, steps × ranks, NaN where a rank is not in the table: forward, backward, optimizer, and the whole step."""

    numbers: tuple[int, ...]
    forward: F64
    backward: F64
    optimizer: F64
    duration: F64


def known_jobs() -> Iterator[Job]:
    """Jobs whose story is known."""
    for name in ("AR", "SE", "ST"):
        yield bytedance(name)
    for number in (1, 2, 3, 4):
        yield alibaba(number)


def bytedance(name: str, folder: Path = DATA / "bytedance") -> Job:
    """One of the three production traces: AR, SE or ST."""
    times, dp = bytedance_times(name, folder)
    ranks = times.forward.shape[1]
    nodes = tuple(f"dp{rank % dp}-stage{rank // dp}" for rank in range(ranks))
    return job_of(name, times, nodes, {"dp": str(dp), "pp": str(ranks // dp), "order": "tp-cp-ep-dp-pp"})


def bytedance_times(name: str, folder: Path = DATA / "bytedance") -> tuple[Times, int]:
    """Times of a production trace, ranks numbered with the data-parallel place changing fastest, and how many such places there are."""
    import pandas as pd

    table = pd.read_parquet(folder / f"trace-{name}.parquet")
    table["end"] = table["start_ts"] + table["duration"]
    dp = int(table["dp_rank"].max()) + 1
    column = (table["stage"].astype(int) * dp + table["dp_rank"].astype(int)).rename("column")
    ranks = range(int(column.max()) + 1)
    numbers = tuple(int(step) for step in sorted(table["step"].unique()))

    def total(*kinds: str) -> F64:
        chosen = table[table["optype"].isin(kinds)]
        grid = chosen.groupby([chosen["step"], column.loc[chosen.index]])["duration"].sum().unstack("column")
        return np.asarray(grid.reindex(numbers).reindex(columns=ranks), dtype=np.float64) * 1000.0

    whole = table.groupby([table["step"], column])["end"].max().unstack("column").reindex(numbers)
    duration = np.asarray(whole.reindex(columns=ranks), dtype=np.float64) * 1000.0
    return Times(numbers, total("forward-compute"), total("backward-compute"), total("optimizer"), duration), dp


def alibaba(number: int, folder: Path = DATA / "alibaba") -> Job:
    """One of the four jobs whose workers are timed one by one."""
    with gzip.open(folder / f"job_{number}_norm.csv.gz", "rt") as file:
        rows = [(int(r["time"]), int(r["worker"]), float(r["batch_time_norm"])) for r in csv.DictReader(file)]
    numbers = tuple(sorted({time for time, _, _ in rows}))
    places = {time: row for row, time in enumerate(numbers)}
    times = np.full((len(numbers), WORKERS), np.nan)
    for time, worker, value in rows:
        times[places[time], worker] = value
    job = worker_job(f"alibaba-{number}", times, numbers)
    return job if number != 1 else replace(job, onset_ns=job.ends_ns[_last_before_jump(times[:, 6])])


def _last_before_jump(values: F64) -> int:
    """The last recorded step before a worker becomes a quarter slower than it mostly is."""
    return int(np.flatnonzero(values > 1.25 * np.nanmedian(values))[0]) - 1


def drawn_jobs(count: int = 100, seed: int = 0, folder: Path = DATA / "alibaba") -> Iterator[Job]:
    """Jobs with the published coefficients of variation and random owners of the times."""
    with gzip.open(folder / "coefficient_variation.csv.gz", "rt") as file:
        lines = list(csv.reader(file))[1:]
    for number, line in enumerate(lines[:count]):
        wanted = np.array([float(cell) for cell in line[1:] if cell], dtype=np.float64)
        times = COV_STEP_MS * with_variation(wanted, np.random.default_rng([seed, number]))
        yield worker_job(f"cov-{number}", times, tuple(range(1, len(times) + 1)))


def with_variation(wanted: F64, rng: np.random.Generator) -> F64:
    """Positive values of mean 1, steps × 10, whose coefficient of variation in each row is the wanted one.

    Rows are exponentials of normal draws, stretched until they vary as wanted: skewed when they vary much, as step times are.
    Ten positive numbers cannot vary by more than 3; rows that should are as far apart as they can be.
    """
    draws = rng.normal(size=(len(wanted), WORKERS))
    low, high = np.zeros(len(wanted)), np.full(len(wanted), 1e4)
    for _ in range(60):
        middle = (low + high) / 2
        below = _variation(_stretched(draws, middle)) < wanted
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return _stretched(draws, low)


def _stretched(draws: F64, by: F64) -> F64:
    powers = draws * by[:, None]
    values = np.exp(powers - powers.max(axis=1, keepdims=True))
    return np.asarray(np.maximum(values / values.mean(axis=1, keepdims=True), 1e-6))


def _variation(values: F64) -> F64:
    return np.asarray(values.std(axis=1) / values.mean(axis=1))


def worker_job(name: str, times: F64, numbers: tuple[int, ...]) -> Job:
    """A data-parallel job of ten workers from their own step times (steps × workers, milliseconds)."""
    nothing = np.zeros_like(times)
    longest = np.broadcast_to(np.nanmax(times, axis=1, keepdims=True), times.shape)
    nodes = tuple(f"worker{rank}" for rank in range(times.shape[1]))
    return job_of(
        name, Times(numbers, times, nothing, nothing, longest), nodes, {"dp": str(times.shape[1])}, unrecorded=True
    )


def job_of(name: str, times: Times, nodes: tuple[str, ...], layout: dict[str, str], unrecorded: bool = False) -> Job:
    """Records of a job: one report per rank and step, sent when the step ends.

    `unrecorded`: steps whose numbers are missing took place, each as long as the one before.
    """
    lengths_ns = (np.nanmax(times.duration, axis=1) * NS_PER_MS).astype(np.int64)
    gaps = (
        np.diff(times.numbers, append=times.numbers[-1] + 1) if unrecorded else np.ones(len(lengths_ns), dtype=np.int64)
    )
    starts_ns = START_NS + np.concatenate([[0], np.cumsum(gaps * lengths_ns)[:-1]])
    ends_ns = starts_ns + lengths_ns
    ranks = tuple((rank, node, "gpu0") for rank, node in enumerate(nodes))
    topology = TopologyEvent(
        entity=f"job:{name}", origin="scheduler", valid_from_ns=START_NS, ranks=ranks, attributes=layout
    )
    known = np.isfinite(times.forward)
    reports = tuple(
        StepReport(node=nodes[rank], seq=row, observed_at_ns=int(ends_ns[row]), boot_id="b", job=name, rank=int(rank), world=len(nodes),
                   rows=(_row(times, int(row), int(rank), int(starts_ns[row])),))
        for row, rank in np.argwhere(known)
    )  # fmt: skip
    return Job(name, len(nodes), topology, reports, times.numbers, tuple(int(end) for end in ends_ns))


def _row(times: Times, row: int, rank: int, start_ns: int) -> StepRow:
    forward, backward = float(times.forward[row, rank]), float(times.backward[row, rank])
    optimizer, duration = float(times.optimizer[row, rank]), float(times.duration[row, rank])
    wait = max(0.0, duration - forward - backward - optimizer)
    return StepRow(step=times.numbers[row], phase="train", started_at_ns=start_ns, duration_ms=duration, forward_ms=forward,
                   backward_ms=backward, wait_ms=wait, optimizer_ms=optimizer)  # fmt: skip
