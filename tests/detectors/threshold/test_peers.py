"""What a whole job does is no news of its nodes; what one of them, or a part of the job, does is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from detectors.base import Detector, Frame
from detectors.contract import run
from detectors.synthetic import START_NS, Scene, SyntheticCluster
from detectors.threshold.dynamic import ThresholdDetector
from detectors.threshold.lines import Lines
from detectors.threshold.peers import Fellows, Groups, drifts_shared, smaller
from detectors.threshold.stale import StaleSeriesDetector
from trainwarden.clock import NS_PER_S
from trainwarden.records import TopologyEvent
from trainwarden.topology import Topology

NODES, GPUS, STOPS = 8, 2, 100


@cache
def frames(faulty: int = 0) -> list[Frame]:
    """The whole job stands for a minute; on the first `faulty` nodes GPUs are at 5 degrees meanwhile, where the others go to 35."""

    def script(second: int) -> Scene | None:
        if not STOPS <= second < STOPS + 60:
            return None
        return Scene(standing=True, gpu={(n, g, "temp_c"): 5.0 for n in range(faulty) for g in range(GPUS)})

    return SyntheticCluster(NODES, seed=6, gpus=GPUS).frames(STOPS + 100, script)


def said(detector: Detector, made: list[Frame]) -> set[str]:
    return {v.entity.name for v in run(detector, made) if not v.clears}


def frozen(nodes: int, seconds: int = 70) -> list[Frame]:
    """`nodes` of eight report the same processor share from a second on."""
    held = Scene(host={(number, "cpu_busy_ratio"): 0.613 for number in range(nodes)})
    return SyntheticCluster(NODES, seed=2).frames(80 + seconds, lambda second: held if second >= 80 else None)


def raised(nodes: int) -> list[Frame]:
    """`nodes` of eight have a disk as busy as can be."""
    busy = Scene(host={(number, "disk_busy_ratio"): 0.9 + 0.01 * number for number in range(nodes)})
    return SyntheticCluster(NODES, seed=4).frames(120, lambda second: busy if second >= 100 else None)


@pytest.mark.parametrize("kind", [ThresholdDetector, StaleSeriesDetector])
def test_a_job_that_stops_and_goes_on_is_no_news_of_its_nodes(kind: Callable[[], Detector]) -> None:
    assert said(kind(), frames()) == set()


def test_a_node_that_goes_further_than_the_job_is_named_alone() -> None:
    found = said(ThresholdDetector(), frames(faulty=1))
    assert {name for name in found if name.endswith("temp_c")} == {"n0/gpu0/gpu.temp_c", "n0/gpu1/gpu.temp_c"}
    assert {name.split("/")[0] for name in found} == {"n0"}


@pytest.mark.parametrize(("nodes", "named"), [(1, 1), (3, 3), (5, 0), (8, 0)])
def test_a_minority_of_the_job_is_named_and_a_majority_is_not(nodes: int, named: int) -> None:
    assert len(said(ThresholdDetector(), raised(nodes))) == named


@pytest.mark.parametrize(("nodes", "named"), [(1, 1), (2, 2), (3, 0), (8, 0)])
def test_what_stands_still_on_one_node_or_two_is_named_and_on_more_has_a_cause_they_share(
    nodes: int, named: int
) -> None:
    assert len(said(StaleSeriesDetector(), frozen(nodes))) == named


def test_a_node_that_stays_stuck_when_the_others_go_on_is_named() -> None:
    everybody = Scene(host={(number, "cpu_busy_ratio"): 0.613 for number in range(NODES)})
    first = Scene(host={(0, "cpu_busy_ratio"): 0.613})
    made = SyntheticCluster(NODES, seed=2).frames(
        220, lambda second: None if second < 80 else everybody if second < 110 else first
    )
    assert said(StaleSeriesDetector(), made) == {"n0/host/host.cpu_busy_ratio"}


def test_a_lone_node_is_named_though_all_its_devices_do_the_same() -> None:
    """A job of one node has nobody who could say that it is the job's doing."""
    low = Scene(gpu={(0, g, "power_w"): 5.0 + g for g in range(4)})
    made = SyntheticCluster(1, seed=6, gpus=4).frames(130, lambda second: low if second >= 100 else None)
    groups = Groups("gpu").of([("n0", f"gpu{g}") for g in range(4)], 1, {"n0": "job"})
    everything = np.ones((4, 1), np.bool_)
    assert not groups[0].moves(everything, everything).any()
    assert len(said(ThresholdDetector(), made)) <= 4


