"""Documentation that is generated is current, and runbooks say of each kind what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from detectors.base import registry
from trainwarden import vitals
from trainwarden.commands.config import configuration_page, detectors_page, metrics_page, registries
from trainwarden.policy import KINDS, FaultKind
from trainwarden.records import Verb
from trainwarden.selfmetrics import NAMES, meanings
from trainwarden.settings import describe

ROOT = Path(__file__).parents[2]
RUNBOOKS = ROOT / "docs/runbooks"
SECTIONS = (
    "## What it means",
    "## How it was concluded",
    "## What Trainwarden does",
    "## What to check by hand",
    "## What would make it wrong",
    "## Undo, and stop the automation",
)


@pytest.mark.parametrize(
    ("page", "text", "command"),
    [
        ("docs/configuration.md", configuration_page, "trainwarden config docs"),
        ("docs/metrics.md", metrics_page, "trainwarden config metrics"),
        ("docs/detectors.md", detectors_page, "trainwarden config detectors"),
    ],
)
def test_a_generated_page_is_current(page: str, text: object, command: str) -> None:
    assert callable(text)
    assert (ROOT / page).read_text() == text(), f"{page} is old: run `{command} > {page}`"


def test_every_key_has_a_meaning() -> None:
    silent = [line for line in configuration_page().splitlines() if re.search(r"\|\s*\|$", line)]
    assert not silent, f"give these keys a meaning with trainwarden.settings.option: {silent}"


def test_every_plugin_is_documented() -> None:
    keys: list[str] = []
    for table, found in registries():
        for name, plugin in found.all().items():
            describe(plugin.Settings, f"{table}.{name}", lambda key, *_: keys.append(key))
    assert len(keys) > 100
    page = configuration_page()
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_every_detector_says_how_it_works() -> None:
    rows = [row for row in detectors_page().splitlines() if row.startswith("| `")]
    assert len(rows) == len(registry().all())
    assert not [row for row in rows if row.endswith("|  |") or "| inf |" in row]


def test_every_metric_has_a_kind_and_a_meaning() -> None:
    found = {name: (kind, meaning) for name, kind, meaning in meanings()}
    assert set(found) == NAMES, "each name in MetricName needs a comment beside it and a section above it"
    assert all(kind and meaning for kind, meaning in found.values())
    assert all(name.endswith("_total") == (kind == "counter") for name, (kind, _) in found.items())


def test_every_kind_has_a_runbook_and_no_runbook_is_orphaned() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == set(KINDS), "docs/runbooks holds one page per kind of trainwarden.policy.KINDS"
    linked = set(re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text()))
    assert linked == set(KINDS), "docs/runbooks/README.md lists every kind"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_runbook_agrees_with_policy_and_detectors(kind: FaultKind) -> None:
    page = (RUNBOOKS / f"{kind.name}.md").read_text()
    assert page.startswith(f"# {kind.name}\n")
    assert _facts(kind) in page.splitlines(), (
        f"docs/runbooks/{kind.name}.md: its table should have the row {_facts(kind)}"
    )
    places = [page.find(f"\n{section}\n") for section in SECTIONS]
    assert -1 not in places
    assert places == sorted(places)
    assert f"| [{kind.name}]({kind.name}.md) | {kind.help} | {kind.reach.value} | {_verbs(kind.remedy)} |" in _index()


@pytest.mark.parametrize("kind", KINDS)
def test_settings_named_by_a_runbook_exist(kind: str) -> None:
    """Words in code that look like a setting are keys of the detector, the configuration, a column or a label of ours."""
    page = (RUNBOOKS / f"{kind}.md").read_text()
    prose = re.sub(r"```.*?```", "", page, flags=re.S)
    keys = {row.split("`")[1] for row in configuration_page().splitlines() if row.startswith("| `")}
    last_parts = {part for key in keys for part in key.split(".")}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", prose)) - set(KINDS)
    settings = {name for name in named if re.search(r"_(s|ms|steps|ticks|share|ratio|risk|score|bursts|checks)$", name)}
    assert settings <= last_parts | {"clock_offset_ms"}, f"unknown settings: {sorted(settings - last_parts)}"


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "hook/README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert not broken


def test_guarantees_name_tests_that_exist() -> None:
    page = (ROOT / "docs/guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 15
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]
    assert not missing


def _facts(kind: FaultKind) -> str:
    said_by = [name for name, detector in registry().all().items() if kind.name in detector.kinds]
    said_by += [vitals.DETECTOR] if kind.name in vitals.KINDS else []
    who = ", ".join(f"`{name}`" for name in said_by) or "nobody yet"
    return f"| {who} | {kind.severity} | {kind.reach.value} | {_verbs(kind.remedy)} | {_verbs(kind.remedy_on_recurrence)} |"


def _verbs(verbs: tuple[Verb, ...]) -> str:
    return ", ".join(verb.value for verb in verbs) or "none"


def _index() -> str:
    return (RUNBOOKS / "README.md").read_text()
