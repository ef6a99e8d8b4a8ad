from __future__ import annotations

import itertools
import random

import pytest

from streams.cases import Case
from streams.causes import Finding, choose, explains, strength
from streams.incidents import Correlator, CorrelatorSettings
from tests.streams.synthetic import START_NS, verdict
from trainwarden.clock import NS_PER_S
from trainwarden.policy import KINDS, Policy
from trainwarden.records import (
    ActionResult,
    ActionStatus,
    Entity,
    EntityKind,
    Evidence,
    Incident,
    IncidentStatus,
    Plan,
    Reach,
    TopologyEvent,
    Verdict,
    decode,
    encode,
    stable_id,
)


class Story:
    """A correlator with a hand on its clock; every revision that came out."""

    def __init__(self, policy: Policy | None = None, settings: CorrelatorSettings | None = None) -> None:
        self.policy = policy or Policy()
        self.correlator = Correlator("c", self.policy, settings)
        self.at_s = 0.0
        self.revisions: list[Incident] = []

    def go(self, to_s: float) -> list[Incident]:
        """Let time pass in the worker's own grain."""
        fresh: list[Incident] = []
        while self.at_s < to_s - 1e-9:
            self.at_s = min(to_s, round(self.at_s + 0.1, 3))
            fresh.extend(self.correlator.tick(self.now_ns))
        self.revisions.extend(fresh)
        return fresh

    @property
    def now_ns(self) -> int:
        return START_NS + int(self.at_s * NS_PER_S)

    def say(self, *verdicts: Verdict) -> None:
        for one in verdicts:
            self.correlator.on_verdict(one, self.now_ns)

    def steps(self, step: int, attempt: int = 1, job: str = "j") -> None:
        self.correlator.on_progress(job, step, attempt, self.now_ns)

    def act(self, incident: Incident, status: ActionStatus, verb: str = "restart", target: str = "j") -> None:
        self.correlator.on_action(
            ActionResult(
                incident_id=incident.incident_id,
                verb=verb,
                target=target,
                status=status,
                observed_at_ns=self.now_ns,
                started_at_ns=self.now_ns,
            )
        )

    def newest(self) -> dict[str, Incident]:
        return {incident.incident_id: incident for incident in self.revisions}

    def only(self) -> Incident:
        (incident,) = self.newest().values()
        return incident

    def live(self) -> list[Incident]:
        return [i for i in self.newest().values() if i.status in ("open", "acting", "recovered")]


def healed(story: Story, kind: str, node: str, *, attempt: int, last_step: int) -> Incident:
    """A fault on `node` at this moment, acted on, and the job past it in the next attempt; the incident closed."""
    before = set(story.newest())
    story.steps(last_step, attempt)
    story.say(verdict(kind, node, at_s=story.at_s, attempt=attempt))
    story.go(story.at_s + 1.5)
    incident = next(i for i in story.newest().values() if i.incident_id not in before)
    story.act(incident, ActionStatus.STARTED)
    story.act(incident, ActionStatus.DONE)
    story.go(story.at_s + 5)
    story.steps(last_step + 1, attempt + 1)
    story.go(story.at_s + 20)
    return story.newest()[incident.incident_id]


# --- opening ---------------------------------------------------------------------------------------------------------------


