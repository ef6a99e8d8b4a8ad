"""The demonstration itself: real processes, a real fault, healed. The other faults run in tests/faults and by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]


def demo(directory: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, object]]]:
    """Run `trainwarden demo` and return it with the outcome that it wrote."""
    outcome = directory / "outcome.json"
    command = [
        sys.executable,
        "-m",
        "trainwarden.cli",
        "demo",
        "--directory",
        str(directory / "demo"),
        "--json",
        str(outcome),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=280)
    return done, json.loads(outcome.read_text()) if outcome.exists() else {}


def ask(directory: Path, query: str) -> list[dict[str, str]]:
    """Ask the store of a demonstration that has ended."""
    config = directory / "demo" / "trainwarden.toml"
    command = [sys.executable, "-m", "trainwarden.cli", "sql", "--config", str(config), "--format", "json", query]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("fault", "kind", "actions"),
    [
        ("freeze", "rank_frozen", ["restart"]),
        pytest.param("xid-log", "fatal_code", ["checkpoint", "isolate", "restart"], marks=pytest.mark.faults),
        pytest.param("slow-loader", "data_slow", ["rebalance (recommended)"], marks=pytest.mark.faults),
    ],
)
def test_a_fault_is_named_and_the_job_healed(fault: str, kind: str, actions: list[str], tmp_path: Path) -> None:
    done, told = demo(tmp_path, "--fault", fault, "--seed", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["outcome"]["kind"] == kind
    assert told["outcome"]["actions"] == actions
    incidents = ask(tmp_path, f"select kind, culprit, status from incidents where kind = '{kind}'")
    assert incidents[0]["culprit"] == f"node:{told['injection']['node']}"


@pytest.mark.faults
def test_recommend_mode_does_nothing_and_says_what_it_would_do(tmp_path: Path) -> None:
    done, told = demo(tmp_path, "--fault", "xid-log", "--seed", "6", "--mode", "recommend")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["outcome"]["actions"] == [f"{verb} (recommended)" for verb in ("checkpoint", "isolate", "restart")]
    rows = ask(tmp_path, "select verb, status from actions where verb != ''")
    assert {row["status"] for row in rows} == {"recommended"}
    assert {row["verb"] for row in rows} == {"checkpoint", "isolate", "restart"}
