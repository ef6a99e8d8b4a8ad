"""What jobs and machines say: exits, goodbyes, harmless lines, and the lines of faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from collectors.simulated.faults.base import FaultClass, Say, Stop
from collectors.simulated.incidents import Incident
from collectors.simulated.jobs import JobRun, Restart
from collectors.simulated.layout import Layout
from collectors.simulated.noise import Noise
from collectors.simulated.past import Past
from collectors.simulated.placement import Grid, Placement
from collectors.simulated.spec import GPUS
from collectors.simulated.state import Log
from trainwarden.records import LogEvent

BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")
HARMLESS = (
    Say("", "nfs: server store-2 OK", severity="info"),
    Say("", "perf: interrupt took too long (3129 > 3128), lowering kernel.perf_event_max_sample_rate", severity="info"),
    Say("", "systemd[1]: Starting Cleanup of Temporary Directories...", "kernel", "info"),
    Say("", "mlx5_core 0000:{bus}:00.0: Port module event: module 0, Cable plugged", severity="info"),
    Say("", "EDAC MC0: 0 CE on any memory", severity="info"),
    Say("", "WARNING: could not pin memory, falling back", "train", "warning"),
    Say("", "UserWarning: os.fork() was called. os.fork() is incompatible with multithreaded code", "train", "warning"),
    Say("xid:43", "NVRM: Xid (PCI:0000:{bus}:00): 43, pid={pid}, name=python, Ch 00000008", severity="warning"),
)
HARMLESS_PER_NODE_S = 1 / 600.0
XID_CHANCE = 1e-3
"""Share of harmless lines that are a user's own Xid 43: on a node without a job it hurts nobody."""

SAVED_BYTES = 13_000_000_000
WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={step}, OpType=ALLREDUCE, Timeout(ms)=600000)"


