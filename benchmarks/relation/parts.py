"""What one seed gave, kept as a file of its own: a run that ends early has lost one seed, and the next goes on behind it.

A part belongs to the code that made it: its name holds a sum over everything that answers follow from, so that figures of two versions
are never added up.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.relation.scenarios import Scenario
from benchmarks.relation.score import Sheet
from collectors.simulated.spec import VERSION

Sheets = dict[tuple[str, int], Sheet]
ROOT = Path(__file__).resolve().parents[2]
ANSWERS_FOLLOW_FROM = (
    "detectors/relation/**/*.py", "models/relation/*.py", "benchmarks/relation/episodes.py", "benchmarks/relation/ours.py",
    "benchmarks/relation/scenarios.py", "benchmarks/relation/score.py",
)  # fmt: skip


def code_sum(model: Path, lines_of: str) -> str:
    """Sum over the code and the weights that answers follow from, and over how the floors' lines were found."""
    files = sorted(path for pattern in ANSWERS_FOLLOW_FROM for path in ROOT.glob(pattern))
    found = zlib.crc32(lines_of.encode())
    for path in (*files, model):
        found = zlib.crc32(path.read_bytes(), found)
    return f"{found:08x}"


def path_of(folder: Path, scenario: Scenario, code: str) -> Path:
    """Where the sheets of a run lie."""
    return folder / f"v{VERSION}-{scenario.name}-{code}.json"


def keep(path: Path, sheets: Sheets) -> None:
    """Write them whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps([{"size": size, "sheet": msgspec.to_builtins(s)} for (_, size), s in sheets.items()]))
    fresh.replace(path)


def kept(path: Path) -> Sheets:
    """What a run left; nothing where there was none."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    read = [(row["size"], msgspec.convert(row["sheet"], Sheet)) for row in rows]
    return {(sheet.method, size): sheet for size, sheet in read}


def add(whole: Sheets, more: Mapping[tuple[str, int], Sheet]) -> None:
    """Add the sheets of a run to those of others."""
    for (method, size), sheet in more.items():
        whole.setdefault((method, size), Sheet(method)).add(sheet)
