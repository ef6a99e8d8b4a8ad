"""Recorded faults in other circumstances: culprit, class and delay must not depend on node, onset, speed or a few lost rows.

Only the detectors that read steps, processes, probes and codes take part: what others add to an incident is tested where they are.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from detectors.base import registry
from streams.recordings import real_faults
from streams.replay import replay_records
from streams.scoring import Score, score
from tests.detectors.steps import perturb
from trainwarden.config import Config, from_table

DATA = Path(__file__).parents[2] / "recordings" / "data"
FAMILIES = ("detectors.steps.", "detectors.mesh.", "detectors.rules.")
FOUND = registry().all()
OTHERS = {name: {"enabled": False} for name, kind in FOUND.items() if not kind.__module__.startswith(FAMILIES)}
KINDS = frozenset(kind for name, detector in FOUND.items() if name not in OTHERS for kind in detector.kinds)
CONFIG: Config = from_table({"detectors": OTHERS})
RUNS = real_faults.runs(DATA)
QUICK = ("sigstop", "kill9", "cpu_throttle", "slow_loader", "slow_loader_intermittent", "nan_grad", "clean1")
DELAY_S = {"kill9": 2.0, "sigstop": 5.0, "net_loss": 30.0}
"""Bounds of fail-stop faults, and of the one that only probes see; all others are to be named within 15 s."""


KNOWN_LATE = {
    (
        "1.5 times the time",
        "cpu_hog",
    ): "16.3 s where 15 are asked: delays go with the length of a step (docs/measured.md)"
}
"""The right node is named, and too late: a miss that is published (docs/measured.md). A case that is in time again has no place here."""


def judged(run: str, perturbation: str, folder: Path) -> Score:
    perturb.save(perturb.PERTURBATIONS[perturbation](perturb.load(DATA, run)), folder, run)
    incidents = replay_records(real_faults.read(folder, run), CONFIG).newest()
    return score(run, incidents, real_faults.labels(folder, run), KINDS)


def assert_right(found: Score, known_late: str = "") -> None:
    assert found.right, found.line()
    late = any(fault.delay_s > DELAY_S.get(fault.kind, 15.0) for fault in found.found)
    assert late == bool(known_late), found.line()
    if late:
        pytest.xfail(known_late)


@pytest.mark.parametrize("run", QUICK)
def test_other_nodes_another_speed_an_earlier_onset_and_lost_rows_at_once(run: str, tmp_path: Path) -> None:
    assert_right(judged(run, "all at once", tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("perturbation", [name for name in perturb.PERTURBATIONS if name != "as recorded"])
def test_each_change_of_circumstances(run: str, perturbation: str, tmp_path: Path) -> None:
    assert_right(judged(run, perturbation, tmp_path), KNOWN_LATE.get((perturbation, run), ""))
