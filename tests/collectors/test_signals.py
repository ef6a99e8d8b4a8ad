"""docs/signals.md against the catalogue, the table of codes, and the names that two of the peers publish themselves."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from collectors.base import registry
from detectors.rules.table import table
from tests.collectors.kit import FIXTURES

PAGE = (Path(__file__).parents[2] / "docs" / "signals.md").read_text(encoding="utf-8")
COLUMNS = 7


def rows() -> Iterator[list[str]]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == COLUMNS and cells[0] != "signal" and not cells[0].startswith("---"):
            yield cells


def ours() -> Iterator[str]:
    for cells in rows():
        for token in re.findall(r"`([^`]+)`", cells[1]):
            family, brace, rest = token.partition(".{")
            yield from (f"{family}.{name}" for name in rest.rstrip("}").split(",")) if brace else [token]


def catalogue() -> set[str]:
    families = {family.name: family for kind in registry().all().values() for family in kind.families}
    return {f"{name}.{metric.name}" for name, family in families.items() for metric in family.metrics}


def test_every_column_of_the_catalogue_is_on_the_page_and_nothing_else() -> None:
    named = {token for token in ours() if not token.startswith("code:")}
    assert named - catalogue() == set(), "no such column"
    assert catalogue() - named == set(), "missing in docs/signals.md"


def test_every_code_on_the_page_has_its_row_in_the_table_of_codes() -> None:
    known = set(table().codes())
    for token in ours():
        if token.startswith("code:"):
            code = token.removeprefix("code:")
            family = code.partition(":")[0]
            assert code in known or any(each.startswith(f"{family}:") for each in known if code.endswith(":*")), code


def test_fields_of_dcgm_exporter_are_named_as_its_own_selection_has_them() -> None:
    lines = (FIXTURES / "dcgm" / "default-counters.csv").read_text(encoding="utf-8").splitlines()
    on = {line.partition(",")[0].strip() for line in lines if line.startswith("DCGM_")}
    off = {found.group(1) for line in lines if (found := re.match(r"# (DCGM_\w+)\s*,", line))} - on
    seen = 0
    for cells in rows():
        for name, mark in re.findall(r"`(DCGM_\w+)`( off| own list)?", cells[2]):
            expected = "" if name in on else " off" if name in off else " own list"
            assert mark == expected, name
            seen += 1
    assert seen > 30


def test_metrics_of_node_exporter_are_real() -> None:
    with tarfile.open(FIXTURES / "node_exporter" / "tree.tar.gz") as archive:
        member = next(each for each in archive.getmembers() if each.name.endswith("e2e-output.txt"))
        page = archive.extractfile(member)
        assert page is not None
        real = set(re.findall(r"^# TYPE (\w+)", page.read().decode("utf-8"), re.MULTILINE))
    named = {name for cells in rows() for name in re.findall(r"`(node_\w+)`", cells[4])}
    assert len(named) > 30
    assert named - real == set()