def test_a_killed_rank_explains_the_hang_and_the_slowness_of_all_others() -> None:
    story = Story()
    story.steps(480)
    story.go(10)
    story.say(
        verdict("job_slow", at_s=10, onset_s=9),
        verdict("job_hang", at_s=10, onset_s=9, reach=Reach.NOTIFY),
        verdict("compute_slow", "n0", at_s=10, onset_s=9.5),
        verdict("rank_frozen", "n1", at_s=10, onset_s=9.8, rank=1),
        verdict("rank_killed", "n2", at_s=10, onset_s=9, rank=2, confidence=0.97),
    )
    story.go(13)
    incident = story.only()
    assert (incident.kind, incident.culprit_rank, incident.culprits[0].name) == ("rank_killed", 2, "n2")
    assert incident.reach is Reach.ACT
    assert incident.remedy == ("restart",)
    assert {"node n0", "rank 1 on n1"} <= set(incident.victims)
    assert incident.last_step == 480
    assert len(incident.verdict_ids) == 5


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_verdicts_does_not_matter(order: tuple[int, ...]) -> None:
    opinions = (
        verdict("job_hang", at_s=1, onset_s=0.5, reach=Reach.NOTIFY),
        verdict("compute_slow", "n0", at_s=1, onset_s=0.6, confidence=0.95),
        verdict("rank_frozen", "n1", at_s=1, onset_s=0.4),
        verdict("rank_killed", "n2", at_s=1, onset_s=0.5),
    )
    story = Story()
    story.say(*(opinions[i] for i in order))
    story.go(5)
    assert len(story.live()) == 1
    assert story.live()[0].culprits[0].name == "n2"


def test_what_stopped_first_stopped_the_rest() -> None:
    """A frozen rank makes the others time out and die: the later kills are victims, however strong their kind."""
    story = Story()
    story.say(verdict("rank_frozen", "n0", at_s=2, onset_s=0))
    story.go(8)
    story.say(*(verdict("rank_killed", node, at_s=8, onset_s=7.9) for node in ("n1", "n2", "n3")))
    story.go(12)
    incident = story.only()
    assert (incident.kind, incident.culprits[0].name) == ("rank_frozen", "n0")
    assert len(incident.victims) == 3


def test_fail_stop_is_published_fast_and_a_hang_waits_for_a_culprit() -> None:
    fast, slow, hang = Story(), Story(), Story()
    fast.say(verdict("rank_killed", "n1"))
    slow.say(verdict("compute_slow", "n1"))
    hang.say(verdict("job_hang", reach=Reach.NOTIFY))
    assert [story.go(0.3) != [] for story in (fast, slow, hang)] == [True, False, False]
    assert [bool(story.go(1.2) or story.revisions) for story in (fast, slow, hang)] == [True, True, False]
    assert hang.go(2.2) != []
    assert hang.only().reach is Reach.NOTIFY
    assert hang.only().culprits == ()


def test_a_better_verdict_changes_the_culprit_by_revision_and_keeps_the_key() -> None:
    story = Story()
    story.say(verdict("job_hang", reach=Reach.NOTIFY))
    story.go(3)
    first = story.only()
    assert first.dedup_key == stable_id("c", "j", "job_hang", "job:j")
    story.say(verdict("node_lost", "n3", at_s=3, onset_s=0))
    story.go(3.5)
    second = story.only()
    assert (second.incident_id, second.dedup_key) == (first.incident_id, first.dedup_key)
    assert (second.kind, second.culprits[0].name, second.reach) == ("node_lost", "n3", Reach.ACT)
    assert second.revision == first.revision + 1
    assert second.timeline.verdict_at_ns > first.timeline.verdict_at_ns


def test_stronger_kind_on_the_same_node_renames_the_fault() -> None:
    story = Story()
    story.say(verdict("rank_killed", "n1"), verdict("fatal_code", "n1", at_s=0.1))
    story.go(2)
    assert story.only().kind == "fatal_code"
    assert story.only().remedy == ("checkpoint", "isolate", "restart")


def test_a_second_detector_that_may_reach_less_adds_its_voice_and_takes_nothing_away() -> None:
    story = Story()
    story.steps(40)
    story.say(verdict("compute_slow", "n2", at_s=1, onset_s=0, detector="strong"))
    story.go(20)
    weak = {"detector": "weak", "reach": Reach.CORRELATE}
    story.say(verdict("compute_slow", "n2", at_s=20, onset_s=1, **weak))  # type: ignore[arg-type]
    story.go(22)
    assert story.only().reach is Reach.ACT
    story.say(verdict("compute_slow", "n2", at_s=22, onset_s=1, clears=True, **weak))  # type: ignore[arg-type]
    story.go(24)
    assert (story.only().status, story.only().reach) == (IncidentStatus.OPEN, Reach.ACT)
    story.say(verdict("compute_slow", "n2", at_s=24, onset_s=1, **weak))  # type: ignore[arg-type]
    story.say(verdict("compute_slow", "n2", at_s=25, onset_s=0, clears=True, detector="strong"))
    story.go(60)
    assert story.only().reach is not Reach.ACT, "who may only add cannot keep up what only another may do"


