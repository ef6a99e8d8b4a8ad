"""The risk budget where incidents are opened: noise is bounded, a fault that lasts is told, facts are free."""

from __future__ import annotations

import math

import pytest

from streams.budget import FACTS, GUESSES, Budget, families_of_detectors
from streams.incidents import Correlator
from tests.streams.synthetic import START_NS, verdict
from trainwarden.clock import NS_PER_S
from trainwarden.config import RiskConfig, from_table
from trainwarden.errors import ConfigError
from trainwarden.policy import KINDS, Policy
from trainwarden.records import Entity, EntityKind, Incident, Reach, Verdict
from trainwarden.selfmetrics import Metrics

DAY_S = 86400


class Cluster:
    """A correlator with a budget, each opinion on a job of its own."""

    def __init__(self, settings: RiskConfig | None = None) -> None:
        self.metrics = Metrics("test")
        self.settings = settings or RiskConfig()
        self.correlator = self.made()
        self.told: list[Incident] = []

    def made(self) -> Correlator:
        budget = Budget(self.settings, Policy(), self.metrics)
        return Correlator("c", Policy(), metrics=self.metrics, budget=budget)

    def hear(self, at_s: float, said: Verdict) -> None:
        now_ns = START_NS + int(at_s * NS_PER_S)
        self.correlator.on_verdict(said, now_ns)
        for second in (0, 2):
            self.told += self.correlator.tick(now_ns + second * NS_PER_S)

    @property
    def opened(self) -> list[str]:
        return [incident.job for incident in self.told if incident.revision == 1]


def opinion(
    at_s: float,
    job: str,
    kind: str = "compute_slow",
    detector: str = "straggler",
    reach: Reach = Reach.ACT,
    clears: bool = False,
) -> Verdict:
    entity = Entity(EntityKind.RANK, f"{job}/1", f"node-of-{job}")
    return verdict(kind, at_s=at_s, entity=entity, job=job, detector=detector, reach=reach, clears=clears)


def test_every_detector_has_a_family_with_a_share_or_speaks_of_telemetry() -> None:
    assert set(families_of_detectors().values()) <= {
        "threshold",
        "series",
        "steps",
        "mesh",
        "rules",
        "telemetry",
        "relation",
    }


def test_noise_opens_no_more_incidents_than_burst_and_budget() -> None:
    cluster = Cluster(RiskConfig(false_incidents_per_day=8.0, burst=3.0))
    for number in range(400):
        at_s = number * 5 * DAY_S / 400
        cluster.hear(at_s, opinion(at_s, f"j{number}"))
    steps_per_day = 8.0 * 0.25
    assert len(cluster.opened) == math.floor(3 + 399 / 400 * 5 * steps_per_day) == 12
    assert cluster.metrics.value("tw_verdicts_kept_back_total", detector="straggler") == 400 - 12


def empty(cluster: Cluster, at_s: float = 0.0) -> None:
    for number in range(3):
        cluster.hear(at_s, opinion(at_s, f"noise{number}"))
    cluster.told.clear()


def test_a_fault_that_lasts_is_told_late_and_one_that_passes_is_not() -> None:
    cluster = Cluster()
    empty(cluster)
    for at_s in range(100, 500, 10):
        cluster.hear(at_s, opinion(at_s, "lasting"))
        if at_s < 200:
            cluster.hear(at_s, opinion(at_s, "passing"))
    assert cluster.opened == ["lasting"]
    [told] = [incident for incident in cluster.told if incident.revision == 1]
    assert 400 <= (told.observed_at_ns - START_NS) / NS_PER_S <= 402


def test_what_was_taken_back_begins_to_wait_anew() -> None:
    cluster = Cluster()
    empty(cluster)
    for at_s in range(100, 500, 10):
        cluster.hear(at_s, opinion(at_s, "flapping", clears=at_s % 100 == 0))
    assert cluster.opened == []


def test_after_a_long_silence_it_begins_to_wait_anew() -> None:
    cluster = Cluster()
    empty(cluster)
    cluster.hear(100, opinion(100, "j"))
    cluster.hear(1000, opinion(1000, "j"))
    assert cluster.opened == []


