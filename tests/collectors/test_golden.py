"""Captured nodes and pages as `trainwarden collect --once --root` sees them, and captured logs, against what was read and agreed.

`TRAINWARDEN_GOLDEN=write pytest tests/collectors/test_golden.py` writes the texts anew; the difference is to be read against the capture.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from collectors import agent
from collectors.base import Source
from tests.collectors.golden import (
    CAPTURES,
    LOGS,
    NODE,
    Capture,
    Passing,
    at_once,
    be_patient,
    look,
    pass_time,
    told,
    told_by_command,
    told_of_log,
    without_events,
)
from tests.collectors.kit import FIXTURES
from trainwarden.clock import NS_PER_S
from trainwarden.commands import collect

GOLDEN = FIXTURES / "golden"
HEAD = "# what the sources make of this capture; see tests/collectors/test_golden.py before changing it\n"
WRITE = os.environ.get("TRAINWARDEN_GOLDEN") == "write"


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.name)
def test_a_captured_node_is_seen_as_was_agreed(capture: Capture, tmp_path: Path) -> None:
    agreed(capture.name, told(look(capture, laid_out(capture, tmp_path), tmp_path)))


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


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda capture: capture.name)
def test_the_command_prints_what_was_agreed(
    capture: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainwarden collect --once --root TREE` over every captured node, while whose two looks counters rise as between ours."""
    root = laid_out(capture, tmp_path)
    config = tmp_path / "trainwarden.toml"
    tables = "".join(
        f"[collector.sources.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in capture.tables.items()
    )
    config.write_text(f'run_dir = "{tmp_path}"\n{tables}', encoding="utf-8")
    built: list[Source] = []
    build = agent.build_sources

    def kept(*given: Any) -> list[Source]:
        built.extend(be_patient(build(*given)))
        return built

    monkeypatch.setattr(agent, "build_sources", kept)
    clock = Passing(capture.start_s * NS_PER_S, lambda clock: pass_time(capture, root, built, clock))
    monkeypatch.setattr(agent, "SystemClock", lambda: clock)
    command = typer.main.get_command(collect.app)
    with at_once():
        command.main(["--config", str(config), "--root", str(root), "--once", "--node", NODE], standalone_mode=False)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"node", "observed_at_ns", "families", "topology", "gaps"}
    assert (printed["node"], printed["observed_at_ns"]) == (NODE, clock.now_ns())
    text = (GOLDEN / f"{capture.name}.txt").read_text(encoding="utf-8")
    assert told_by_command(printed) == without_events(text.removeprefix(HEAD))


def laid_out(capture: Capture, directory: Path) -> Path:
    root = directory / "root"
    root.mkdir()
    capture.lay(root)
    return root


def test_every_folder_of_captures_says_where_it_is_from() -> None:
    """In a SOURCE.md of its own, or by a row in the one above."""
    rows = (FIXTURES / "SOURCE.md").read_text(encoding="utf-8")
    folders = [path for path in FIXTURES.iterdir() if path.is_dir() and path != GOLDEN]
    assert [path.name for path in folders if not (path / "SOURCE.md").exists() and f"| {path.name}/" not in rows] == []
