"""From scores to the figures of one series: everything that needs labels happens here, after the method has gone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.detect.data import Labelled
from benchmarks.detect.isolate import Outcome
from benchmarks.detect.methods.base import F64
from benchmarks.detect.metrics import nab
from benchmarks.detect.metrics.events import event_score
from benchmarks.detect.metrics.ranges import range_score
from benchmarks.detect.metrics.spot import Spot
from benchmarks.detect.metrics.vus import period, vus_pr

RISKS = (1e-3, 1e-4)


@dataclass
class AtLine:
    """Figures at one label-free line. Delays in seconds; `nab_gain` is NAB's raw score over silence."""

    precision: float
    recall: float
    f1: float
    found: int
    events: int
    delays_s: list[float]
    false_alarms: int
    alarm_ratio: float
    nab_gain: float


@dataclass
class Record:
    """Figures of one method on one series with one seed."""

    series: str
    seed: int
    fingerprint: str
    days: float
    error: str = ""
    vus_pr: float | None = None
    width: int = 0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    thinned: int = 1
    windows: int = 0
    lines: dict[str, AtLine] = field(default_factory=dict)
    found_kinds: dict[str, list[int]] = field(default_factory=dict)


def evaluate(labelled: Labelled, seed: int, outcome: Outcome) -> Record:
    """All figures of one run."""
    series, labels = labelled.series, labelled.labels
    record = Record(series.key, seed, series.fingerprint(), series.test_days, outcome.error)
    if outcome.error:
        return record
    record.width = buffer_width(labelled)
    record.vus_pr = vus_pr(outcome.scores, labels.spans, record.width) if labels.spans else None
    record.cpu_s, record.peak_mb = round(outcome.cpu_s, 3), round(outcome.peak_bytes / 1e6, 1)
    record.thinned, record.windows = outcome.thinned, len(labels.spans)
    for risk in RISKS:
        alarms = Spot(outcome.calibration, risk).alarms(outcome.scores)
        record.lines[f"{risk:g}"] = at_line(labelled, alarms)
        if risk == RISKS[-1]:
            record.found_kinds = by_kind(labelled, alarms)
    return record


def buffer_width(labelled: Labelled) -> int:
    """VUS buffer as TSB-AD sets it: from the first column of the series it publishes (SMD: the test half; NAB: all of it)."""
    series = labelled.series
    rows = np.concatenate([series.train, series.test]) if series.set == "nab" else series.test
    return period(rows[:, 0])


def at_line(labelled: Labelled, alarms: NDArray[np.bool_]) -> AtLine:
    """Figures of given alarms."""
    spans, step_s = labelled.labels.spans, labelled.series.step_s
    ranges, events = range_score(alarms, spans), event_score(alarms, spans, step_s)
    file = nab.nab_file(len(alarms), spans)
    return AtLine(
        precision=ranges.precision,
        recall=ranges.recall,
        f1=ranges.f1,
        found=events.found,
        events=events.events,
        delays_s=list(events.delays_s),
        false_alarms=events.false_alarms,
        alarm_ratio=float(alarms.mean()),
        nab_gain=nab.gain_at(file, alarms),
    )


def by_kind(labelled: Labelled, alarms: NDArray[np.bool_]) -> dict[str, list[int]]:
    """Events found and labelled for each class of anomaly, where classes are known."""
    out: dict[str, list[int]] = {}
    for kind, (start, end) in zip(labelled.labels.kinds, labelled.labels.spans, strict=False):
        count = out.setdefault(kind, [0, 0])
        count[0] += int(alarms[start : end + 1].any())
        count[1] += 1
    return out


def on_common_scale(outcome_scores: F64, calibration: F64, calibrated: bool) -> F64:
    """Scores that one threshold can be held against on every NAB file: as they are, or in robust deviations of the calibration rows."""
    if calibrated:
        return outcome_scores
    middle = float(np.median(calibration))
    spread = 1.4826 * float(np.median(np.abs(calibration - middle))) or float(calibration.std()) or 1.0
    return (outcome_scores - middle) / spread


def as_json(record: Record) -> dict[str, object]:
    """A record as JSON types; no value is NaN."""
    return asdict(record)
