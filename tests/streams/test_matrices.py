"""What a source calls a state comes to the detectors as one, whoever else reports the family."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.series.table import NodeTables
from detectors.threshold.table import Roster
from streams.matrices import Catalogs, Names, array_head, bin_of, family_matrices, map_head, pack
from trainwarden.records import Block, Catalog, Metric, Tick


def catalog(name: str, *metrics: tuple[str, str]) -> Catalog:
    columns = tuple(Metric(metric, "1", kind, "") for metric, kind in metrics)
    return Catalog(catalog_id=name, family="gpu", source="s", metrics=columns)


def tick(node: str, layout: str, *values: float) -> Tick:
    return Tick(node=node, blocks=(Block("gpu", layout, ("gpu0",), np.array(values, dtype="<f4").tobytes()),))


def test_states_of_all_layouts_are_told_and_no_line_is_learnt_for_them() -> None:
    catalogs = Catalogs()
    catalogs.learn(catalog("a", ("temp_c", "gauge"), ("power_limit_w", "state")))
    catalogs.learn(catalog("b", ("retired_pages", "state"), ("temp_c", "gauge")))
    matrix = family_matrices([tick("n0", "a", 60, 700), tick("n1", "b", 2, 61)], catalogs)["gpu"]
    assert matrix.metrics == ("temp_c", "power_limit_w", "retired_pages")
    assert matrix.states == {"power_limit_w", "retired_pages"}
    assert matrix.column("power_limit_w")[0] == 700
    roster = Roster()
    assert roster.place(matrix).tolist() == [[60.0], [61.0]]
    assert roster.metrics == ["temp_c"]
    _, names, values = NodeTables()._part(matrix)
    assert (names, values.tolist()) == (["gpu.temp_c"], [[60.0], [61.0]])


def test_rows_are_the_same_objects_again_after_one_node_missed_a_tick() -> None:
    names = Names()
    whole = [("n0", ("gpu0", "gpu1")), ("n1", ("gpu0",)), ("n2", ("gpu0",))]
    first = names.of("gpu", whole)
    assert first == (("n0", "gpu0"), ("n0", "gpu1"), ("n1", "gpu0"), ("n2", "gpu0"))
    for missed in (1, 2, 0):
        beside = names.of("gpu", whole[:missed] + whole[missed + 1 :])
        assert beside == tuple(pair for pair in first if pair[0] != f"n{missed}")
        assert names.of("gpu", list(whole)) is first
    assert names.of("gpu", [("n0", ("gpu1",)), *whole[1:]])[0] == ("n0", "gpu1")


@pytest.mark.parametrize("size", [0, 255, 256, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("names", [1, 15, 16, 300])
def test_parts_of_a_state_are_what_packing_it_whole_gives(size: int, names: int) -> None:
    parts, payload = [map_head(names)], bytes(size)
    for number in range(names):
        parts += [pack(f"d{number}"), array_head(3), pack(number), pack("hash"), *bin_of(payload)]
    assert b"".join(parts) == pack({f"d{number}": [number, "hash", payload] for number in range(names)})