def test_what_was_healed_is_not_renamed_by_a_quiet_opinion_that_outlives_it() -> None:
    story = Story()
    story.steps(40)
    story.say(verdict("threshold", "n2", at_s=1, reach=Reach.CORRELATE))
    story.say(verdict("rank_frozen", "n2", at_s=2, onset_s=1))
    story.go(4)
    assert story.only().kind == "rank_frozen"
    story.act(story.only(), ActionStatus.DONE)
    story.say(verdict("threshold", "n2", at_s=5, onset_s=1, reach=Reach.CORRELATE))
    story.say(verdict("rank_frozen", "n2", at_s=5, onset_s=1, clears=True))
    story.steps(41, attempt=2)
    story.go(60)
    assert {i.kind for i in story.revisions} == {"rank_frozen"}
    assert Reach.CORRELATE not in {i.reach for i in story.revisions}
    assert story.only().status is IncidentStatus.CLOSED


def test_independent_culprits_are_two_incidents() -> None:
    story = Story()
    story.say(verdict("link_slow", "n1", confidence=0.95), verdict("compute_slow", "n3", confidence=0.95))
    story.go(3)
    assert {(i.kind, i.culprits[0].name) for i in story.live()} == {("link_slow", "n1"), ("compute_slow", "n3")}


def test_two_jobs_are_two_incidents() -> None:
    story = Story()
    story.say(verdict("rank_killed", "n1", job="a"), verdict("rank_killed", "n5", job="b"))
    story.go(1)
    assert {i.job for i in story.live()} == {"a", "b"}


def test_unsure_slowness_elsewhere_is_a_symptom_of_a_slow_link() -> None:
    story = Story()
    story.say(verdict("link_slow", "n1", confidence=0.9), verdict("compute_slow", "n2", confidence=0.6))
    story.go(3)
    assert story.only().culprits[0].name == "n1"


def test_slow_fabric_blames_nobody_even_when_links_were_accused_first() -> None:
    story = Story()
    story.say(verdict("link_slow", "n1", at_s=0), verdict("link_slow", "n2", at_s=0))
    story.go(1.5)
    assert len(story.live()) == 2
    story.say(
        verdict("fabric_slow", at_s=1.5, onset_s=0, reach=Reach.NOTIFY, entity=Entity(EntityKind.FABRIC, "fabric"))
    )
    story.go(2)
    (left,) = story.live()
    gone = [i for i in story.newest().values() if i.status is IncidentStatus.SUPERSEDED]
    assert (left.kind, left.reach, left.remedy) == ("fabric_slow", Reach.NOTIFY, ())
    assert [i.superseded_by for i in gone] == [left.incident_id]
    story.say(verdict("link_slow", "n0", at_s=2))
    story.go(5)
    assert len(story.live()) == 1


def test_several_nodes_of_one_leaf_are_the_leaf() -> None:
    story = Story()
    for number in range(6):
        leaf = "leafA" if number < 3 else "leafB"
        story.correlator.progress.topology.apply(
            TopologyEvent(entity=f"node:n{number}", origin="operator", attributes={"leaf": leaf})
        )
    story.say(verdict("link_slow", "n0"))
    story.go(0.5)
    story.say(verdict("link_slow", "n2", at_s=0.5))
    story.go(3)
    (incident,) = story.live()
    assert incident.culprits == (Entity(EntityKind.LEAF, "leafA"),)
    assert incident.reach is Reach.NOTIFY, "nobody isolates half a rack by itself"
    assert {"n0", "n2"} <= set(incident.victims)


