"""The operator's table of nodes: rack, leaf, spine, rail, power and cooling. Believed before everything that is found out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from collectors.base import Context, Sample, Source
from collectors.topology.background import Answer, read_text
from collectors.topology.inventory import attributes_of
from trainwarden.records import Gap, LogEvent
from trainwarden.settings import option

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 1024 * 1024


class InventorySource(Source):
    """Reads a CSV or TOML file (by its suffix). While the file is wrong, what was read before stands, and each tick has a gap.

    A wrong file is told once, as the log event ``inventory_malformed`` with line, what was found and what was expected.
    """

    name: ClassVar[str] = "inventory"
    inline: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.inventory]``."""

        path: Path | None = option(None, "the table: .csv, or .toml with tables [nodes.<name>]; unset: none")
        node: str = option(
            "", "name of this node in the table; default: that of the collector, then without its domain"
        )
        every_s: float = option(60.0, "how often the file is read")

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._answer: Answer[dict[str, str]] = Answer("inventory", context.clock, settings.every_s, self._read)
        self._told = 0
        self._problem = ""

    def sample(self, now_ns: int) -> Sample:
        if self.settings.path is None:
            return Sample()
        found = self._answer.refresh()
        if self._answer.count != self._told:
            self._told = self._answer.count
            self._note(found, now_ns)
        reason = "hung" if self._answer.overdue else self._answer.reason
        return Sample(gaps=(Gap(self.name, reason),) if reason else ())

    def explain(self) -> str:
        if self.settings.path is None:
            return "no table given: set collector.sources.inventory.path"
        if self._answer.problem:
            return f"{self.settings.path}: {self._answer.problem}"
        found = self._answer.last
        return (
            f"{self.settings.path} says {found}"
            if found
            else f"{self.settings.path} does not name this node ({self.context.node})"
        )

    def _note(self, found: dict[str, str] | None, now_ns: int) -> None:
        if self._answer.problem != self._problem:
            self._problem = self._answer.problem
            self._tell_problem()
        if found is not None and not self._answer.problem:
            board = self.context.facts.board
            before = board.merged("node")
            board.tell("node", self.name, "operator", found, now_ns)
            if board.merged("node") != before:
                self.context.outlet.topology_changed()

    def _tell_problem(self) -> None:
        if not self._problem:
            return
        logger.warning("inventory %s: %s", self.settings.path, self._problem)
        event = LogEvent(source=self.name, severity="warning", code="inventory_malformed",
                         line=f"inventory {self.settings.path}: {self._problem}; what was read before stands")  # fmt: skip
        self.context.outlet.log(event, urgent=False)

    def _read(self) -> dict[str, str]:
        text = read_text(str(self.settings.path), MAX_BYTES)
        toml = self.settings.path.suffix.lower() == ".toml"
        names = [self.settings.node or self.context.node, self.context.node.partition(".")[0]]
        found = [attributes_of(text, name, toml) for name in dict.fromkeys(names)]
        return next((attributes for attributes in found if attributes), {})
