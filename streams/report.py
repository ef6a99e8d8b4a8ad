"""What a person reads first: one title and one paragraph per incident."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from streams.causes import BLAMELESS_ENTITIES, Finding, explains, node_of
from trainwarden.clock import NS_PER_S
from trainwarden.policy import Policy
from trainwarden.records import Entity, Evidence, Reach

_WHAT = {
    "rank_killed": "{who} was killed",
    "rank_frozen": "{who} stands still while the others wait for it",
    "node_lost": "{who} and its telemetry are gone",
    "job_hang": "{who} hangs and no culprit stands out",
    "fatal_code": "{who} reported a fatal hardware code",
    "link_down": "the link of {who} carries nothing",
    "link_slow": "the link of {who} is slow or loses packets",
    "fabric_slow": "{who} is slow everywhere: nobody is to blame",
    "compute_slow": "{who} computes longer than its peers",
    "data_slow": "{who} waits for its input data",
    "job_slow": "{who} is slow on all ranks alike",
    "non_finite": "{who} produced values that are not finite",
    "silent_corruption": "the parameters of {who} differ from the other replicas'",
    "save_failed": "checkpoints of {who} are not written",
    "telemetry_lost": "telemetry of {who} stopped: its health is unknown",
    "clock_skew": "the clock of {who} is off",
}
_CHANGES = {
    "compute_slow": "the same slowness on other ranks, or slow probes to this node",
    "data_slow": "longer compute time on this rank, or slow input on all ranks",
    "link_slow": "slow probes between other pairs of nodes (then the fabric is to blame)",
    "fabric_slow": "probes that are slow only to or from one node",
    "rank_frozen": "progress of this rank, or a code or a lost link on another node",
    "rank_killed": "an earlier stop of another rank",
    "job_hang": "any sign that one rank, node or link stopped first",
    "node_lost": "ticks from this node",
}


def who(entity: Entity, rank: int) -> str:
    """The accused in words.

    Examples
    --------
    >>> from trainwarden.records import EntityKind
    >>> who(Entity(EntityKind.RANK, "2", "n2"), 2)
    'rank 2 on n2'
    """
    node = node_of(entity)
    if node and rank >= 0:
        return f"rank {rank} on {node}"
    if node:
        return f"node {node}"
    return f"{entity.kind} {entity.name}".strip() if entity.name != entity.kind else f"the {entity.name}"


def title(lead: Finding) -> str:
    """One line."""
    accused, template = who(lead.verdict.entity, lead.verdict.rank), _WHAT.get(lead.verdict.kind)
    # a kind that nobody knows is somebody else's text, never a template
    sentence = template.format(who=accused) if template else f"{accused}: {lead.verdict.kind.replace('_', ' ')}"
    return sentence[:1].upper() + sentence[1:]


def paragraph(
    lead: Finding,
    findings: Sequence[Finding],
    policy: Policy,
    *,
    job: str,
    attempt: int,
    last_step: int,
    victims: Sequence[str],
    confidence: float,
    reach: Reach,
    remedy: Sequence[str],
    recurrence: int,
    actions: Sequence[str],
) -> str:
    """What happened, since when, who, on what evidence, who suffers, what was ruled out, what was done, what would change the view."""
    sentences = [
        _opening(lead, job, attempt, last_step),
        _evidence(lead),
        f"Confidence {confidence:.2f}, from {_count(len(_supporters(lead, findings)), 'detector')} and {_count(lead.count, 'verdict')}.",
        f"Victims: {', '.join(victims)}." if victims else "",
        _ruled_out(lead, findings, policy),
        f"It is occurrence {recurrence + 1} of the same fault." if recurrence else "",
        _done(actions, remedy, reach),
        f"Would change this view: {_CHANGES[lead.verdict.kind]}." if lead.verdict.kind in _CHANGES else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def clock_text(at_ns: int) -> str:
    """UTC time of day to the millisecond."""
    return datetime.fromtimestamp(at_ns / NS_PER_S, UTC).strftime("%H:%M:%S.%f")[:-3] + " UTC"


def _opening(lead: Finding, job: str, attempt: int, last_step: int) -> str:
    where = f" in job {job} (attempt {attempt})" if job else ""
    step = f", last step {last_step}" if last_step >= 0 else ""
    return f"{title(lead)}{where}, since about {clock_text(lead.onset_at_ns)}{step}."


def _evidence(lead: Finding) -> str:
    verdict = lead.verdict
    parts = [verdict.text.rstrip(".")] if verdict.text else []
    if not math.isnan(verdict.value):
        parts.append(f"value {verdict.value:.4g}{_band(verdict.low, verdict.high)}")
    parts.extend(_excerpt(evidence) for evidence in verdict.evidence[:3])
    return f"Evidence: {'; '.join(parts)}." if parts else ""


def _excerpt(evidence: Evidence) -> str:
    last = f" = {evidence.values[-1]:.4g}" if evidence.values else ""
    unit = f" {evidence.unit}" if evidence.unit and evidence.values else ""
    note = f" ({evidence.note})" if evidence.note else ""
    return f"{evidence.name}{last}{unit}{_band(evidence.low, evidence.high)}{note}"


def _band(low: float, high: float) -> str:
    if math.isnan(low) and math.isnan(high):
        return ""
    if math.isnan(low) or math.isnan(high):
        return f" (expected {'at most' if math.isnan(low) else 'at least'} {high if math.isnan(low) else low:.4g})"
    return f" (expected {low:.4g} to {high:.4g})"


def _supporters(lead: Finding, findings: Sequence[Finding]) -> set[str]:
    return {name for f in findings if f.culprit == lead.culprit and not f.cleared for name in f.detectors}


def _ruled_out(lead: Finding, findings: Sequence[Finding], policy: Policy) -> str:
    others = [f for f in findings if f.culprit != lead.culprit and f.verdict.entity.kind not in BLAMELESS_ENTITIES]
    reasons = [
        f"{f.verdict.kind} at {who(f.verdict.entity, f.verdict.rank)} ({_why_not(lead, f, policy)})"
        for f in sorted(others, key=lambda f: f.culprit)[:4]
    ]
    return f"Ruled out: {', '.join(reasons)}." if reasons else ""


def _why_not(lead: Finding, other: Finding, policy: Policy) -> str:
    if other.cleared:
        return "taken back"
    return "explained by the culprit" if explains(lead, other, policy) else "weaker"


def _done(actions: Sequence[str], remedy: Sequence[str], reach: Reach) -> str:
    if actions:
        return f"Done: {'; '.join(actions[-6:])}."
    if not remedy:
        return "Nothing is to be done to a node; isolate nothing."
    return f"Recommended: {', '.join(remedy)}." + (
        "" if reach is Reach.ACT else " It is not carried out by itself at this reach."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
