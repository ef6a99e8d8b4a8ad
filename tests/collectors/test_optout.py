"""Labels by which a node, or one source on it, is left alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectors import optout
from collectors.agent import build_sources, look, source_tables
from collectors.base import registry
from collectors.optout import at_start, read_labels, saved
from collectors.sources.kubernetes import KubernetesSource
from collectors.topology.kubernetes import OPT_OUT_LABEL as LABEL
from tests.collectors.kit import bench
from tests.collectors.test_kubernetes import FakeApi, source_on
from tests.collectors.test_slurm import settle
from trainwarden.clock import SimulatedClock
from trainwarden.config import Config

ALL = sorted(registry().all())


class Labelled(FakeApi):
    """An API server whose node has these labels."""

    def __init__(self, labels: dict[str, str], problem: Exception | None = None) -> None:
        super().__init__(problem)
        self.labels = labels

    def node(self, name: str) -> Any:
        document = super().node(name)
        document["metadata"]["labels"] = {**document["metadata"]["labels"], **self.labels}
        return document


def config(tmp_path: Path) -> Config:
    plain = Config()
    return replace(plain, run_dir=tmp_path, collector=replace(plain.collector, node="n0", root=tmp_path / "root"))


def begun(tmp_path: Path, api: FakeApi) -> Config:
    return at_start(config(tmp_path), api)  # type: ignore[arg-type]


def names(chosen: Config, tmp_path: Path) -> set[str]:
    sources = build_sources(source_tables(chosen, "n0", tmp_path / "hook.sock"), bench(tmp_path / "b").context)
    return {source.name for source in sources}


@pytest.mark.parametrize(
    ("labels", "off", "unknown"),
    [({}, (), ()), ({LABEL: "on"}, (), ()), ({LABEL: "off"}, tuple(n for n in ALL if n != "kubernetes"), ()),
     ({f"{LABEL}.nvidia": "off", f"{LABEL}.mesh": "on"}, ("nvidia",), ()),
     ({f"{LABEL}.kubernetes": "off", f"{LABEL}.gpu": "off"}, (), ("gpu", "kubernetes"))],
    ids=["none", "on", "all", "one", "no source"],
)  # fmt: skip
def test_labels(labels: dict[str, str], off: tuple[str, ...], unknown: tuple[str, ...]) -> None:
    found = read_labels({"kubernetes.io/os": "linux", **labels}, ALL)
    assert (found.sources, found.unknown) == (off, unknown)


def test_a_source_that_is_opted_out_of_is_never_built(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    chosen = begun(tmp_path, Labelled({f"{LABEL}.nvidia": "off", f"{LABEL}.mesh": "off"}))
    assert names(chosen, tmp_path) == set(ALL) - {"nvidia", "mesh"}


def test_a_node_that_is_left_alone_still_ticks(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    chosen = begun(tmp_path, Labelled({LABEL: "off"}))
    seen = look(chosen, SimulatedClock())
    assert [source.name for source in seen.sources] == ["kubernetes"]
    assert all(not sample.blocks for sample in seen.samples.values())


def test_when_the_api_server_is_silent_what_was_known_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    silent = Labelled({}, TimeoutError("no answer"))
    assert begun(tmp_path, silent).collector.sources["kubernetes"]["opted_out"] == []
    begun(tmp_path, Labelled({f"{LABEL}.nvidia": "off", f"{LABEL}.nvdia": "off"}))
    assert "no source: nvdia" in caplog.text
    with caplog.at_level(logging.WARNING):
        again = begun(tmp_path, silent)
    assert again.collector.sources["nvidia"] == {"enabled": False}
    assert "no answer" in caplog.text


def test_outside_of_pods_nothing_is_asked_and_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    plain = config(tmp_path)
    assert at_start(plain) is plain


def test_the_agent_ends_once_when_the_label_changes(tmp_path: Path) -> None:
    board, api, ended = bench(tmp_path), Labelled({f"{LABEL}.nvidia": "off"}), []
    source = source_on(board, api, node="gpu001", opted_out=["nvidia"])
    source.end = lambda: ended.append(1)
    source.start()
    settle(board, source)
    assert (ended, board.outlet.logs) == ([], [])
    api.labels = {LABEL: "on"}
    again(board, source)
    again(board, source)
    [(event, urgent)] = board.outlet.logs
    assert (ended, event.code, event.attributes["before"], urgent) == ([1], "opt_out", "nvidia", True)
    assert saved(board.context.state_directory) == ()


def test_a_label_that_cannot_be_read_and_a_look_for_a_person_end_nobody(tmp_path: Path) -> None:
    board, api, ended = bench(tmp_path), Labelled({}, TimeoutError()), []
    source = source_on(board, api, node="gpu001", opted_out=["nvidia"])
    source.end = lambda: ended.append(1)
    source.start()
    settle(board, source)
    api.problem = None
    looked = source_on(board, api, node="gpu001", opted_out=["nvidia"])
    looked.end = lambda: ended.append(2)
    settle(board, looked)
    assert (ended, board.outlet.logs) == ([], [])


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    optout.save(tmp_path / "file" / "below", ["mesh"])
    assert "cannot be written" in caplog.text


def again(board: Any, source: KubernetesSource) -> None:
    board.clock.advance_ns(61 * 10**9)
    settle(board, source)