class Chatter:
    """Makes log events. All of one interval, in no particular order."""

    def __init__(self, layout: Layout, placement: Placement, noise: Noise, disorder: float) -> None:
        self._layout = layout
        self._placement = placement
        self._noise = noise
        self._disorder = disorder

    def harmless(self, number: int, from_s: float, to_s: float) -> Iterator[Log]:
        """Lines that mean nothing."""
        stream = self._noise.stream("chatter", number)
        count = int(stream.poisson(HARMLESS_PER_NODE_S * self._disorder * self._layout.size * (to_s - from_s)))
        for _ in range(count):
            node = int(stream.integers(self._layout.size))
            own = stream.random() < XID_CHANCE and self._placement.job_of(node) is None
            say = HARMLESS[-1] if own else HARMLESS[int(stream.integers(len(HARMLESS) - 1))]
            yield self._log(float(stream.uniform(from_s, to_s)), node, say, int(stream.integers(GPUS)))

    def of_fault(self, incident: Incident, from_s: float, to_s: float, jobs: Sequence[JobRun]) -> Iterator[Log]:
        """Lines of a fault that are due; on every node it strikes, once per struck GPU of a fault of one GPU."""
        for at_s, say in incident.says(from_s, to_s):
            for node, gpu in self._speakers(incident):
                grid = self._placement.job_of(node)
                step = jobs[grid.index].number if grid else 0
                yield self._log(at_s, node, say, gpu, incident, step)

    def _speakers(self, incident: Incident) -> list[tuple[int, int]]:
        nodes = incident.target.nodes.tolist()
        if incident.kind.cls is FaultClass.CORRUPTION or incident.target.scope in ("job", "stage"):
            nodes = nodes[:1]
        first = int(incident.target.gpus[1][0])
        return [(node, first) for node in nodes]

    def of_halt(self, run: JobRun, past: Past, from_s: float, to_s: float) -> Iterator[Log]:
        """Exits of processes that a fault kills, as their launcher reports them a second later."""
        halt, grid = past.halt, run.grid
        if halt is None:
            return
        if halt.stop is Stop.DIE and from_s <= halt.at_s + 1.0 < to_s:
            for rank in np.flatnonzero(halt.culprits).tolist():
                yield self._exit(halt.at_s + 1.0, grid, rank, halt.exit_code, past.attempt)
        if halt.leaves_s < halt.until_s and from_s <= halt.leaves_s < to_s:
            for node in range(grid.first_node, grid.first_node + grid.nodes):
                yield self._log(halt.leaves_s, node, Say("nccl_timeout", WATCHDOG, "train"), 0, step=past.number)

    def of_restart(self, run: JobRun, restart: Restart, from_s: float, to_s: float) -> Iterator[Log]:
        """The end of the other processes: told to stop, or finished by themselves."""
        if not from_s <= restart.from_s < to_s:
            return
        dead = self._already_dead(run)
        for rank in range(run.grid.world):
            if rank not in dead:
                yield self._exit(restart.from_s, run.grid, rank, 0 if restart.planned else -15, restart.attempt - 1)

    def of_step(self, run: JobRun, past: Past, fails: bool) -> Iterator[Log]:
        """What the first rank's hook says of saving and restoring."""
        took_s = past.end - past.finish
        if took_s > 0 and not fails:
            found = {"where": "disk", "stall_ms": f"{1000 * took_s:.0f}", "bytes": str(SAVED_BYTES)}
            yield self._hook(run.grid, past.end, "save_ok", past.number, found, past.attempt)
        if past.phase == "first":
            yield self._hook(run.grid, past.begin, "restored", past.number, {"where": "disk"}, past.attempt)

    @staticmethod
    def _hook(grid: Grid, at_s: float, code: str, step: int, found: dict[str, str], attempt: int) -> Log:
        attributes = {"step": str(step), "rank": "0", **found}
        event = LogEvent(
            source="hook",
            code=code,
            line=f"{code} at step {step}",
            attributes=attributes,
            job=grid.name,
            attempt=attempt,
            rank=0,
        )
        return Log(at_s, grid.first_node, event)

    @staticmethod
    def _already_dead(run: JobRun) -> set[int]:
        halt = run.recent[-1].halt if run.recent else None
        return set(np.flatnonzero(halt.culprits).tolist()) if halt and halt.stop in (Stop.DIE, Stop.VANISH) else set()

    def _exit(self, at_s: float, grid: Grid, rank: int, code: int, attempt: int) -> Log:
        attributes = {
            "rank": str(rank),
            "pid": str(_pid(rank, attempt)),
            "exit_code": str(code),
            "generation": str(attempt),
        }
        event = LogEvent(
            source="hook", severity="info" if code == 0 else "error", code=f"worker_exit:{code}",
            line=f"rank {rank} ended with code {code}", attributes=attributes, job=grid.name, attempt=attempt, rank=rank,
        )  # fmt: skip
        return Log(at_s, grid.first_node + rank // GPUS, event)

    def _log(self, at_s: float, node: int, say: Say, gpu: int, incident: Incident | None = None, step: int = 0) -> Log:
        grid = self._placement.job_of(node)
        rank = grid.rank_of(node, gpu) if grid else -1
        port = (
            self._layout.rail_devices[int(incident.target.ports[1][0])]
            if incident and len(incident.target.ports[1])
            else "mlx5_0/1"
        )
        words = {"bus": BUSES[gpu], "gpu": str(gpu), "rank": str(rank), "node": self._layout.names[node], "pid": str(_pid(rank, 0)),
                 "port": port, "step": str(step)}  # fmt: skip
        event = LogEvent(source=say.source, severity=say.severity, code=say.code, line=say.line.format(**words),
                         attributes=_attributes(say, gpu, port, words, incident is not None), job=grid.name if grid else "",
                         rank=rank if say.source == "train" else -1)  # fmt: skip
        return Log(at_s, node, event)


def _attributes(say: Say, gpu: int, port: str, words: dict[str, str], struck: bool) -> dict[str, str]:
    if say.code.startswith("xid:"):
        return {"pci": f"0000:{words['bus']}:00", "gpu": str(gpu), "pid": words["pid"]}
    if say.code in ("save_failed",):
        return {"step": words["step"], "where": "disk", "error": "Input/output error", "rank": words["rank"]}
    return {"device": port} if say.code == "link_down" and struck else {}


def _pid(rank: int, attempt: int) -> int:
    return 20_000 + 97 * attempt + max(rank, 0) % 4096