def test_a_slow_leaf_explains_links_below_it_and_no_other() -> None:
    story = Story()
    leaf = Entity(EntityKind.LEAF, "leafA")
    story.say(
        verdict("link_slow", "n1"),
        verdict("link_slow", "n7"),
        verdict("subnet_slow", reach=Reach.NOTIFY, entity=leaf, victims=("n0", "n1", "n2")),
    )
    story.go(3)
    assert {(i.kind, str(i.culprits[0])) for i in story.live()} == {
        ("subnet_slow", str(leaf)),
        ("link_slow", "node:n7"),
    }


def test_one_node_of_a_leaf_stays_a_node() -> None:
    story = Story()
    for number in range(6):
        story.correlator.progress.topology.apply(
            TopologyEvent(entity=f"node:n{number}", origin="operator", attributes={"leaf": f"l{number // 3}"})
        )
    story.say(verdict("link_slow", "n0"), verdict("link_slow", "n4"))
    story.go(3)
    assert {i.culprits[0].name for i in story.live()} == {"n0", "n4"}


def test_weak_signals_open_nothing_but_count_as_first_signal() -> None:
    story = Story()
    story.say(verdict("threshold", "n1", at_s=0, reach=Reach.CORRELATE))
    story.go(5)
    assert story.revisions == []
    story.say(verdict("compute_slow", "n1", at_s=5, onset_s=1))
    story.go(7)
    times = story.only().timeline
    assert times.first_signal_at_ns == START_NS
    assert times.fault_at_ns == START_NS + NS_PER_S
    assert times.verdict_at_ns == START_NS + 5 * NS_PER_S


def test_telemetry_alone_never_reaches_act() -> None:
    kinds = dict(KINDS)
    kinds["telemetry_lost"] = type(kinds["telemetry_lost"])(**{**kinds["telemetry_lost"].__dict__, "reach": Reach.ACT})
    story = Story(Policy(kinds=kinds))
    story.say(verdict("telemetry_lost", "n1", reach=Reach.ACT, entity=Entity(EntityKind.TELEMETRY, "n1", "n1")))
    story.go(2)
    assert story.only().reach is Reach.NOTIFY


def test_store_only_opinions_and_repeats_change_nothing() -> None:
    story = Story()
    story.say(verdict("compute_slow", "n1", reach=Reach.STORE))
    story.go(2)
    assert story.revisions == []
    one = verdict("compute_slow", "n1", at_s=2)
    story.say(one, one)
    story.go(4)
    story.say(one)
    story.go(6)
    assert len(story.revisions) == 1
    assert story.only().verdict_ids == (one.verdict_id,)


def test_opinions_about_an_attempt_that_is_over_open_nothing() -> None:
    story = Story()
    story.steps(500, attempt=2)
    story.say(verdict("rank_killed", "n1", attempt=1))
    story.go(2)
    assert story.revisions == []
    story.say(verdict("rank_killed", "n1", attempt=2))
    story.go(3)
    assert story.only().attempt == 2


def test_an_unknown_kind_is_told_and_never_acted_on() -> None:
    story = Story()
    story.say(verdict("gremlins", "n1", reach=Reach.NOTIFY))
    story.go(2)
    assert (story.only().kind, story.only().remedy) == ("gremlins", ())


# --- life ------------------------------------------------------------------------------------------------------------------


