"""Prometheus rules: valid, and about metrics that exist and are served by the part they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from trainwarden.selfmetrics import NAMES

ROOT = Path(__file__).parents[2]
COMPONENTS = {"worker", "actions", "store", "collector"}


def rules() -> list[dict[str, Any]]:
    """Every rule of the file."""
    file = yaml.safe_load((ROOT / "compose/prometheus/alerts.yml").read_text())
    return [rule for group in file["groups"] for rule in group["rules"]]


def test_rules_speak_of_metrics_and_parts_that_exist() -> None:
    for rule in rules():
        named = set(re.findall(r"tw_\w+", rule["expr"]))
        assert named, rule["alert"]
        assert named <= NAMES, rule["alert"]
        assert set(re.findall(r'component="(\w+)"', rule["expr"])) <= COMPONENTS


def test_rules_say_what_to_do() -> None:
    for rule in rules():
        assert rule["annotations"]["summary"].endswith(".")
        page = rule["annotations"].get("runbook")
        assert page is None or (ROOT / page).exists()
