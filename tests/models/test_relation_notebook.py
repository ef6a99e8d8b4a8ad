"""The notebook that walks one incident, cell by cell: it names the sick node and nobody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "relation.ipynb"


def test_the_notebook_names_the_sick_node(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the notebooks extra is not installed").use("Agg")
    space: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    assert f"named: ['{space['SICK']}'] sick: {space['SICK']}" in capsys.readouterr().out
    assert all(p.probability > 0.5 for _, p in space["answers"])
