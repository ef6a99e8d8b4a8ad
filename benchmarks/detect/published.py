"""What others published on the same series: the check of our metric, and numbers for orientation."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.detect import data
from benchmarks.detect.evaluate import buffer_width
from benchmarks.detect.methods.pca_tsb import PcaTsb
from benchmarks.detect.metrics.vus import vus_pr

TOLERANCE = 0.001
TABLES = {
    "smd": ("smd_machine_to_tsbad_id.csv", "smd_machine", "multi_mergedTable_VUS-PR.csv"),
    "nab": ("nab_file_to_tsbad_id.csv", "nab_file", "uni_mergedTable_VUS-PR.csv"),
}
NAB_BOARD = {
    "ARTime": 74.9,
    "Numenta HTM": 70.1,
    "CAD OSE": 69.9,
    "earthgecko Skyline": 58.2,
    "KNN-CAD": 58.0,
    "random": 11.0,
}
"""Standard profile, whole corpus, as the NAB repository lists it."""


@dataclass(frozen=True)
class Check:
    """Our value and TSB-AD's for PCA on one machine."""

    series: str
    ours: float
    published: float

    @property
    def right(self) -> bool:
        return abs(self.ours - self.published) <= TOLERANCE


def values(set_name: str, root: Path = data.DATA) -> dict[str, dict[str, float]]:
    """VUS-PR that TSB-AD published, by our series and its detector; only series we hold."""
    ids, column, table = TABLES[set_name]
    with data.existing(root / "tsb_ad" / table).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    with data.existing(root / "tsb_ad" / ids).open(newline="") as lines:
        pairs = {row["tsb_ad_prefix"]: row[column].removesuffix(".csv") for row in csv.DictReader(lines)}
    held = set(data.names(set_name, root))
    out: dict[str, dict[str, float]] = {}
    for prefix, name in pairs.items():
        found = next((row for row in rows if row["file"].startswith(prefix + "_")), None)
        if found and name in held:
            out[name] = {key: float(cell) for key, cell in detectors(found).items()}
    return out


def detectors(row: dict[str, str]) -> dict[str, str]:
    """The cells of detectors: the columns before the series' own properties."""
    keys = list(row)
    return {key: row[key] for key in keys[1 : keys.index("ts_len")]}


def means(set_name: str, root: Path = data.DATA) -> dict[str, float]:
    """Mean published VUS-PR of each detector over the series we hold, best first."""
    table = values(set_name, root)
    average = {name: float(np.mean([row[name] for row in table.values()])) for name in next(iter(table.values()))}
    return dict(sorted(average.items(), key=lambda item: -item[1]))


def check_metric(root: Path = data.DATA) -> list[Check]:
    """PCA as TSB-AD runs it, on the machines whose values it published."""
    checks = []
    for name, row in values("smd", root).items():
        labelled = data.load("smd", name, root)
        ours = vus_pr(PcaTsb().score(labelled.series.test), labelled.labels.spans, buffer_width(labelled))
        checks.append(Check(name, ours, row["PCA"]))
    return checks
