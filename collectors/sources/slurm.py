"""Slurm: the switches above this node, and the Slurm job of each training job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source
from collectors.topology.background import Answer, output_of, read_text
from collectors.topology.slurm import Switch, job_of, node_names, parse_topology, place_in_environment, place_of
from trainwarden.records import Gap
from trainwarden.settings import option

SCONTROL = ("show", "topology")


class SlurmSource(Source):
    """Reads ``topology.conf``, else asks ``scontrol show topology``; job facts come from the environment of the ranks.

    A node without Slurm costs nothing: there is neither file nor command, and no rank has a ``SLURM_JOB_ID``. What the file says and what
    a rank's ``SLURM_TOPOLOGY_ADDR`` says are two words: where they differ, a conflict is told.
    """

    name: ClassVar[str] = "slurm"
    every_ticks: ClassVar[int] = 5
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.slurm]``."""

        topology_conf: str = option("/etc/slurm/topology.conf", "Slurm's own description of the switches")
        scontrol: str = option("scontrol", "asked where there is no topology.conf; empty: never")
        timeout_s: float = option(5.0, "scontrol is killed after so long")
        every_s: float = option(600.0, "how often the switches are read")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._answer: Answer[tuple[Switch, ...]] = Answer("slurm", context.clock, settings.every_s, self._read)
        self._told = 0
        self._present = self._has_file() or self._command() != ""
        self._environments: dict[str, Mapping[str, str]] = {}

    def sample(self, now_ns: int) -> Sample:
        self._tell_jobs(now_ns)
        if not self._present:
            return Sample()
        self._answer.refresh()
        if self._answer.count != self._told:
            self._told = self._answer.count
            self._tell_place(now_ns)
        reason = "hung" if self._answer.overdue else self._answer.reason
        return Sample(gaps=(Gap(self.name, reason),) if reason else ())

    def explain(self) -> str:
        if not self._present and not self._environments:
            return f"no Slurm here: no {self.settings.topology_conf}, no scontrol, no rank of a Slurm job"
        if self._answer.problem:
            return f"the switches cannot be read: {self._answer.problem}"
        switches = self._answer.last or ()
        place = self._place(switches)
        return f"{len(switches)} switches and blocks known; this node: {place or 'in none of them'}; jobs: {sorted(self._environments)}"

    def _has_file(self) -> bool:
        path = self.settings.topology_conf
        return bool(path) and path.rpartition("/")[2] in self.context.files.names(path.rpartition("/")[0] or "/")

    def _command(self) -> str:
        """Only on the machine's own tree: a captured one has no daemon to ask."""
        return (
            (shutil.which(self.settings.scontrol) or "") if self.settings.scontrol and self.context.files.live else ""
        )

    def _read(self) -> tuple[Switch, ...]:
        if self._has_file():
            return parse_topology(read_text(self.context.files.path(self.settings.topology_conf)))
        return parse_topology(
            output_of((self._command() or self.settings.scontrol, *SCONTROL), self.settings.timeout_s)
        )

    def _place(self, switches: tuple[Switch, ...]) -> dict[str, str]:
        environment = next(iter(self._environments.values()), {})
        places = (place_of(name, switches) for name in node_names(self.context.node, environment))
        return next((place for place in places if place), {})

    def _tell_place(self, now_ns: int) -> None:
        if self._answer.last is not None:
            self.context.facts.board.tell("node", self.name, "scheduler", self._place(self._answer.last), now_ns)
            self.context.outlet.topology_changed()

    def _tell_jobs(self, now_ns: int) -> None:
        """Facts of the jobs whose ranks carry a Slurm environment; told again only when a job or its environment changes."""
        facts = self.context.facts
        layouts = self.context.ranks.layouts()
        if not layouts and not self._environments:
            return
        facts.processes.want([s for states in layouts.values() for s in states], self.context.files, self.context.clock)
        launches = {job: facts.processes.of(states[0].pid) for job, states in layouts.items()}
        now = {
            job: launch.environment
            for job, launch in launches.items()
            if launch and "SLURM_JOB_ID" in launch.environment
        }
        if now == self._environments:
            return
        self._environments = dict(now)
        for job, environment in now.items():
            facts.board.tell(f"job:{job}", self.name, "scheduler", job_of(environment), now_ns)
            facts.board.tell("node", "slurm.environment", "scheduler", place_in_environment(environment), now_ns)
        if self._answer.last is not None:
            self._tell_place(now_ns)
        self.context.outlet.topology_changed()
