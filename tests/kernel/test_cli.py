"""The command line: one sentence and a code for what goes wrong, and nothing imported that a command does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainwarden.cli import COMMANDS


def trainwarden(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "trainwarden.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=cwd)


def test_help_lists_every_command_without_importing_a_part() -> None:
    code = """
import sys
from trainwarden.cli import main
try:
    main(["--help"])
finally:
    print([module for module in ("numpy", "torch", "faust", "kafka", "chdb") if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.rstrip().endswith("[]")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    if name in ("run", "checkpoint"):
        pytest.skip(f"hands everything, --help too, to trainwarden-{name} (tests/hook)")
    done = trainwarden(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"trainwarden {name}" in done.stdout


def test_the_collector_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, collectors.agent\nprint([m for m in ('numpy', 'torch', 'pandas', 'faust') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("topics", "--config", "/nonexistent.toml"), "/nonexistent.toml: cannot be read"),
        (("broker", "--kind", "rabbit"), "--kind rabbit: expected tansu or kafka"),
        (("broker", "--listen", "nowhere"), "--listen nowhere: expected host:port"),
        (("demo", "--fault", "melt"), "no Fault is called 'melt': known are freeze, kill, link"),
        (("replay", "/nonexistent"), "/nonexistent: no recording"),
        (("evaluate", "/nonexistent"), "/nonexistent: no recordings with labels"),
        (("sql", "@nothing"), "no saved query is called @nothing"),
    ],
)
def test_misuse_is_one_sentence_and_code_2(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = trainwarden(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainwarden: {sentence}"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_key_is_found_by_config_check(tmp_path: Path) -> None:
    (tmp_path / "trainwarden.toml").write_text("[detectors.straggler]\nalarm_scor = 3\n")
    done = trainwarden("config", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "detectors.straggler.alarm_scor: unknown key, did you mean 'alarm_score'?" in done.stderr


def test_a_misspelt_plugin_is_found_by_config_check(tmp_path: Path) -> None:
    (tmp_path / "trainwarden.toml").write_text("[detectors.stragler]\n")
    done = trainwarden("config", "check", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'straggler'?" in done.stderr


def test_the_resolved_configuration_is_shown(tmp_path: Path) -> None:
    (tmp_path / "trainwarden.toml").write_text('cluster = "mine"\n')
    done = trainwarden("config", "show", cwd=tmp_path)
    assert '"cluster": "mine"' in done.stdout


def test_secrets_in_addresses_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "trainwarden.toml").write_text(
        '[store]\nurl = "clickhouse://me:hunter2@h:8123/x"\n[notify.oncall]\ntype = "webhook"\nurl = "https://hooks.example/T0KEN"\n'
    )
    done = trainwarden("config", "show", cwd=tmp_path)
    assert '"url": "clickhouse://me:***@h:8123/x"' in done.stdout
    assert '"url": "https://hooks.example/***"' in done.stdout
    assert "hunter2" not in done.stdout
    assert "T0KEN" not in done.stdout
