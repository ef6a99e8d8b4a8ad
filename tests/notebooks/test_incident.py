"""The notebook, executed on a store that holds the recorded story."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.store.service import prepare
from tests.store.server import StoreProcess
from tests.store.story import FAULT_S, RESUMED_S, SAVED_EVERY, STEP_MS, fill, story

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebooks extra is not installed")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "incident.ipynb"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("notebook-store")) as process:
        yield process


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Executes the notebook against a store and gives it back with its outputs."""

    def execute(url: str) -> Any:
        monkeypatch.setenv("TRAINWARDEN_STORE_URL", url)
        monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
        return notebook

    return execute


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(notebook: Any) -> str:
    parts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]
    return "\n".join(parts)


def value(text: str, name: str) -> str:
    """The value behind a name in a printed frame."""
    return next(line.split()[-1] for line in text.splitlines() if line.startswith(name))


def test_the_story_is_told(store: StoreProcess, run: Any) -> None:
    url = store.url("trainwarden")
    client = prepare(url)
    fill(client, story(time.time_ns()))
    client.close()
    notebook = run(url)
    text = text_of(notebook)
    images = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(images) == 3
    assert "tiny-lm stands: rank 2 on n2 is frozen" in text
    assert "culprit: node:n2 (96% sure)" in text
    last = int(FAULT_S * 1000 / STEP_MS) - 1
    assert int(value(text, "steps done again")) == last % SAVED_EVERY
    assert float(value(text, "stood still [s]")) == pytest.approx(RESUMED_S - FAULT_S, abs=0.2)
    assert int(value(text, "steps not done")) == pytest.approx((RESUMED_S - FAULT_S) * 1000 / STEP_MS, abs=3)
    assert int(value(text, "last step before the fault")) == last
    assert value(text, "went on past the fault") == "True"
    for part in ("culprit named", "restart job:tiny-lm done (auto) attempt 2", "oncall: first, sent at attempt 1"):
        assert part in text


def test_without_an_incident_it_says_what_to_do(store: StoreProcess, run: Any) -> None:
    url = store.url("empty")
    prepare(url).close()
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="run `trainwarden demo` first"):
        run(url)


def test_it_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.get("execution_count") is None for cell in notebook.cells)
