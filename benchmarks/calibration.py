"""How sure verdicts are against how often they are right, on recordings with real faults and known answers.

    python -m benchmarks.calibration [DIR] [--json FILE]

An opinion counts once however often it is restated. It is right when it names a guilty node (or nobody, where the fault is a shared part)
within the time of the fault, and, for opinions that could act, by a right name. Victims of a fault named beside the culprit are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from detectors.risk import ReliabilityBin, brier, calibration_error, reliability
from streams.causes import node_of
from streams.recordings import real_faults
from streams.recordings.real_faults import Label
from streams.replay import replay_records
from streams.scoring import EARLY_NS, GRACE_NS, RIGHT_KINDS
from trainwarden.config import Config
from trainwarden.policy import reach_at_least
from trainwarden.records import Reach, Verdict

RECORDINGS = Path(__file__).parent.parent / "tests" / "recordings" / "data"


@dataclass(frozen=True)
class Opinion:
    """One distinct opinion and whether it was right."""

    detector: str
    kind: str
    confidence: float
    right: bool


def opinions(verdicts: Iterable[Verdict], labels: Sequence[Label]) -> list[Opinion]:
    """Distinct opinions, each with the confidence of its first saying."""
    first: dict[tuple[str, str, str, int], Verdict] = {}
    for verdict in verdicts:
        if not verdict.clears:
            first.setdefault((verdict.detector, verdict.kind, str(verdict.entity), verdict.onset_at_ns), verdict)
    return [Opinion(v.detector, v.kind, v.confidence, any(fits(v, label) for label in labels)) for v in first.values()]


def fits(verdict: Verdict, label: Label) -> bool:
    """Whether a verdict says what a label knows."""
    in_time = label.start_ns - EARLY_NS <= verdict.window_end_ns <= label.end_ns + GRACE_NS
    node = node_of(verdict.entity)
    place = node in label.nodes if node else not label.nodes or not reach_at_least(verdict.reach, Reach.ACT)
    kinds = RIGHT_KINDS.get(label.kind)
    named = kinds is None or verdict.kind in kinds or not reach_at_least(verdict.reach, Reach.ACT)
    return in_time and place and named


def of_folder(folder: Path) -> list[Opinion]:
    """Opinions on all recordings of a folder.

    Raises
    ------
    FileNotFoundError
        The folder is not there.
    """
    found: list[Opinion] = []
    for run in real_faults.runs(folder):
        told = replay_records(real_faults.read(folder, run), Config())
        found += opinions(told.verdicts, real_faults.labels(folder, run))
    return found


def table(found: Sequence[Opinion]) -> str:
    """Reliability of all opinions, then each detector's in one line."""
    rows = _bins(found)
    lines = [f"{'confidence':>12} {'opinions':>9} {'said':>6} {'right':>6}  95 % interval"]
    lines += [
        f"{b.low:5.1f} - {b.high:4.1f} {b.count:9d} {b.confidence:6.2f} {b.right:6.2f}  {b.right_low:.2f} - {b.right_high:.2f}"
        for b in rows
    ]
    lines.append(
        f"all: {len(found)} opinions, Brier {brier(*_split(found)):.3f}, calibration error {calibration_error(rows):.3f}"
    )
    for name in sorted({(o.detector, o.kind) for o in found}):
        own = [o for o in found if (o.detector, o.kind) == name]
        sure, right = _split(own)
        lines.append(
            f"  {name[0]:18} {name[1]:18} {len(own):4d}  said {sum(sure) / len(own):.2f}  right {sum(right) / len(own):.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=RECORDINGS)
    parser.add_argument("--json", type=Path, default=None, help="write the result here too")
    chosen = parser.parse_args()
    found = of_folder(chosen.folder)
    print(table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(row) for row in _bins(found)], indent=1) + "\n", encoding="utf-8")
    return 0


def _split(found: Sequence[Opinion]) -> tuple[list[float], list[bool]]:
    return [o.confidence for o in found], [o.right for o in found]


def _bins(found: Sequence[Opinion]) -> list[ReliabilityBin]:
    return reliability(*_split(found), bins=10)


if __name__ == "__main__":
    sys.exit(main())