def test_a_healed_kill_tells_its_whole_timeline() -> None:
    story = Story()
    story.steps(480)
    story.go(10)
    story.say(verdict("rank_killed", "n2", at_s=10, onset_s=9.2, rank=2))
    story.go(10.4)
    first = story.only()
    story.correlator.on_plan(Plan(incident_id=first.incident_id, observed_at_ns=story.now_ns))
    story.go(10.6)
    story.act(first, ActionStatus.STARTED)
    story.go(11)
    assert story.only().status is IncidentStatus.ACTING
    story.act(first, ActionStatus.DONE)
    story.go(18)
    story.steps(451, attempt=2)
    story.go(20)
    assert story.only().status is IncidentStatus.ACTING, "back at the checkpoint is not past the fault"
    story.steps(481, attempt=2)
    story.go(23)
    assert story.only().status is IncidentStatus.RECOVERED
    story.act(first, ActionStatus.VERIFIED, verb="")
    story.go(24)
    last = story.only()
    assert (last.status, last.close_reason) == (IncidentStatus.CLOSED, "verified")
    times = [
        t - START_NS
        for t in (
            last.timeline.fault_at_ns,
            last.timeline.verdict_at_ns,
            last.timeline.decided_at_ns,
            last.timeline.acted_at_ns,
            last.timeline.recovered_at_ns,
            last.timeline.closed_at_ns,
        )
    ]
    assert times == sorted(times)
    assert times[4] == 20 * NS_PER_S, "recovery is the moment of progress, not of being sure"
    assert [i.revision for i in story.revisions] == list(range(1, len(story.revisions) + 1))


def test_recurrence_is_a_new_incident_with_the_stronger_remedy() -> None:
    story = Story()
    first = healed(story, "rank_killed", "n1", attempt=1, last_step=100)
    second = healed(story, "rank_killed", "n1", attempt=2, last_step=300)
    assert (first.close_reason, first.recurrence, first.remedy) == ("verified", 0, ("restart",))
    assert (second.recurrence, second.remedy) == (1, ("isolate", "restart"))
    assert first.incident_id != second.incident_id
    assert first.dedup_key == second.dedup_key


def test_recurrence_is_forgotten_after_its_window_and_is_per_node() -> None:
    story = Story()
    healed(story, "rank_killed", "n1", attempt=1, last_step=100)
    assert healed(story, "rank_killed", "n2", attempt=2, last_step=300).recurrence == 0
    story.go(story.at_s + 3700)
    assert healed(story, "rank_killed", "n1", attempt=3, last_step=900).recurrence == 0


def test_the_same_fault_at_once_after_the_restart_is_a_recurrence_too() -> None:
    """The remedy did not last: the process dies again before the job ever got past the fault."""
    story = Story()
    story.steps(100)
    story.say(verdict("rank_killed", "n1"))
    story.go(1)
    story.act(story.only(), ActionStatus.STARTED)
    story.go(8)
    story.steps(90, attempt=2)
    story.say(verdict("rank_killed", "n1", at_s=8, attempt=2))
    story.go(10)
    old, new = story.newest().values()
    assert (old.status, old.close_reason) == (IncidentStatus.CLOSED, "recurred")
    assert (new.status, new.recurrence, new.remedy) == (IncidentStatus.OPEN, 1, ("isolate", "restart"))


def test_ranks_that_the_restart_ends_open_nothing() -> None:
    story = Story()
    story.say(verdict("rank_frozen", "n1"))
    story.go(1)
    story.act(story.only(), ActionStatus.STARTED)
    story.go(25)
    story.say(verdict("rank_killed", "n0", at_s=25), verdict("job_hang", at_s=25, reach=Reach.NOTIFY))
    story.go(28)
    assert len(story.newest()) == 1
    assert story.only().culprits[0].name == "n1"


def test_a_node_lost_during_another_repair_is_its_own_incident() -> None:
    story = Story()
    story.say(verdict("rank_killed", "n1"))
    story.go(1)
    story.act(story.only(), ActionStatus.STARTED)
    story.say(verdict("node_lost", "n3", at_s=1))
    story.go(3)
    assert {i.culprits[0].name for i in story.live()} == {"n1", "n3"}


def test_five_flaps_are_one_incident() -> None:
    story = Story()
    for flap in range(5):
        at_s = flap * 12.0
        story.go(at_s)
        story.say(verdict("link_slow", "n1", at_s=at_s))
        story.go(at_s + 4)
        story.say(verdict("link_slow", "n1", at_s=at_s + 4, onset_s=at_s, clears=True))
    story.go(120)
    incident = story.only()
    assert (incident.status, incident.close_reason) == (IncidentStatus.CLOSED, "cleared")
    statuses = [i.status for i in story.revisions]
    assert statuses.count(IncidentStatus.OPEN) >= 5


