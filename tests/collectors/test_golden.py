"""Captured nodes and pages as `trainwarden collect --once --root` sees them, and captured logs, against what was read and agreed.

`TRAINWARDEN_GOLDEN=write pytest tests/collectors/test_golden.py` writes the texts anew; the difference is to be read against the capture.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from tests.collectors.golden import CAPTURES, LOGS, Capture, look, told, told_of_log
from tests.collectors.kit import FIXTURES
from trainwarden.commands import collect

GOLDEN = FIXTURES / "golden"
HEAD = "# what the sources make of this capture; see tests/collectors/test_golden.py before changing it\n"
WRITE = os.environ.get("TRAINWARDEN_GOLDEN") == "write"


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.name)
def test_a_captured_node_is_seen_as_was_agreed(capture: Capture, tmp_path: Path) -> None:
    agreed(capture.name, told(look(capture, tmp_path)))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: Path(log).stem)
def test_a_captured_log_is_read_as_was_agreed(log: str) -> None:
    agreed(f"log-{Path(log).stem}", told_of_log(FIXTURES / log))


def test_every_golden_text_has_its_capture() -> None:
    names = {capture.name for capture in CAPTURES} | {f"log-{Path(log).stem}" for log in LOGS}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


def agreed(name: str, seen: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if WRITE:
        path.write_text(HEAD + seen, encoding="utf-8")
    assert HEAD + seen == path.read_text(encoding="utf-8"), f"{path}: if the new one is right, write it (see above)"


def test_the_command_sees_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`trainwarden collect --once --root`, of the captured states that need no second look."""
    [capture] = [each for each in CAPTURES if each.name == "procfs"]
    root = tmp_path / "root"
    root.mkdir()
    capture.lay(root)
    config = tmp_path / "trainwarden.toml"
    config.write_text(f'run_dir = "{tmp_path}"\n', encoding="utf-8")
    command = typer.main.get_command(collect.app)
    command.main(["--config", str(config), "--root", str(root), "--once", "--node", "n0"], standalone_mode=False)
    families = json.loads(capsys.readouterr().out)["families"]
    assert families["nic"]["eth0"]["speed_mbps"] == 1000
    assert families["rdma"]["mlx5_0/1"]["state"] == 4
    assert families["host"]["host"]["load1"] == pytest.approx(0.02)
    assert families["host"]["host"]["mem_available_ratio"] is None


def test_every_folder_of_captures_says_where_it_is_from() -> None:
    """In a SOURCE.md of its own, or by a row in the one above."""
    rows = (FIXTURES / "SOURCE.md").read_text(encoding="utf-8")
    folders = [path for path in FIXTURES.iterdir() if path.is_dir() and path != GOLDEN]
    assert [path.name for path in folders if not (path / "SOURCE.md").exists() and f"| {path.name}/" not in rows] == []
