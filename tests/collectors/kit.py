"""What collector tests share: a context over a copied fixture tree, an outlet that keeps what it gets."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectors.base import Context, Facts, Sample, Source
from collectors.files import Files
from collectors.ranks import RankBoard
from trainwarden.clock import NS_PER_S, SimulatedClock
from trainwarden.records import LogEvent, StepRow
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_settings

FIXTURES = Path(__file__).parent.parent / "fixtures"


@dataclass
class Kept:
    """An outlet that keeps everything."""

    logs: list[tuple[LogEvent, bool]] = field(default_factory=list)
    steps: list[tuple[str, int, int, int, StepRow]] = field(default_factory=list)
    letters: list[tuple[str, str, bytes]] = field(default_factory=list)
    layout_changes: int = 0
    heard: Callable[[], None] = lambda: None

    def log(self, event: LogEvent, urgent: bool) -> None:
        self.logs.append((event, urgent))
        self.heard()

    def step(self, job: str, attempt: int, rank: int, world: int, row: StepRow) -> None:
        self.steps.append((job, attempt, rank, world, row))
        self.heard()

    def dead(self, origin: str, reason: str, payload: bytes) -> None:
        self.letters.append((origin, reason, payload))
        self.heard()

    def topology_changed(self) -> None:
        self.layout_changes += 1

    @property
    def codes(self) -> list[str]:
        return [event.code for event, _ in self.logs]


@dataclass
class Bench:
    """A source on a bench: its clock, root tree and outlet."""

    clock: SimulatedClock
    context: Context
    outlet: Kept
    root: Path

    def build(self, kind: type[Source], **settings: Any) -> Source:
        return kind(self.context, parse_settings(kind.Settings, settings, kind.name))

    def write(self, name: str, content: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        # same inode, as in /proc: descriptors stay open
        with path.open("w", encoding="utf-8") as file:
            file.write(content)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name.lstrip("/")
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} does not contain {old!r}"
        self.write(name, text.replace(old, new))

    def second(self, source: Source, seconds: float = 1.0) -> Sample:
        self.clock.advance_ns(int(seconds * NS_PER_S))
        return source.sample(self.clock.now_ns())


def bench(tmp_path: Path, tree: str | None = None) -> Bench:
    """A bench over a private copy of a fixture tree, or over an empty one."""
    root = tmp_path / "root"
    if tree:
        shutil.copytree(FIXTURES / tree, root)
    else:
        root.mkdir()
    state = tmp_path / "state"
    state.mkdir()
    clock, outlet, ranks = SimulatedClock(), Kept(), RankBoard()
    context = Context("n0", clock, Files(root, clock), ranks, outlet, Metrics("test"), state, tmp_path, Facts())
    return Bench(clock, context, outlet, root)


def values(source: Source, sample: Sample, family: str, device: str) -> dict[str, float]:
    """Present values of one device."""
    columns = next(f for f in source.families if f.name == family).metrics
    for block in sample.blocks:
        for name, row in block.rows():
            if block.family == family and name == device:
                return {m.name: v for m, v in zip(columns, row, strict=True) if not math.isnan(v)}
    raise AssertionError(f"no device {device} of family {family} in {[b.devices for b in sample.blocks]}")


def devices(sample: Sample, family: str) -> tuple[str, ...]:
    """Devices of a family, empty when there is no block."""
    return next((block.devices for block in sample.blocks if block.family == family), ())
