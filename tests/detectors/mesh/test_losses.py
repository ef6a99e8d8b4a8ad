"""Who loses packets: pooled probes against the usual rate, and counters of what is sent again."""

from __future__ import annotations

from math import comb
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from collectors.simulated.encode import Encoder
from collectors.simulated.run import build
from collectors.simulated.spec import Spec
from detectors.base import AlignedTick, FamilyMatrix, registry
from detectors.mesh.congestion import raised_everywhere
from detectors.mesh.links import MeshLinkDetector
from detectors.mesh.losses import Lossy, log_weight, loser, lossy_everywhere, quiet_rate
from detectors.mesh.parts import Parts, facts_of, nodes_of, parts_of
from detectors.mesh.surges import MARKED, RESENT_RDMA, RESENT_TCP, Owners, Surges
from streams.detect import Pipeline
from streams.recordings import real_faults
from streams.replay import replay_records
from streams.scoring import score
from tests.detectors.steps import perturb
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config, from_table
from trainwarden.records import Reach, TopologyEvent, Verdict, decode
from trainwarden.topology import Topology

QUIET = quiet_rate(0.0, 2000.0)
CENTRAL = [("controller", name) for name in "abcd"]
RING = [(f"n{i}", f"n{(i + step) % 12}") for i in range(12) for step in (1, 2, 3)]
TICKS, PROBES = 30, 4.0
DATA = Path(__file__).parents[2] / "recordings" / "data"


def parts(keys: list[tuple[str, str]], topology: Topology | None = None) -> Parts:
    nodes = nodes_of(keys)
    return parts_of(keys, nodes, facts_of(nodes, topology or Topology()))


def found(
    keys: list[tuple[str, str]], lost: dict[tuple[int, str, str], float], ticks: int = TICKS, least: int = 1
) -> Lossy | None:
    table = np.zeros((ticks, len(keys)))
    for (tick, prober, target), count in lost.items():
        table[tick, keys.index((prober, target))] = count
    mesh = parts(keys)
    among = np.ones(len(mesh.nodes), dtype=np.bool_)
    return loser(mesh, table, np.full(table.shape, PROBES), QUIET, among, least)


def test_no_loss_points_at_nobody() -> None:
    assert found(CENTRAL, {}) is None


def test_one_lost_probe_is_likelier_of_its_target_than_of_any_other_the_sooner_it_is() -> None:
    soon, late = (found(CENTRAL, {(3, "controller", "c"): 1.0}, ticks) for ticks in (5, 200))
    assert soon is not None
    assert late is not None
    assert soon.node == "c"
    assert soon.posterior > 0.9
    assert late.posterior < soon.posterior
    assert soon.weight < -np.log(1e-3)  # by itself, chance explains it


def test_losses_of_two_nodes_alike_are_nobodys() -> None:
    told = found(CENTRAL, {(3, "controller", "c"): 1.0, (4, "controller", "a"): 1.0})
    assert told is not None
    assert told.posterior <= 0.5


def test_a_tick_in_which_half_of_the_nodes_lose_is_the_probers() -> None:
    assert found(CENTRAL, {(3, "controller", name): 4.0 for name in "abc"}) is None


def test_the_node_in_the_middle_of_lossy_pairs_is_named_not_its_partners() -> None:
    lost = {(t, *pair): 1.0 for t, pair in zip(range(0, 30, 3), [("n4", "n5"), ("n5", "n7")] * 5, strict=True)}
    told = found(RING, lost, least=3)
    assert told is not None
    assert told.node == "n5"
    assert told.posterior > 0.99
    assert told.partners == 2
    assert told.weight > -np.log(1e-9)


def test_losses_of_one_pair_alone_are_either_ends() -> None:
    told = found(RING, {(t, "n4", "n5"): 1.0 for t in range(0, 30, 3)}, least=3)
    assert told is not None
    assert told.posterior < 0.9