def test_fault_that_goes_by_itself_is_recovered_and_closed_quiet() -> None:
    story = Story()
    story.steps(100)
    story.say(verdict("rank_frozen", "n1", at_s=0))
    story.go(5)
    story.steps(101)
    story.go(30)
    assert (story.only().status, story.only().close_reason) == (IncidentStatus.CLOSED, "quiet")
    assert story.only().timeline.acted_at_ns == 0


def test_a_slow_rank_keeps_its_incident_while_the_job_crawls_on() -> None:
    story = Story()
    for second in range(60):
        story.go(second)
        story.steps(second)
        if second % 10 == 0:
            story.say(verdict("compute_slow", "n1", at_s=second, onset_s=0))
    assert story.only().status is IncidentStatus.OPEN
    reaches = [revision.reach for revision in story.revisions]
    assert reaches == [Reach.NOTIFY, Reach.ACT], "named, then confirmed: the same news is told once"
    assert story.revisions[1].observed_at_ns - story.revisions[1].timeline.fault_at_ns >= 15 * NS_PER_S


def test_a_finished_job_closes_its_incidents_and_opens_no_more() -> None:
    story = Story()
    story.say(verdict("compute_slow", "n1"))
    story.go(2)
    story.steps(10)
    story.correlator.progress.of("j").finished = True
    story.go(3)
    assert story.only().close_reason == "job finished"
    story.say(verdict("job_hang", at_s=3, reach=Reach.NOTIFY))
    story.go(8)
    assert len(story.newest()) == 1


def test_an_isolated_node_that_is_still_broken_is_no_news() -> None:
    story = Story()
    topology = story.correlator.progress.topology
    topology.apply(TopologyEvent(entity="job:j", origin="hook", attempt=1, ranks=((0, "n0", ""), (1, "n1", ""))))
    healed(story, "link_slow", "n1", attempt=1, last_step=100)
    topology.apply(TopologyEvent(entity="job:j", origin="hook", attempt=2, ranks=((0, "n0", ""),)))
    story.say(verdict("link_slow", "n1", at_s=story.at_s, job=""))
    story.go(story.at_s + 5)
    assert story.live() == []


def test_a_node_level_opinion_finds_the_job_on_that_node() -> None:
    story = Story()
    story.correlator.progress.topology.apply(
        TopologyEvent(entity="job:j", origin="hook", attempt=3, ranks=((1, "n1", ""),))
    )
    story.say(verdict("fatal_code", "n1", job="", attempt=0), verdict("fatal_code", "n9", job="", attempt=0))
    story.go(2)
    by_node = {i.culprits[0].name: i for i in story.live()}
    assert (by_node["n1"].job, by_node["n1"].attempt, by_node["n1"].reach) == ("j", 3, Reach.ACT)
    assert (by_node["n9"].job, by_node["n9"].reach) == ("", Reach.NOTIFY)


# --- restart ---------------------------------------------------------------------------------------------------------------


def test_a_correlator_rebuilt_from_its_incidents_goes_on() -> None:
    story = Story()
    closed = healed(story, "rank_killed", "n1", attempt=1, last_step=100)
    start_s = story.at_s
    story.steps(500, attempt=2)
    opinion = verdict("rank_frozen", "n2", at_s=start_s, attempt=2)
    story.say(opinion)
    story.go(start_s + 1)
    before = next(i for i in story.live())
    story.act(before, ActionStatus.STARTED)
    story.go(start_s + 2)

    successor = Story()
    assert successor.correlator.restore([decode(encode(revision)) for revision in story.revisions]) == 1
    successor.at_s = story.at_s
    successor.say(opinion, verdict("job_hang", at_s=start_s + 2, onset_s=start_s, attempt=2, reach=Reach.NOTIFY))
    assert all(i.incident_id == before.incident_id for i in successor.go(start_s + 5))
    successor.steps(501, attempt=3)
    successor.go(start_s + 20)
    last = successor.only()
    assert (last.incident_id, last.dedup_key, last.status) == (
        before.incident_id,
        before.dedup_key,
        IncidentStatus.CLOSED,
    )
    assert last.revision > before.revision
    assert healed(successor, "rank_killed", "n1", attempt=3, last_step=900).recurrence == closed.recurrence + 1


