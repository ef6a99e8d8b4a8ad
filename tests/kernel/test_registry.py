"""Plugins are found by being there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainwarden.demo.faults.base import Fault, registry
from trainwarden.errors import ConfigError
from trainwarden.registry import Registry


def test_the_faults_of_the_demonstration_are_found() -> None:
    assert list(registry().all()) == ["freeze", "kill", "link", "nan", "none", "slow", "slow-loader", "xid-log"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no Fault is called 'melt': known are freeze, kill"):
        registry().get("melt")


def test_two_plugins_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "twins"
    package.mkdir()
    (package / "__init__.py").touch()
    body = "from trainwarden.demo.faults.kill import Kill\nclass {}(Kill):\n    name = 'same'\n"
    (package / "a.py").write_text(body.format("A"))
    (package / "b.py").write_text(body.format("B"))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'same' is defined twice: twins\.a and twins\.b"):
        Registry("twins", Fault).all()
    for name in [name for name in sys.modules if name.startswith("twins")]:
        del sys.modules[name]