def test_weight_exceeds_its_inverse_risk_no_oftener_than_that() -> None:
    """Ville: under health the weight is at least 1 / a with probability at most a. Exact, by summing over all outcomes."""
    ticks, quiet = 40, 0.004
    usual = -np.expm1(4 * np.log1p(-quiet))
    chance = [_binomial(k, ticks, usual) for k in range(ticks + 1)]
    for risk in (1e-1, 1e-2, 1e-4):
        above = sum(c for k, c in enumerate(chance) if log_weight(k, ticks, 4.0, quiet) >= -np.log(risk))
        assert above <= risk


def _binomial(k: int, n: int, p: float) -> float:
    return comb(n, k) * p**k * (1 - p) ** (n - k)


# --- counters ------------------------------------------------------------------------------------------------------------


def tick(second: int, family: str, columns: tuple[str, ...], values: list[list[float]]) -> AlignedTick:
    nodes = tuple(f"n{i}" for i in range(len(values)))
    matrix = FamilyMatrix(
        family,
        tuple((node, "x") for node in nodes),
        columns,
        np.array(values, dtype=np.float32).reshape(len(nodes), -1),
    )
    return AlignedTick(second * NS_PER_S, 1000, nodes, np.ones(len(nodes), dtype=np.bool_), {family: matrix})


def after(rows: NDArray[np.float64], family: str, column: str) -> Surges:
    surges, owners = Surges(), Owners()
    for second, row in enumerate(rows):
        surges.put(tick(second, family, (column,), [[value] for value in row]), owners)
    return surges


