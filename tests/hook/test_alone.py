"""The distribution alone: what a user's environment gets, and what importing it pulls in."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import trainwarden_hook

HOOK = Path(trainwarden_hook.__file__).resolve().parent.parent


def run(code: str, folder: Path) -> str:
    """Run in an interpreter that sees the standard library, ``folder`` and the hook, nothing else of ours."""
    opening = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(HOOK)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", opening + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_lives_beside_a_users_own_models_and_actions(tmp_path: Path) -> None:
    for name in ("models", "actions", "streams"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'user'")
    told = run(
        """
import trainwarden_hook as tw
with tw.step(0) as s:
    s.report(loss=0.5)
import models, actions, streams
print(models.OWNER, actions.OWNER, streams.OWNER)
""",
        tmp_path,
    )
    assert told == "user user user\n"


def test_import_pulls_in_no_third_party_module(tmp_path: Path) -> None:
    told = run(
        """
import trainwarden_hook
trainwarden_hook.attach
foreign = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names) - {'__main__'}
print(sorted(foreign))
""",
        tmp_path,
    )
    assert told == "['trainwarden_hook']\n"


def test_import_itself_loads_next_to_nothing(tmp_path: Path) -> None:
    told = run(
        """
before = set(sys.modules)
import trainwarden_hook
print(sorted(set(sys.modules) - before))
""",
        tmp_path,
    )
    assert told == "['__future__', 'trainwarden_hook']\n"


def test_warden_and_its_gate_need_no_torch(tmp_path: Path) -> None:
    told = run("import trainwarden_hook.warden, trainwarden_hook.launcher; print('torch' in sys.modules)", tmp_path)
    assert told == "False\n"


def test_unknown_names_are_named(tmp_path: Path) -> None:
    told = run(
        """
import trainwarden_hook
try:
    trainwarden_hook.attatch
except AttributeError as error:
    print(error)
""",
        tmp_path,
    )
    assert "attatch" in told


def test_the_distribution_contains_one_package_and_needs_nothing() -> None:
    project = tomllib.loads((HOOK / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["trainwarden_hook"]
    assert project["project"]["dependencies"] == []


def test_nothing_of_the_other_packages_is_imported() -> None:
    for path in (HOOK / "trainwarden_hook").rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                root = words[1].partition(".")[0]
                assert root in {*sys.stdlib_module_names, "torch", "trainwarden_hook"}, f"{path.name}: {line}"
