"""What is asked of the simulator: the fault list, the mix, and sentences for what cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from collectors.simulated import describe
from collectors.simulated.faults import kinds
from collectors.simulated.faults.base import FaultClass
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from streams.recording import read
from trainwarden import topics
from trainwarden.bus import connect
from trainwarden.cli import main
from trainwarden.clock import NS_PER_S, SystemClock
from trainwarden.errors import UsageError
from trainwarden.records import decode

SPEC = Spec(nodes=80, seed=1)


def test_what_is_given_is_taken_and_the_rest_is_drawn() -> None:
    given, drawn = build(SPEC, "gpu_thermal@n00001/gpu3:100+60x0.25, weak_node", 600).incidents
    assert (given.start_s, given.duration_s, given.magnitude, given.target.name) == (100, 60, 0.25, "n00001/gpu3")
    low, _, high = drawn.kind.magnitude
    assert low <= drawn.magnitude <= high
    assert 60 <= drawn.start_s < 600


@pytest.mark.parametrize("seed", range(4))
def test_at_least_half_of_the_slow_incidents_of_a_mix_have_no_bad_node(seed: int) -> None:
    found = build(Spec(nodes=80, seed=seed), "mix:60", 6000).incidents
    assert len(found) == 60
    slow = [incident for incident in found if incident.kind.slows]
    assert sum(not incident.kind.bad_node for incident in slow) >= len(slow) / 2
    assert len({incident.kind.cls for incident in found}) >= 5
    times = np.array([[i.start_s, i.end_s] for i in found])
    assert any(np.sum((times[:, 0] < end) & (times[:, 1] > start)) > 1 for start, end in times), "some overlap"


def test_kinds_can_be_held_out_of_a_mix() -> None:
    out = ["weak_gpu", "spine_degraded"]
    assert not {i.kind.name for i in build(SPEC, "mix:80", 6000, out).incidents} & set(out)


@pytest.mark.parametrize(
    "spec", [Spec(nodes=2, seed=1), Spec(nodes=9, seed=2, jobs="1:ddp,1:dense"), Spec(nodes=24, seed=3, rails=1)]
)
def test_a_mix_fits_small_clusters_too(spec: Spec) -> None:
    simulator = build(spec, "mix:12", 300)
    assert len(simulator.incidents) == 12
    assert [i.at_s for i in simulator.intervals(40)][-1] == 40


def test_every_kind_can_be_drawn_on_a_cluster_that_has_everything() -> None:
    spec = Spec(nodes=80, seed=3, jobs="40:dense,8:pipeline,8:moe,4:ddp")
    found = build(spec, ",".join(kinds()), 4000).incidents
    assert {incident.kind.name for incident in found} == set(kinds())
    assert all(incident.target.jobs for incident in found)


def test_every_kind_says_what_is_right_and_whom_to_blame() -> None:
    for kind in kinds().values():
        low, usual, high = kind.magnitude
        assert low <= usual <= high
        assert kind.help
        assert kind.action
        if kind.cls is FaultClass.WORKLOAD:
            assert not kind.bad_node, f"{kind.name}: slow work is nobody's fault"


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("gpu_termal", "no fault kind is called 'gpu_termal', near are gpu_"),
        ("gpu_thermal@n99999/gpu1", "'n99999/gpu1' is no gpu, expected a name like"),
        ("gpu_thermal@n00001/gpu8", "is no gpu"),
        ("nic_down@n00001", "is no nic"),
        ("leaf_dead@leaf-009/rail1", "is no leaf"),
        ("spine_degraded@spine-99", "is no spine"),
        ("storage_slow@job-999", "is no job"),
        ("gpu_thermal:abc", "expected kind"),
        ("gpu_thermal:700", "begins at 700 s, the simulation ends at 600 s"),
        ("gpu_thermal:10+0", "lasts 0 s"),
    ],
)
def test_unreadable_faults_are_refused_in_a_sentence(faults: str, says: str) -> None:
    with pytest.raises(UsageError, match="--faults") as caught:
        build(SPEC, faults, 600)
    assert says in str(caught.value)


def test_a_kind_that_nothing_here_can_show_is_refused() -> None:
    with pytest.raises(UsageError, match="no job here can show stage_imbalance"):
        build(Spec(nodes=8, seed=1, jobs="4:ddp"), "stage_imbalance", 600)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nodes", "1", "--out", "x"], "--nodes: 1 found, expected 2 to 20000"),
        (["--rails", "3", "--out", "x"], "--rails: 3 found"),
        (["--rate", "99", "--out", "x"], "--rate: 99 found"),
        (["--seed", "-1", "--out", "x"], "--seed: -1 found"),
        (["--minutes", "0", "--out", "x"], "--minutes: 0 found"),
        (["--speed", "fast", "--out", "x"], "--speed: 'fast' found"),
        (["--speed", "2000", "--out", "x"], "--speed: '2000' found"),
        (["--jobs", "9000:dense", "--out", "x"], "--jobs: 9000 nodes needed"),
        (["--jobs", "4:cnn", "--out", "x"], "no profile is called 'cnn'"),
        (["--jobs", "dense", "--out", "x"], "expected mix or COUNTxNODES:PROFILE"),
        (["--faults", "gremlins", "--out", "x"], "no fault kind is called 'gremlins'"),
        (["--without", "gremlins", "--faults", "mix", "--out", "x"], "no fault kind is called 'gremlins'"),
        ([], "give either --out DIRECTORY or --kafka"),
        (["--out", "x", "--kafka"], "give either --out DIRECTORY or --kafka"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_the_command_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--list-faults"])
    assert ended.value.code == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
    assert listed == set(kinds())


def test_the_command_writes_a_recording_and_the_answers_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = [
        "simulate",
        "--nodes",
        "6",
        "--minutes",
        "0.5",
        "--seed",
        "2",
        "--faults",
        "gpu_thermal:5+20",
        "--jobs",
        "4:ddp",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(out)])
    assert ended.value.code == 0
    assert "30 ticks" in capsys.readouterr().out
    messages = list(read(out))
    assert len({decode(m.value).node for m in messages}) == 6
    offsets = [m.offset for m in messages if m.place == messages[0].place]
    assert offsets == list(range(len(offsets)))
    assert (tmp_path / "run.truth.json").exists()
    assert not [path for path in out.iterdir() if path.suffix != ".twr"], "no answers inside the recording"


def test_the_command_publishes_to_the_bus_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "trainwarden.toml"
    settings.write_text('[kafka]\nurl = "memory://simulated"\n')
    arguments = [
        "simulate",
        "--nodes",
        "4",
        "--minutes",
        "0.1",
        "--jobs",
        "2:ddp",
        "--kafka",
        "--speed",
        "max",
        "-c",
        str(settings),
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--truth", str(tmp_path / "answers.json")])
    assert ended.value.code == 0
    messages = connect("memory://simulated").subscriber([topics.TICKS.name]).poll(0.0)
    assert len(messages) == 4 * 6
    newest = max(decode(m.value).observed_at_ns for m in messages)
    assert abs(newest - SystemClock().now_ns()) < 60 * NS_PER_S, "live records carry the time of now"
    assert (tmp_path / "answers.json").exists()


def test_the_page_shows_the_kinds_and_columns_that_there_are() -> None:
    text = describe.PAGE.read_text(encoding="utf-8")
    assert describe.filled(text) == text, "run python -m collectors.simulated.describe"
    assert all(kind.number in describe.SOURCES for kind in kinds().values())