def bursty(seconds: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(5)
    return rng.poisson(4, (seconds, 4)) + 46.0 * (rng.random((seconds, 4)) < 0.15)


def test_bursts_of_segments_sent_again_are_usual() -> None:
    assert after(bursty(400), "host", "tcp_retrans_per_s").surging(RESENT_TCP) == {}


def test_a_node_that_goes_on_sending_again_surges_from_its_first_high_tick() -> None:
    rows = bursty(40)
    rows[36:, 3] += 400
    assert after(rows, "host", "tcp_retrans_per_s").surging(RESENT_TCP) == {"n3": 36 * NS_PER_S}


def test_nothing_surges_before_enough_is_known() -> None:
    rows = bursty(12)
    rows[8:, 3] += 400
    assert after(rows, "host", "tcp_retrans_per_s").surging(RESENT_TCP) == {}


def test_marks_that_climb_are_not_chased() -> None:
    rows = np.zeros((80, 4))
    rows[50:] = 30.0 * np.arange(30)[:, None]
    assert after(rows, "nic", "ecn_marked_per_s").share(MARKED) == 1.0


@pytest.mark.parametrize("column", ["carrier", "mtu"])
def test_a_counter_that_is_not_reported_says_nothing(column: str) -> None:
    surges = after(np.full((40, 4), 500.0), "nic", column)
    assert surges.share(MARKED) == 0.0


# --- everywhere, or below one leaf ---------------------------------------------------------------------------------------


def test_what_is_raised_below_one_large_leaf_only_is_not_the_fabric() -> None:
    topology = Topology()
    for i in range(12):
        topology.apply(TopologyEvent(entity=f"node:n{i}", origin="scheduler", valid_from_ns=1,
                                     attributes={"leaf": "big" if i < 8 else "small"}))  # fmt: skip
    mesh = parts(RING, topology)
    known = np.ones(len(RING), dtype=np.bool_)
    below = np.array([int(a[1:]) < 8 or int(b[1:]) < 8 for a, b in RING])
    assert raised_everywhere(mesh, known, known, 0.6)
    assert not raised_everywhere(mesh, below, known, 0.6)


# --- the detector --------------------------------------------------------------------------------------------------------


def simulated(faults: str, seconds: int) -> list[Verdict]:
    """What the detector says of twelve simulated nodes under one job."""
    simulator = build(Spec(nodes=12, seed=11, jobs="12:ddp"), faults, seconds)
    encoder, aligner, detector = Encoder(simulator), Pipeline(Config()).aligner, MeshLinkDetector()
    said: list[Verdict] = []
    offset, start_ns = 0, Spec().start_ns
    for interval in simulator.intervals(seconds):
        for sent in encoder.messages(interval):
            offset += 1
            aligner.add(sent.topic, 0, offset, decode(sent.value))
        frame = aligner.cut(start_ns + round((interval.at_s + 2.5) * NS_PER_S))
        said += detector.update(frame) if frame is not None else []
    return [verdict for verdict in said if not verdict.clears]


def test_a_lossy_port_that_no_job_feels_yet_is_told_and_nobody_is_taken_away() -> None:
    said = simulated("packet_loss@n00003/mlx5_3/1:50+30x0.005", 80)
    assert {(v.kind, v.entity.name) for v in said} == {("link_slow", "n00003")}
    assert said[0].reach is Reach.NOTIFY
    assert "rail 3" in said[0].text
    told = Pipeline(Config())._finish(said[0])  # what the pipeline lets it do
    assert told.reach is Reach.NOTIFY


def test_a_healthy_simulation_is_silent() -> None:
    assert simulated("none", 60) == []


def everywhere(keys: list[tuple[str, str]], lost: dict[tuple[int, str, str], float]) -> int | None:
    table = np.zeros((TICKS, len(keys)))
    for (tick, prober, target), count in lost.items():
        table[tick, keys.index((prober, target))] = count
    return lossy_everywhere(parts(keys), table, np.full(table.shape, PROBES), 1e-4, share=0.6, risk=1e-4)


def test_losses_to_nodes_everywhere_are_the_fabrics() -> None:
    assert everywhere(CENTRAL, {(tick, "controller", "abcd"[tick % 4]): 1.0 for tick in range(5, 15)}) == 5
    assert everywhere(RING, {(tick, *RING[5 * tick % 36]): 1.0 for tick in range(20)}) == 0


def test_losses_of_one_node_in_one_moment_or_by_chance_are_not() -> None:
    one = {(tick, "controller", "b"): 1.0 for tick in range(20)}
    assert everywhere(CENTRAL, one) is None
    assert everywhere(CENTRAL, one | {(3, "controller", "a"): 1.0, (9, "controller", "c"): 1.0}) is None, (
        "chance loses two"
    )
    assert everywhere(CENTRAL, {(tick, "controller", name): 1.0 for tick in (4, 5) for name in "abcd"}) is None, (
        "the prober slept"
    )
    of_n3 = {(tick, *RING[number]): 1.0 for tick in range(20) for number, ends in enumerate(RING) if "n3" in ends}
    assert everywhere(RING, of_n3) is None


# --- a fabric that loses, by what is sent again alone ----------------------------------------------------------------------


def even(factors: tuple[float, ...]) -> bool:
    """Whether four nodes that send again so many times 300 segments a second, after a healthy time, are even."""
    rows = bursty(60)
    rows[50:] += 300.0 * np.array(factors)
    surges = after(rows, "host", "tcp_retrans_per_s")
    return surges.is_even({"n0", "n1", "n2", "n3"}, RESENT_TCP, RESENT_RDMA, times=2.0)


def test_all_nodes_send_again_about_as_much_where_the_fabric_loses() -> None:
    assert even((1.0, 1.3, 0.8, 1.1))


@pytest.mark.parametrize("factors", [(3.0, 1.0, 1.0, 1.0), (0.0, 1.0, 1.0, 1.0), (0.0, 0.0, 1.0, 0.0), (0.0,) * 4])
def test_one_node_that_loses_what_it_gets_or_sends_is_no_fabric(factors: tuple[float, ...]) -> None:
    assert not even(factors)


def test_a_lossy_fabric_is_named_before_probes_are_lost(tmp_path: Path) -> None:
    """The recorded one, with every probe answered."""
    found = perturb.load(DATA, "fabric_loss")
    for row in found.nodes:
        row["probe_ms"] = "0.15" if float(row["probe_ms"]) < 0 else row["probe_ms"]
    perturb.save(found, tmp_path, "fabric_loss")
    only = {name: {"enabled": False} for name in registry().all() if name != "mesh_links"}
    incidents = replay_records(real_faults.read(tmp_path, "fabric_loss"), from_table({"detectors": only})).newest()
    assert [incident.kind for incident in incidents] == ["fabric_slow"]
    fault = score("fabric_loss", incidents, real_faults.labels(tmp_path, "fabric_loss"), frozenset({"fabric_slow"}))
    assert fault.right
    assert fault.found[0].delay_s < 8.0
