"""What a person at one node is told: `collect --once --explain`, `scan`, and the familiar names of the metrics page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from collectors.agent import Look, look
from collectors.base import Context, Sample, registry
from collectors.explain import RULES, explanations, findings, screen
from collectors.exposition import FAMILIAR, exposition
from collectors.simulated.families import FAMILIES
from tests.collectors.kit import FIXTURES, bench
from tests.collectors.test_agent import config_of
from trainwarden.clock import SimulatedClock
from trainwarden.commands import collect, scan
from trainwarden.records import Gap


class Stub:
    """A source by name, with the families of its samples."""

    def __init__(self, name: str, families: tuple[Any, ...]) -> None:
        self.name, self.families = name, families

    def explain(self) -> str:
        return ""


def seen(tmp_path: Path, rows: dict[str, dict[str, dict[str, float]]], gaps: tuple[Gap, ...] = ()) -> Look:
    """A look at a node that has these values."""
    (tmp_path / "bench").mkdir()
    context: Context = bench(tmp_path / "bench").context
    samples = {family: Sample(FAMILIES[family].block(values)) for family, values in rows.items()}
    samples["other"] = Sample(gaps=gaps)
    sources = [Stub(name, (FAMILIES[name],) if name in FAMILIES else ()) for name in samples]
    return Look("n0", 0, sources, samples, dict.fromkeys(samples, 0.1), context)  # type: ignore[arg-type]


def test_every_source_is_explained_on_a_captured_tree(tmp_path: Path) -> None:
    config = config_of(tmp_path, "n0", root=str(FIXTURES / "node"), sources={"nic": {"enabled": False}})
    told = {explained.source: explained for explained in explanations(look(config, SimulatedClock()))}
    assert set(told) == set(registry().all())
    assert [line.split() for line in told["nic"].lines()] == [["nic", "off", "switched", "off"]]
    assert told["host"].found[0].startswith("host: host (")
    assert told["steps"].gaps == ("not_started",)
    assert "listens only while the agent runs" in "\n".join(told["steps"].lines())
    assert "start the job with trainwarden-run" in told["torchrun"].text


HEALTHY = {
    "gpu": {"gpu0": {"temp_c": 60.0, "ecc_uncorrectable_count": 0.0, "row_remap_failure": 0.0, "xid_last": 0.0}},
    "host": {"host": {"mem_available_ratio": 0.5, "clock_offset_ms": 0.1}},
    "nic": {"eth0": {"carrier": 0.0, "role": 0.0}, "rail0": {"carrier": 1.0, "role": 1.0}},
}


def test_a_healthy_node_has_no_finding(tmp_path: Path) -> None:
    assert findings(seen(tmp_path, HEALTHY, (Gap("other", "not_started"), Gap("other", "missing")))) == []


@pytest.mark.parametrize(
    ("family", "device", "values", "sentence"),
    [
        (
            "gpu",
            "gpu3",
            {"row_remap_failure": 1.0},
            "row_remap_failure is 1: no spare memory rows are left: replace the GPU",
        ),
        ("gpu", "gpu3", {"temp_c": 93.5}, "temp_c is 93.5: the GPU is hot"),
        (
            "nic",
            "rail0",
            {"carrier": 0.0, "role": 1.0},
            "carrier is 0: an interface of the training network has no carrier",
        ),
        ("host", "host", {"clock_offset_ms": -80.0}, "clock_offset_ms is -80: the clock is off"),
        ("process", "rank3", {"alive": 0.0}, "alive is 0: a training process is gone"),
    ],
)
def test_what_is_wrong_is_found(
    tmp_path: Path, family: str, device: str, values: dict[str, float], sentence: str
) -> None:
    look_at = seen(tmp_path, {**HEALTHY, family: {device: values}})
    [found] = findings(look_at)
    assert (found.where, found.what.startswith(sentence)) == (f"{family} {device}", True)
    assert f"! {family} {device}: {sentence}" in screen(look_at)


def test_a_source_that_may_not_read_and_a_conflict_are_findings(tmp_path: Path) -> None:
    look_at = seen(tmp_path, {}, (Gap("other", "permission"), Gap("other", "permission")))
    board = look_at.context.facts.board
    board.tell("node", "inventory", "operator", {"leaf": "a"}, 1)
    board.tell("node", "fabric", "discovered", {"leaf": "b"}, 1)
    assert [found.where for found in findings(look_at)] == ["source other", "topology"]


def test_rules_and_familiar_names_stand_on_columns_that_exist() -> None:
    known = {family.name: {metric.name for metric in family.metrics} for family in FAMILIES.values()}
    for source in registry().all().values():
        for family in source.families:
            known.setdefault(family.name, set()).update(metric.name for metric in family.metrics)
    assert [(rule.family, rule.column) for rule in RULES if rule.column not in known[rule.family]] == []
    assert [key for key in FAMILIAR if key[1] not in known[key[0]]] == []


def test_the_page_is_prometheus_text_with_familiar_names_and_units() -> None:
    rows = {
        "gpu": {"gpu0": {"gpu_util_ratio": 0.5, "temp_c": 61.25, "power_w": math.nan}},
        "nic": {'et"h\\0': {"speed_mbps": 400_000.0}},
    }
    blocks = [block for family, values in rows.items() for block in FAMILIES[family].block(values)]
    page = exposition("n0", blocks, FAMILIES)
    assert 'DCGM_FI_DEV_GPU_UTIL{gpu="0",Hostname="n0"} 50\n' in page
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0",Hostname="n0"} 61.25\n' in page
    assert 'node_network_speed_bytes{device="et\\"h\\\\0"} 5e+10\n' in page
    assert "power_w" not in page
    form = re.compile(r'[a-zA-Z_][a-zA-Z0-9_]*\{(?:[a-zA-Z_]+="(?:[^"\\]|\\.)*",?)+\} [-+0-9.e]+|\S+ (?:NaN|[+-]Inf)')
    assert all(form.fullmatch(line) for line in page.splitlines())


# --- the commands -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "t.toml"
    path.write_text(
        f'run_dir = "{tmp_path}/run"\n[kafka]\nurl = "memory://control"\n[collector]\ninterval_ms = 10\nroot = "{FIXTURES}/node"\n'
    )
    return str(path)


def test_scan_ends_with_one_when_something_looks_wrong(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    fine = runner.invoke(scan.app, ["-c", config])
    assert fine.exit_code == 0, fine.output
    assert "host: host" in fine.output
    assert fine.output.endswith("nothing looks wrong\n")
    monkeypatch.setattr("collectors.explain.RULES", (RULES[0].__class__("host", "load1", lambda *_: True, "busy"),))
    wrong = runner.invoke(scan.app, ["-c", config])
    assert wrong.exit_code == 1
    assert "! host host: load1 is 0.02: busy" in wrong.output


def test_explain_prints_every_source_and_needs_once(config: str) -> None:
    runner = CliRunner()
    told = runner.invoke(collect.app, ["-c", config, "--once", "--explain"])
    assert told.exit_code == 0, told.output
    assert all(any(line.startswith(name) for line in told.output.splitlines()) for name in registry().all())
    refused = runner.invoke(collect.app, ["-c", config, "--explain"])
    assert "give --once too" in str(refused.exception)


def test_tell_publishes_a_checked_order_and_refuses_a_wrong_one(config: str) -> None:
    from trainwarden import topics
    from trainwarden.bus.memory import MemoryBus
    from trainwarden.records import CollectorOrder, decode

    runner = CliRunner()
    wrong = runner.invoke(collect.app, ["-c", config, "--tell", "interval_ms=9h", "--nodes", "*"])
    assert "expected whole milliseconds" in str(wrong.exception)
    told = runner.invoke(
        collect.app, ["-c", config, "--tell", "interval_ms=5s", "--nodes", "rack=r7", "--ttl", "1h", "--author", "bob"]
    )
    assert told.exit_code == 0, told.output
    assert told.output.startswith("interval_ms = 5s for rack=r7 until ")
    [order] = [
        decode(message.value) for log in MemoryBus.named("control").partitions(topics.CONTROL.name) for message in log
    ]
    assert isinstance(order, CollectorOrder)
    assert (order.author, order.expires_at_ns - order.observed_at_ns) == ("bob", 3600 * 10**9)