def test_half_a_job_is_no_majority_and_most_devices_of_half_the_nodes_are_none() -> None:
    entities = [(f"n{node}", f"gpu{g}") for node in range(4) for g in range(4)]
    group = Groups("gpu").of(entities, 1, {f"n{node}": "job" for node in range(4)})[0]
    known = np.ones((16, 3), np.bool_)
    part = np.zeros((16, 3), np.bool_)
    part[:8, 0] = True  # two nodes of four
    part[:9, 1] = True  # and a device of a third
    part[::2, 2] = True  # half the devices of each
    assert group.moves(part, known).tolist() == [False, True, False]


def test_a_job_that_is_placed_anew_keeps_its_nodes_and_forgets_them_after_ten_minutes() -> None:
    fellows, topology, at_ns = Fellows(), Topology(), START_NS
    place(topology, 0, {0: "n0", 1: "n1", 2: "n2"})
    assert fellows.jobs(topology, at_ns) == dict.fromkeys(("n0", "n1", "n2"), "job")
    place(topology, 1, {0: "n0"})
    assert fellows.jobs(topology, at_ns + NS_PER_S) == dict.fromkeys(("n0", "n1", "n2"), "job")
    moved = Fellows(fellows.state)
    for one in (fellows, moved):
        assert one.jobs(topology, at_ns + 602 * NS_PER_S) == {"n0": "job"}
    assert fellows.state == moved.state


def place(topology: Topology, attempt: int, nodes: dict[int, str]) -> None:
    ranks = tuple((rank, node, "gpu0") for rank, node in nodes.items())
    topology.apply(TopologyEvent(entity="job:job", origin="hook", valid_from_ns=START_NS, attempt=attempt, ranks=ranks))


def drifted(devices: list[int], nodes: int = 8, per_node: int = 4) -> tuple[int, int]:
    """Shifts of lines in all, and those that are no job's doing: from tick 400 on, these devices lie a spread higher."""
    entities = [(f"n{node}", f"port{port}") for node in range(nodes) for port in range(per_node)]
    groups, lines, rng = Groups("nic"), Lines(len(entities), 1, alike=True), np.random.default_rng(3)
    made = groups.of(entities, 1, {f"n{node}": "job" for node in range(nodes)})
    higher = np.isin(np.arange(len(entities)), devices)[:, None]
    said = news = 0
    for tick in range(500):
        values = rng.normal(5.0, 1.0, (len(entities), 1)) + 1.4 * higher * (tick >= 400)
        shifts = lines.step(values.astype(np.float32)).shifts
        shared = drifts_shared(lines, shifts, made, groups.numbers(len(entities)))
        said, news = said + len(shifts), news + int((~shared).sum())
    return said, news


def test_what_a_third_of_the_ports_do_on_most_nodes_is_the_jobs_doing_and_one_rail_is_news() -> None:
    third = [4 * node + port for node in range(8) for port in ({0}, {1, 2})[node % 2]]
    said, news = drifted(third)
    assert said >= 6
    assert news == 0
    rail = [4 * node for node in range(8)]
    said, news = drifted(rail)
    assert news == said >= 3
    said, news = drifted([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert news == said >= 6


def test_smaller_of_two_leaves_nothing_where_they_disagree() -> None:
    values = smaller(np.array([2.0, -3.0, 1.0], np.float32), np.array([1.0, -4.0, -1.0], np.float32))
    assert values.tolist() == [1.0, -3.0, 0.0]
