"""Rows, columns and values per node, whatever a tick brings."""

from __future__ import annotations

import numpy as np

from detectors.base import FamilyMatrix
from detectors.threshold.lines import LineSettings
from detectors.threshold.places import Ages
from detectors.threshold.table import NOBODY, Owners, PerNode, Table
from streams.matrices import Names
from trainwarden.topology import JobLayout

NODES = ("n2", "n0", "n1")


def matrix(values: list[list[float]], metrics: tuple[str, ...] = ("a_ratio", "b_bytes")) -> FamilyMatrix:
    entities = tuple((NODES[i // 2], f"gpu{i % 2}") for i in range(len(values)))
    return FamilyMatrix("gpu", entities, metrics, np.array(values, np.float32))


def test_names_are_the_same_objects_until_they_change_and_those_of_other_nodes_even_then() -> None:
    names = Names()
    first = names.of("gpu", [("n0", ("gpu0", "gpu1")), ("n1", ("gpu0",))])
    assert first == (("n0", "gpu0"), ("n0", "gpu1"), ("n1", "gpu0"))
    assert names.of("gpu", [("n0", ("gpu0", "gpu1")), ("n1", ("gpu0",))]) is first
    second = names.of("gpu", [("n0", ("gpu0", "gpu1")), ("n1", ("gpu0", "gpu1"))])
    assert second == (*first, ("n1", "gpu1"))
    assert second[0] is first[0]
    assert names.of("nic", [("n0", ("gpu0",))]) == (("n0", "gpu0"),)
    assert names.of("gpu", []) == ()


def test_values_per_node_are_the_highest_and_the_last_of_its_rows() -> None:
    rows, owners = matrix([[1, 0], [3, 0], [5, 0], [2, 0], [0, 0], [9, 0]]), Owners()
    highest, last = owners.highest(rows, rows.column("a_ratio")), owners.last(rows, rows.column("a_ratio"))
    assert {name: highest.values[i] for name, i in highest.names.items()} == {"n2": 3, "n0": 5, "n1": 9}
    assert {name: last.values[i] for name, i in last.names.items()} == {"n2": 3, "n0": 2, "n1": 9}
    fewer = matrix([[7, 0], [1, 0]])
    assert owners.highest(fewer, fewer.column("a_ratio")).values.tolist() == [7]


def test_rows_get_the_value_of_their_node_or_what_stands_for_none() -> None:
    table = Table("gpu", LineSettings())
    table.place(matrix([[0, 0]] * 6))
    first = PerNode({"n0": 0, "n1": 1}, np.array([4.0, 5.0], np.float32))
    by_node = dict(zip((node for node, _ in table.roster.entities), table.per_row(first, -1.0).tolist(), strict=True))
    assert by_node == {"n0": 4.0, "n1": 5.0, "n2": -1.0}
    assert table.per_row(PerNode({"n2": 0}, np.array([3.0], np.float32)), -1.0).tolist() == [-1.0] * 4 + [3.0] * 2
    assert np.isnan(table.per_row(NOBODY, np.nan)).all()


def test_only_rates_sizes_and_times_are_compared_by_their_logarithm() -> None:
    table = Table("gpu", LineSettings())
    grid = table.place(matrix([[0.5, -8.0], [np.nan, 1e9], [np.inf, np.nan]]))
    expected = np.column_stack((grid[:, 0], np.copysign(np.log(np.abs(grid[:, 1]) + np.float32(1)), grid[:, 1])))
    assert np.array_equal(table.transform(grid), expected, equal_nan=True)


def test_ages_answer_as_the_counts_do() -> None:
    rng, ages, times = np.random.default_rng(3), Ages(), np.zeros((4, 5), np.float32)
    for _ in range(60):
        for number in (1.0, 7.0, 30.0):
            assert ages.reached(("seen", 0, 0), times, number) == bool(times.min() >= number)
        times = np.minimum(times + (rng.random(times.shape) < 0.9), np.float32(40.0))
        ages.tick += 1


def test_ranks_of_a_node_are_in_order() -> None:
    layout = JobLayout("j", 0, {3: ("b", "gpu1"), 0: ("b", "gpu0"), 1: ("a", "gpu0")})
    assert layout.nodes == ("b", "a")
    assert (layout.ranks_on("b"), layout.ranks_on("c")) == ((0, 3), ())