def test_lost_publication_is_made_up_for_with_the_same_identity() -> None:
    """Killed between verdict and publication: the successor reads the verdict again and opens the same incident."""
    opinion = verdict("rank_killed", "n1")
    first, second = Story(), Story()
    first.say(opinion)
    first.go(1)
    second.at_s = 7
    second.say(opinion)
    second.go(8)
    assert first.only().incident_id == second.only().incident_id
    assert first.only().dedup_key == second.only().dedup_key


# --- whole ------------------------------------------------------------------------------------------------------------------


def test_the_report_says_what_who_since_when_and_on_what_evidence() -> None:
    story = Story()
    story.steps(480)
    opinion = verdict("compute_slow", "n2", rank=2, victims=("n0", "n1"))
    evidence = Evidence("local time of rank 2", "ms", (START_NS,), (143.2,), 50.0, 70.0)
    fields = {
        **{f: getattr(opinion, f) for f in opinion.__struct_fields__},
        "evidence": (evidence,),
        "text": "local 143 ms against 61 ms",
    }
    story.say(Verdict(**fields), verdict("data_slow", "n1", confidence=0.5))
    story.go(2)
    report = story.only().report
    for part in (
        "Rank 2 on n2 computes longer than its peers",
        "job j (attempt 1)",
        "22:13:20",
        "last step 480",
        "local 143 ms against 61 ms",
        "= 143.2 ms (expected 50 to 70)",
        "Victims: n0, n1",
        "Ruled out: data_slow at node n1",
        "Recommended: checkpoint, isolate, restart",
        "Would change this view",
    ):
        assert part in report, f"{part!r} is missing in: {report}"


@pytest.mark.parametrize("seed", range(20))
def test_no_storm_of_verdicts_makes_it_fail_or_grow(seed: int) -> None:
    dice = random.Random(seed)
    story = Story()
    nodes = [f"n{i}" for i in range(8)]
    attempt, step = 1, 0
    for number in range(600):
        story.go(story.at_s + dice.choice([0.1, 0.5, 2.0]))
        step += dice.choice([0, 1, 5])
        if dice.random() < 0.03:
            attempt, step = attempt + 1, max(0, step - 20)
        story.steps(step, attempt)
        kind = dice.choice([*KINDS, "unheard_of"])
        shared = kind in ("fabric_slow",)
        story.say(
            verdict(
                kind,
                "" if shared else dice.choice(["", *nodes]),
                at_s=story.at_s,
                onset_s=story.at_s - dice.uniform(0, 5),
                attempt=attempt,
                confidence=dice.random(),
                reach=dice.choice(list(Reach)),
                clears=dice.random() < 0.2,
                detector=f"d{number % 3}",
                entity=Entity(EntityKind.FABRIC, "fabric") if shared else None,
            )
        )
        if story.revisions and dice.random() < 0.2:
            story.act(dice.choice(story.revisions), dice.choice(list(ActionStatus)))
    for incident in story.revisions:
        assert decode(encode(incident)) is not None
        assert sum(cause.probability for cause in incident.causes) <= 1.01
    for chain in story.newest():
        numbers = [i.revision for i in story.revisions if i.incident_id == chain]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len({i.dedup_key for i in story.revisions if i.incident_id == chain}) == 1
    assert len(story.correlator.open_incidents()) <= 40


