"""Configuration errors name the key, what was found and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwarden import config
from trainwarden.errors import ConfigError
from trainwarden.policy import KINDS
from trainwarden.records import Mode, Reach, Verb

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kafk": {}}, "did you mean 'kafka'"),
    ({"kafka": {"ulr": "x"}}, r"kafka\.ulr: unknown key, did you mean 'url'"),
    ({"streams": {"lateness_ms": "2x"}}, r"streams\.lateness_ms: '2x'"),
    ({"streams": {"lateness_ms": True}}, r"streams\.lateness_ms"),
    ({"collector": {"spool_bytes": "many"}}, "a size such as 64MiB"),
    ({"collector": {"probe_port": 1.5}}, "whole number"),
    ({"collector": {"peers": ["a"]}}, r"collector\.peers: found \['a'\], expected a table"),
    ({"policy": {"mode": "automatic"}}, r"policy\.mode: found 'automatic', expected one of observe, recommend"),
    ({"policy": {"verbs": {"isolat": "auto"}}}, "did you mean 'isolate'"),
    ({"policy": {"kinds": {"link_dwn": {}}}}, "did you mean 'link_down'"),
    ({"policy": {"kinds": {"link_down": {"remedy": ["reboot"]}}}}, r"policy\.kinds\.link_down\.remedy"),
    ({"policy": {"kinds": {"link_down": {"raech": "act"}}}}, "unknown key 'raech'"),
    ({"cluster": 5}, "cluster: found 5"),
    ({"collector": {"interval_ms": 0}}, r"collector\.interval_ms: found 0, expected a time above 0"),
    ({"store": {"nice": -5}}, r"store\.nice: found -5, expected 0 \(as others\) to 19"),
    ({"streams": {"cut_ms": 0}}, r"streams\.cut_ms: found 0, expected a time above 0"),
    ({"streams": {"snapshot_s": 0}}, r"streams\.snapshot_s: found 0, expected a time above 0"),
]


@pytest.mark.parametrize(("table", "sentence"), WRONG)
def test_a_wrong_table_is_one_sentence(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config.from_table(table)


def test_durations_and_sizes_are_parsed() -> None:
    loaded = config.from_table({
        "streams": {"lateness_ms": "3s", "snapshot_s": "2m"}, "collector": {"spool_bytes": "64MiB", "interval_ms": 500},
    })  # fmt: skip
    assert (loaded.streams.lateness_ms, loaded.streams.snapshot_s) == (3000, 120.0)
    assert (loaded.collector.spool_bytes, loaded.collector.interval_ms) == (64 * 2**20, 500)


def test_the_policy_takes_the_operators_overrides() -> None:
    table = {
        "mode": "auto",
        "verbs": {"isolate": "approve"},
        "kinds": {"link_slow": {"reach": "notify", "remedy": ["isolate"]}},
    }
    policy = config.from_table({"policy": table}).policy
    assert policy.mode_of("j", (Verb.RESTART,)) is Mode.AUTO
    assert policy.mode_of("j", (Verb.ISOLATE, Verb.RESTART)) is Mode.APPROVE
    assert policy.kind("link_slow").reach is Reach.NOTIFY
    assert policy.kind("link_slow").remedy == (Verb.ISOLATE,)
    assert policy.revision != config.from_table({}).policy.revision


def test_the_default_mode_only_recommends() -> None:
    assert config.from_table({}).policy.mode is Mode.RECOMMEND


def test_an_unknown_kind_never_acts() -> None:
    kind = config.from_table({}).policy.kind("from_a_newer_detector")
    assert kind.reach is Reach.CORRELATE
    assert kind.remedy == ()


def test_every_kind_that_acts_has_a_remedy() -> None:
    assert all(kind.remedy for kind in KINDS.values() if kind.reach is Reach.ACT)


@pytest.mark.parametrize(("content", "sentence"), [("a = ", "not TOML"), ("[kafka]\nulr = 1", "did you mean 'url'")])
def test_a_broken_file_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "trainwarden.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence) as caught:
        config.load(path, {})
    assert str(path) in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "no.toml", {})


def test_paths_lie_under_the_run_directory(tmp_path: Path) -> None:
    loaded = config.from_table({"run_dir": str(tmp_path)})
    assert loaded.path(None, "ledger.sqlite") == tmp_path / "ledger.sqlite"
    assert loaded.path(Path("/elsewhere/l"), "ledger.sqlite") == Path("/elsewhere/l")