def test_an_ally_of_another_family_opens_it_at_once_and_one_of_its_own_does_not() -> None:
    cluster = Cluster()
    empty(cluster)
    cluster.hear(10, opinion(10, "a", kind="imbalance", detector="imbalance", reach=Reach.CORRELATE))
    cluster.hear(11, opinion(11, "a"))
    assert cluster.opened == []
    cluster.hear(50, opinion(50, "b", kind="threshold", detector="dynamic_threshold", reach=Reach.CORRELATE))
    cluster.hear(51, opinion(51, "b"))
    assert cluster.opened == ["b"]


@pytest.mark.parametrize(
    "kind", sorted(name for name, kind in KINDS.items() if kind.family in FACTS and name not in GUESSES)
)
def test_facts_are_never_kept_back(kind: str) -> None:
    cluster = Cluster()
    empty(cluster)
    cluster.hear(10, opinion(10, "j", kind=kind, detector="hang"))
    assert cluster.opened == ["j"]


def test_codes_and_states_are_facts() -> None:
    cluster = Cluster()
    empty(cluster)
    for number in range(5):
        cluster.hear(10, opinion(10, f"j{number}", kind="device_state", detector="device_states"))
    assert len(cluster.opened) == 5


def test_one_disturbance_costs_one_coin() -> None:
    """Four culprits in one job at once: three coins are left for other jobs after the first."""
    cluster = Cluster()
    for rank in range(4):
        entity = Entity(EntityKind.RANK, f"big/{rank}", f"n{rank}")
        cluster.hear(rank, verdict("link_slow", at_s=rank, entity=entity, job="big", detector="mesh_links"))
    for number in range(2):
        cluster.hear(5, opinion(5, f"j{number}", kind="link_slow", detector="mesh_links"))
    assert cluster.opened.count("j0") == cluster.opened.count("j1") == 1


@pytest.mark.parametrize("job", ["big", ""])
def test_noise_that_goes_on_and_on_in_one_job_or_none_does_not_carry_itself(job: str) -> None:
    """Another node every 15 s for two hours: each lies near the one before, and that is no reason to tell it."""
    cluster = Cluster()
    for number in range(480):
        entity = Entity(EntityKind.NODE, f"n{number}", f"n{number}")
        cluster.hear(number * 15, verdict("link_slow", at_s=number * 15, entity=entity, job=job, detector="mesh_links"))
    assert 3 <= len(cluster.opened) <= 6


def test_what_was_told_late_gives_no_coin_back_that_was_never_paid() -> None:
    cluster = Cluster()
    empty(cluster)
    budget = cluster.correlator._budget
    assert budget is not None
    answers = []
    for at_s in range(0, 400, 10):
        said = opinion(at_s, "late")
        answers.append(budget.admits(said, ("late", said.kind, "node:x"), (), START_NS + at_s * NS_PER_S))
    assert [answer for answer in answers if answer[0]] == [(True, "")]


def test_a_purse_is_refilled_by_what_proved_true() -> None:
    cluster = Cluster()
    for number in range(10):
        cluster.correlator._budget.proved("steps")  # type: ignore[union-attr]
        cluster.hear(number, opinion(number, f"j{number}"))
    assert len(cluster.opened) == 10


def test_a_new_correlator_accounts_for_what_the_old_one_opened() -> None:
    cluster = Cluster()
    empty(cluster)
    for number in range(3):
        cluster.hear(10, opinion(10, f"link{number}", kind="link_slow", detector="mesh_links"))
    kept = list(cluster.told)
    cluster.correlator = cluster.made()
    cluster.correlator.restore(kept)
    cluster.told.clear()
    cluster.hear(60, opinion(60, "more", kind="link_slow", detector="mesh_links"))
    assert cluster.opened == []
    cluster.hear(60, opinion(60, "steps"))
    assert cluster.opened == ["steps"], "its purse was emptied in a life that nobody told of"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"burst": 0.5}, "risk.burst: found 0.5"),
        ({"false_incidents_per_day": 0}, "risk.false_incidents_per_day: found 0"),
    ],
)
def test_a_budget_of_nothing_is_refused(table: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_table({"risk": table})
