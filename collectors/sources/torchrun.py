"""How each job of this node is parallel, and which accelerator each rank uses: from the environment and the arguments of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source
from collectors.ranks import RankState
from collectors.topology.launch import parallel_attributes
from collectors.topology.processes import Launch
from trainwarden.records import Gap
from trainwarden.settings import option


class TorchrunSource(Source):
    """Reads ``/proc/<pid>/environ`` and ``cmdline`` of ranks that the hook announced; says how the job is parallel.

    The lowest rank that says how the job is parallel is believed; another rank of the job that says otherwise is a conflict.
    """

    name: ClassVar[str] = "torchrun"
    every_ticks: ClassVar[int] = 5
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.torchrun]``."""

        parallel: bool = option(True, "look for parallel sizes in the ranks' environment and arguments")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._seen: dict[str, tuple[tuple[int, int, bool], ...]] = {}

    def sample(self, now_ns: int) -> Sample:
        facts, layouts = self.context.facts, self.context.ranks.layouts()
        states = [state for states in layouts.values() for state in states]
        if not states and not self._seen:
            return Sample()
        answer = facts.processes.want(states, self.context.files, self.context.clock)
        for job, ranks in layouts.items():
            self._tell(job, ranks, now_ns)
        self._forget(set(layouts))
        reason = "hung" if answer.overdue else answer.reason if answer.reason == "permission" else ""
        return Sample(gaps=(Gap(self.name, reason),) if reason and states else ())

    def explain(self) -> str:
        states = self.context.ranks.all()
        if not states:
            return "no rank has announced itself: start the job with trainwarden-run, or import the hook"
        known = sum(self.context.facts.processes.of(state.pid) is not None for state in states)
        return f"{known} of {len(states)} ranks could be read; reading another user's process needs CAP_SYS_PTRACE and hostPID"

    def _tell(self, job: str, ranks: list[RankState], now_ns: int) -> None:
        """Once for each set of processes, and again when more of them could be read."""
        processes = self.context.facts.processes
        seen = tuple((state.rank, state.pid, processes.of(state.pid) is not None) for state in ranks)
        if self._seen.get(job) == seen:
            return
        self._seen[job] = seen
        launches = [launch for state in ranks if (launch := processes.of(state.pid)) is not None]
        world = max(rank.world for rank in ranks)
        said = [words for launch in launches if (words := _said(launch, world, self.settings.parallel))]
        board = self.context.facts.board
        board.tell(f"job:{job}", self.name, "hook", said[0] if said else {}, now_ns)
        dissent = next((words for words in said if words != said[0]), {})
        board.tell(f"job:{job}", f"{self.name}.dissent", "hook", dissent, now_ns)
        self.context.outlet.topology_changed()

    def _forget(self, jobs: set[str]) -> None:
        if not set(self._seen) <= jobs:
            self._seen = {job: seen for job, seen in self._seen.items() if job in jobs}
            self.context.facts.board.keep({f"job:{job}" for job in jobs})


def _said(launch: Launch, world: int, look: bool) -> dict[str, str]:
    environment = launch.environment
    run = {"torchrun_id": environment.get("TORCHELASTIC_RUN_ID", ""), "master": environment.get("MASTER_ADDR", "")}
    parallel = parallel_attributes(environment, launch.argv, world) if world > 0 and look else {}
    return {**{key: value for key, value in run.items() if value}, **parallel}
