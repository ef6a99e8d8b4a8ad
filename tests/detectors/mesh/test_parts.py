"""What is indexed says what a search through all columns says, and rows that are remembered are those that are looked up."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.base import AlignedTick, FamilyMatrix
from detectors.mesh.parts import Parts, parts_of
from detectors.mesh.ports import Ports
from detectors.mesh.rows import Rows
from trainwarden.clock import NS_PER_S

NODES = tuple(f"n{i:02d}" for i in range(12))


def mesh(rails: bool) -> Parts:
    """Each node probes three others, over a rail of its own each where there are `rails`; the last node has no leaf."""
    peers = {a: [NODES[(i + step) % 12] for step in (1, 4, 7)] for i, a in enumerate(NODES)}
    keys = [(a, b) for a in NODES for b in peers[a]]
    over = {a: " ".join(f"{b}={number}" for number, b in enumerate(peers[a])) if rails else "" for a in NODES}
    leaf = {a: f"leaf{i // 4}" if i < 11 else "" for i, a in enumerate(NODES)}
    return parts_of(keys, NODES, tuple((leaf[a], "0", over[a]) for a in NODES))


@pytest.mark.parametrize("rails", [False, True])
def test_the_index_says_what_all_columns_say(rails: bool) -> None:
    parts, dice = mesh(rails), np.random.default_rng(1)
    for part in range(len(parts.kinds)):
        through = parts.through == part
        assert parts.passing(part).tolist() == through.any(axis=1).tolist()
        assert parts.hosts(part).tolist() == parts.host[through].tolist()
    both = np.isin(parts.through, (0, 13)).any(axis=1)
    assert parts.passing(0, 13).tolist() == both.tolist()
    assert not parts.passing().any()
    for share in (0.0, 0.2, 0.8, 1.0):
        probes = dice.random(len(parts.ends)) < share
        passed = [(parts.through[probes] == part).any(axis=1).sum() for part in range(len(parts.kinds))]
        assert parts.counts(probes).tolist() == passed
    assert [parts.names[number] for name, found in parts.shared.items() for number in found] == list(
        parts.names[len(NODES) :]
    )


def test_rows_are_looked_up_again_only_for_other_objects() -> None:
    rows, keys = Rows(), (("n0", "a"), ("n1", "a"), ("n2", "a"))
    some = (keys[2], keys[0])
    found = rows.of(some, keys)
    assert found is not None
    assert found.tolist() == [2, 0]
    assert rows.of(some, keys) is found
    more = (*keys, ("n3", "a"))
    assert rows.of((("n3", "a"),), keys) is None
    assert rows.of((("n3", "a"),), more) == [3]
    assert rows.of(tuple(list(keys)), keys) == pytest.approx(np.arange(3))


def interfaces(second: int, names: tuple[tuple[str, str], ...]) -> tuple[AlignedTick, FamilyMatrix]:
    matrix = FamilyMatrix("nic", names, ("carrier",), np.ones((len(names), 1), dtype=np.float32))
    nodes = tuple(sorted({node for node, _ in names}))
    return AlignedTick(second * NS_PER_S, 1000, nodes, np.ones(len(nodes), dtype=np.bool_), {"nic": matrix}), matrix


def test_interfaces_of_an_absent_node_are_kept_and_those_that_are_gone_are_not() -> None:
    rows, whole = Rows(), (("n0", "a"), ("n0", "b"), ("n1", "a"))
    remembered, anew = Ports(), Ports()
    steps: list[tuple[tuple[tuple[str, str], ...], dict[str, int]]] = [
        (whole, {}), (whole[:2], {"n1": 1}), (whole[:2], {"n1": 2}), (whole, {}), (whole[:2], {"n1": 1}), (whole[:2], {}), (whole[:1], {})
    ]  # fmt: skip
    kept = []
    for second, (names, absent) in enumerate(steps):
        for ports, known in ((remembered, rows), (anew, None)):
            ports.put(*interfaces(second, names), absent, 60.0, known)
        kept.append(len(remembered.keys))
        assert remembered.keys == anew.keys
        assert remembered.up_ticks.tolist() == anew.up_ticks.tolist()
    assert kept == [3, 3, 3, 3, 3, 2, 1]