def test_a_slow_rank_that_is_well_again_before_it_is_confirmed_never_reaches_an_action() -> None:
    story = Story()
    for second in range(60):
        story.go(second)
        story.steps(second)
        if second == 6:
            story.say(verdict("compute_slow", "n1", at_s=second, onset_s=0))
        if second == 12:
            story.say(verdict("compute_slow", "n1", at_s=second, onset_s=12, clears=True))
    assert story.revisions[0].culprits[0].node == "n1", "it is named all the same"
    assert {revision.reach for revision in story.revisions} == {Reach.NOTIFY}


def test_a_killed_rank_needs_no_confirmation() -> None:
    story = Story()
    story.go(0)
    story.say(verdict("rank_killed", "n1", at_s=0, onset_s=0))
    story.go(1)
    assert story.only().reach is Reach.ACT


def test_a_taking_back_of_an_earlier_fault_that_is_read_again_does_not_touch_a_new_one() -> None:
    """The successor of a killed worker hears the newest verdict from its group first, and then reads the last minute again."""
    story = Story()
    story.go(20)
    story.say(verdict("rank_killed", "n1", at_s=20, onset_s=19))
    story.say(verdict("rank_killed", "n1", at_s=5, onset_s=5, clears=True))
    story.go(21)
    assert story.only().reach is Reach.ACT


def test_a_kind_of_any_spelling_is_told_and_holds_up_nobody() -> None:
    story = Story()
    story.say(verdict("odd{kind}", "n1", reach=Reach.NOTIFY, job="j2"), verdict("rank_killed", "n2", reach=Reach.ACT))
    told = {incident.kind: incident.title for incident in story.go(5)}
    assert told == {"odd{kind}": "Node n1: odd{kind}", "rank_killed": "Node n2 was killed"}


def test_the_lead_is_the_strongest_of_those_that_nothing_explains() -> None:
    dice, policy = random.Random(5), Policy()
    led = set()
    for _ in range(300):
        findings = [_any_finding(dice) for _ in range(dice.randint(1, 12))]
        standing = [f for f in findings if not f.cleared]
        if not any(f.verdict.reach in (Reach.NOTIFY, Reach.ACT) for f in standing):
            loud = [f for f in findings if f.verdict.reach in (Reach.NOTIFY, Reach.ACT)]
            standing = loud or standing or findings
        unexplained = [f for f in standing if not any(explains(other, f, policy) for other in standing)]
        expected = max(unexplained or standing, key=lambda f: strength(f, policy))
        assert choose(findings, policy) is expected
        led.add(expected.verdict.kind)
    assert len(led) > 5


def test_a_repeat_that_says_more_changes_the_lead_and_one_that_says_the_same_does_not() -> None:
    dice, policy = random.Random(6), Policy()
    for _ in range(100):
        kept, fresh = (Case("i", "c", "j", 1, START_NS, START_NS) for _ in range(2))
        for number in range(40):
            said = _any_finding(dice).verdict
            for case in (kept, fresh):
                case.take(said, START_NS + number, policy)
            fresh._lead = None
            assert kept.lead(policy).culprit == fresh.lead(policy).culprit
            assert kept.lead(policy).verdict == fresh.lead(policy).verdict


def _any_finding(dice: random.Random) -> Finding:
    kind, number = dice.choice(sorted(KINDS)), dice.randrange(4)
    shared = dice.random() < 0.2
    entity = Entity(EntityKind.LEAF, f"leaf{number}") if shared else Entity(EntityKind.NODE, f"n{number}")
    onset_ns = START_NS + dice.randrange(20) * NS_PER_S // 2
    said = Verdict(verdict_id=str(dice.random()), kind=kind, entity=entity, confidence=dice.choice((0.5, 0.7, 0.9)),
                   detector=dice.choice(("a", "b")), onset_at_ns=onset_ns, reach=dice.choice(list(Reach)),
                   victims=dice.choice(((), ("n1", "n2"))))  # fmt: skip
    return Finding(said, onset_ns, onset_ns, onset_ns, cleared=dice.random() < 0.3)
