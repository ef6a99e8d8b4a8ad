"""The labelled sets load as published, splits neither overlap nor leave anything out, and a missing file is said, not skipped."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detect import data

ANOMALOUS_ROWS = {"machine-1-6": 3708, "machine-2-8": 161}


@pytest.mark.parametrize("machine", sorted(ANOMALOUS_ROWS))
def test_smd_has_the_publishers_rows_and_labels(machine: str) -> None:
    got = data.load("smd", machine)
    assert got.series.train.shape[1] == got.series.test.shape[1] == 38
    assert int(got.labels.flags().sum()) == ANOMALOUS_ROWS[machine]
    assert 0.0 <= got.series.test.min() <= got.series.test.max() <= 1.0
    assert got.series.test_days == pytest.approx(16.45, abs=0.02)


def test_asd_names_the_class_of_every_anomaly() -> None:
    got = data.load("asd", "omi-1")
    assert (got.series.train.shape, got.series.test.shape) == ((8640, 19), (4320, 19))
    assert len(got.labels.kinds) == len(got.labels.spans)
    assert set(got.labels.kinds) == {"metric", "temporal", "metric-temporal"}


def test_nab_trains_on_the_probation_and_has_all_windows_after_it() -> None:
    corpus = [data.load("nab", name) for name in data.names("nab")]
    assert len(corpus) == 58
    assert sum(len(one.series.train) + len(one.series.test) for one in corpus) == 365_558
    assert sum(len(one.labels.spans) for one in corpus) == 116
    assert all(start >= 0 for one in corpus for start, _ in one.labels.spans)
    assert max(len(one.series.train) for one in corpus) == 750


@pytest.mark.parametrize(("set_name", "tune", "test"), [("smd", 2, 6), ("asd", 4, 8), ("nab", 7, 51)])
def test_splits_are_disjoint_and_whole(set_name: str, tune: int, test: int) -> None:
    first, second = data.split_names(set_name, "tune"), data.split_names(set_name, "test")
    assert (len(first), len(second)) == (tune, test)
    assert sorted(first + second) == sorted(data.names(set_name))


def test_alibaba_and_bytedance_load() -> None:
    jobs = data.alibaba_cov()
    assert len(jobs) == 100
    assert max(len(one) for one in jobs.values()) == 2000
    assert data.alibaba_steps(1).shape == (300, 10)
    trace = data.bytedance_trace("ST")
    assert {len(column) for column in trace.values()} == {6784}
    assert data.bytedance_meta("AR")["pp_size"] == 4


def test_spans_include_both_ends() -> None:
    assert data.spans_of(np.array([1, 1, 0, 0, 1], bool)) == ((0, 1), (4, 4))
    assert data.Labels(5, ((0, 1), (4, 4))).flags().tolist() == [True, True, False, False, True]


def test_a_missing_file_is_one_sentence_with_its_path(tmp_path: Path) -> None:
    shutil.copytree(data.DATA / "asd", tmp_path / "asd")
    (tmp_path / "asd" / "omi-2_train.csv.gz").unlink()
    with pytest.raises(data.DataError, match=r"omi-2_train\.csv\.gz is missing: give the folder"):
        data.load("asd", "omi-2", tmp_path)
    with pytest.raises(data.DataError, match=r"no machine-\*_test.csv.gz"):
        data.names("smd", tmp_path)


def test_labels_of_another_length_are_refused(tmp_path: Path) -> None:
    shutil.copytree(data.DATA / "asd", tmp_path / "asd")
    with gzip.open(tmp_path / "asd" / "omi-3_test_label.csv.gz", "wt") as lines:
        lines.write("0\n1\n")
    with pytest.raises(data.DataError, match="2 labels do not fit"):
        data.load("asd", "omi-3", tmp_path)


def test_unknown_names_are_said() -> None:
    with pytest.raises(data.DataError, match="no set is called 'swat': known are smd, asd, nab"):
        data.names("swat")
    with pytest.raises(data.DataError, match="NAB has no file 'x'"):
        data.load("nab", "x")
    with pytest.raises(data.DataError, match="no split is called 'dev'"):
        data.split_names("asd", "dev")
