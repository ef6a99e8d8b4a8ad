"""Which finding explains which: the rules by which one culprit is chosen among many opinions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.policy import Family, Policy, highest_reach, reach_at_least
from trainwarden.records import Cause, Entity, EntityKind, Reach, Verdict

RECOVERED = "recovered"
"""Stands for the detectors of an incident that was read back from its topic."""
REROUTED = "link_rerouted"
SHARED_ENTITIES = frozenset({EntityKind.FABRIC, EntityKind.LEAF, EntityKind.RAIL})
BLAMELESS_ENTITIES = frozenset({EntityKind.JOB})
_ON_NO_NODE = SHARED_ENTITIES | BLAMELESS_ENTITIES
INFRASTRUCTURE = frozenset({"fatal_code", "node_lost", "link_down", "link_slow"})
"""Kinds with evidence of their own on the node named: a fault elsewhere in the job cannot produce them."""
LINKS = frozenset({"link_down", "link_slow", "node_lost"})

INFRASTRUCTURE_SLACK_NS = 5 * NS_PER_S
"""Probes and codes show later than the processes that suffer: so much later they still count as the cause."""
STOP_SLACK_NS = 2 * NS_PER_S
SAME_MOMENT_NS = 1500 * NS_PER_MS
"""Stops closer than this are ordered by strength, others by time: what stopped later was stopped by what stopped first."""
SURE = 0.8
PROMOTER = "correlator"
"""Detector of verdicts that the correlator made of several."""


@dataclass
class Finding:
    """What one kind of verdict says about one culprit, over all its repeats."""

    verdict: Verdict
    first_at_ns: int
    last_at_ns: int
    onset_at_ns: int
    count: int = 1
    cleared: bool = False
    detectors: dict[str, Reach] = field(default_factory=dict)
    """Who says so, and how far each may reach."""

    @cached_property
    def culprit(self) -> str:
        """Whom it accuses; a repeat accuses the same, though perhaps by another name (a rank for its node)."""
        return culprit_of(self.verdict.entity)

    @cached_property
    def node(self) -> str:
        """Node accused; empty for shared and blameless entities."""
        return node_of(self.verdict.entity)

    @property
    def bearing(self) -> tuple[object, ...]:
        """Everything about it that decides which finding leads."""
        said = self.verdict
        return (
            self.cleared,
            self.onset_at_ns,
            said.entity,
            said.confidence,
            said.reach,
            said.victims,
            said.detector == PROMOTER,
        )

    def repeat(self, verdict: Verdict, now_ns: int) -> None:
        """The same said again: newest evidence, earliest onset. Who may reach less adds a voice and takes nothing from the others."""
        if self.cleared:
            self.detectors.clear()
        others = [reach for name, reach in self.detectors.items() if name != verdict.detector]
        self.detectors[verdict.detector] = verdict.reach
        if not others or reach_at_least(verdict.reach, highest_reach(others)):
            self.verdict = verdict
        self.last_at_ns, self.count, self.cleared = now_ns, self.count + 1, False
        self.onset_at_ns = min(self.onset_at_ns, verdict.onset_at_ns)

    def set_back(self, now_ns: int) -> None:
        """The clock was set back: nothing of this is later than now."""
        self.first_at_ns, self.last_at_ns = min(self.first_at_ns, now_ns), min(self.last_at_ns, now_ns)
        self.onset_at_ns = min(self.onset_at_ns, now_ns)
        if self.verdict.observed_at_ns > now_ns:
            self.verdict = replace(self.verdict, observed_at_ns=now_ns)

    def take_back(self, detector: str) -> None:
        """One of those who said so no longer does; it is cleared when nobody else is left. A finding read from a published incident
        does not know who spoke: anybody may take it back."""  # fmt: skip
        left = {name: reach for name, reach in self.detectors.items() if name not in (detector, RECOVERED)}
        if not left:
            self.cleared = True
        elif detector in self.detectors:
            self.detectors = left
            self.verdict = replace(self.verdict, reach=highest_reach(list(left.values())))


def culprit_of(entity: Entity) -> str:
    """Who is accused, as a key: everything on one node counts as that node.

    Examples
    --------
    >>> culprit_of(Entity(EntityKind.RANK, "j/2", "n2")), culprit_of(Entity(EntityKind.NODE, "n2"))
    ('node:n2', 'node:n2')
    """
    node = entity.node or (entity.name if entity.kind in (EntityKind.NODE, EntityKind.TELEMETRY) else "")
    return f"node:{node}" if node and entity.kind not in _ON_NO_NODE else str(entity)


def node_of(entity: Entity) -> str:
    """Node accused; empty for shared and blameless entities."""
    key = culprit_of(entity)
    return key.removeprefix("node:") if key.startswith("node:") else ""


def strength(finding: Finding, policy: Policy) -> tuple[int, float, int]:
    """Order of findings that compete at the same moment: kind, confidence, earlier onset."""
    return (policy.kind(finding.verdict.kind).rank, finding.verdict.confidence, -finding.onset_at_ns)


def explains(cause: Finding, effect: Finding, policy: Policy) -> bool:
    """Whether `effect` is sufficiently accounted for by `cause` and needs no incident of its own."""
    if cause is effect:
        return False
    if cause.culprit == effect.culprit:
        kinds = {cause.verdict.kind, effect.verdict.kind}
        if REROUTED in kinds and kinds & {"link_down", "link_slow"}:
            # the node has done by itself what could be done about its link: a dead rail is then no reason to take it out
            return cause.verdict.kind == REROUTED
        return _stronger(cause, effect, policy)
    if cause.verdict.entity.kind in BLAMELESS_ENTITIES:
        return effect.verdict.entity.kind in BLAMELESS_ENTITIES and _stronger(cause, effect, policy)
    if effect.verdict.entity.kind in BLAMELESS_ENTITIES:
        return _explains_blameless(cause, effect, policy)
    if cause.verdict.entity.kind in SHARED_ENTITIES:
        return _explains_below(cause, effect, policy)
    if effect.verdict.kind in INFRASTRUCTURE or effect.verdict.entity.kind in SHARED_ENTITIES:
        return False
    return _explains_symptom(cause, effect, policy)


def _stronger(cause: Finding, effect: Finding, policy: Policy) -> bool:
    return strength(cause, policy) > strength(effect, policy)


def choose(findings: Sequence[Finding], policy: Policy) -> Finding:
    """The finding that leads: explained by no other, then the strongest.

    Cleared ones lead when nothing else is left, or nothing that anybody would be told: what an incident was named for, and healed for,
    is not renamed by a quiet opinion that outlives it.
    """
    standing = [f for f in findings if not f.cleared]
    if not any(_is_loud(f) for f in standing):
        standing = [f for f in findings if _is_loud(f)] or standing or list(findings)
    # strongest first: asked of all pairs, sixty findings of a storm would cost milliseconds for each verdict
    by_strength = sorted(standing, key=lambda f: strength(f, policy), reverse=True)
    unexplained = (f for f in by_strength if not any(explains(other, f, policy) for other in standing))
    return next(unexplained, by_strength[0])


def _is_loud(finding: Finding) -> bool:
    return reach_at_least(finding.verdict.reach, Reach.NOTIFY)


def rank_causes(findings: Iterable[Finding], policy: Policy, limit: int = 5) -> tuple[Cause, ...]:
    """Candidate causes with probabilities: strength of the kind times confidence, little for what another explains."""
    found = list(findings)
    weights: dict[tuple[str, str], tuple[float, Finding]] = {}
    for finding in found:
        weight = (policy.kind(finding.verdict.kind).rank + 1) * max(finding.verdict.confidence, 0.05)
        weight *= 0.1 if finding.cleared else 0.2 if any(explains(other, finding, policy) for other in found) else 1.0
        key = (finding.verdict.kind, finding.culprit)
        if weight > weights.get(key, (0.0, finding))[0]:
            weights[key] = (weight, finding)
    total = sum(weight for weight, _ in weights.values()) or 1.0
    ranked = sorted(weights.values(), key=lambda entry: -entry[0])[:limit]
    return tuple(Cause(f.verdict.kind, f.verdict.entity, round(weight / total, 3)) for weight, f in ranked)


def _explains_blameless(cause: Finding, effect: Finding, policy: Policy) -> bool:
    """A hang or slowness of the whole job is explained by whoever is accused of something at least as grave."""
    family = policy.kind(cause.verdict.kind).family
    if policy.kind(effect.verdict.kind).family is Family.FAIL_STOP:
        return family in (Family.FAIL_STOP, Family.CORRUPTION) or cause.verdict.kind == "link_slow"
    return family in (Family.FAIL_STOP, Family.FAIL_SLOW, Family.CORRUPTION)


def _explains_below(cause: Finding, effect: Finding, policy: Policy) -> bool:
    """A shared cause explains links below it, and slowness of which nobody is sure.

    Below a leaf or along a rail are the victims that its detector names; what the correlator added up itself is judged by it.
    """
    if effect.verdict.entity.kind in SHARED_ENTITIES:
        return cause.verdict.entity.kind is EntityKind.FABRIC
    below = cause.verdict.victims if cause.verdict.detector != PROMOTER else ()
    if below and cause.verdict.entity.kind is not EntityKind.FABRIC and effect.node not in below:
        return False
    if effect.verdict.kind in LINKS:
        return True
    slow = policy.kind(effect.verdict.kind).family is Family.FAIL_SLOW
    return slow and effect.verdict.confidence < SURE


def _explains_symptom(cause: Finding, effect: Finding, policy: Policy) -> bool:
    """Processes stop and slow down because of each other; the first, or the one with evidence of its own, is to blame."""
    by, of = policy.kind(cause.verdict.kind).family, policy.kind(effect.verdict.kind).family
    if of not in (Family.FAIL_STOP, Family.FAIL_SLOW, Family.CORRUPTION):
        return effect.verdict.kind == "save_failed" and by in (Family.FAIL_STOP, Family.CORRUPTION)
    lead_ns = effect.onset_at_ns - cause.onset_at_ns
    if by is Family.FAIL_SLOW:
        doubt = effect.verdict.confidence - cause.verdict.confidence
        unsure = of is Family.FAIL_SLOW and effect.verdict.confidence < SURE
        return unsure and (doubt < 0 or (doubt == 0 and _stronger(cause, effect, policy)))
    if by not in (Family.FAIL_STOP, Family.CORRUPTION):
        return False
    if cause.verdict.kind in INFRASTRUCTURE:
        return lead_ns >= -INFRASTRUCTURE_SLACK_NS
    if of is Family.FAIL_SLOW:
        return lead_ns >= -STOP_SLACK_NS
    return lead_ns > SAME_MOMENT_NS or (abs(lead_ns) <= SAME_MOMENT_NS and _stronger(cause, effect, policy))
