"""Scoring: incidents of recorded faults against what was really done to the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from detectors.base import registry
from streams.causes import node_of
from streams.recordings import real_faults
from streams.recordings.real_faults import Label
from streams.replay import replay
from trainwarden.clock import NS_PER_S
from trainwarden.config import Config
from trainwarden.errors import UsageError
from trainwarden.policy import reach_at_least
from trainwarden.records import Incident, Reach, Verb

RIGHT_KINDS: dict[str, frozenset[str]] = {
    "sigstop": frozenset({"rank_frozen"}),
    "kill9": frozenset({"rank_killed"}),
    "cpu_throttle": frozenset({"compute_slow"}),
    "cpu_hog": frozenset({"compute_slow"}),
    "net_rate_limit": frozenset({"link_slow"}),
    "net_delay": frozenset({"link_slow"}),
    "net_loss": frozenset({"link_slow"}),
    "link_down": frozenset({"link_down", "link_slow"}),
    "link_flap": frozenset({"link_down", "link_slow"}),
    "slow_loader": frozenset({"data_slow"}),
    "slow_loader_intermittent": frozenset({"data_slow"}),
    "disk_full": frozenset({"save_failed"}),
    "nan_grad": frozenset({"non_finite"}),
    "sdc_bitflip": frozenset({"silent_corruption"}),
    "fabric_slow": frozenset({"fabric_slow", "job_slow"}),
}
"""What each injected fault must be called."""
HARD_NEGATIVES = frozenset({"cpu_throttle_mild"})
"""Faults too mild to matter: naming the node is right, saying nothing is right, accusing another is wrong."""
EARLY_NS = 2 * NS_PER_S
GRACE_NS = 15 * NS_PER_S
DRASTIC = frozenset({Verb.ISOLATE.value, Verb.RESTART.value})


@dataclass
class Score:
    """One run: faults found with their delays, faults missed, nodes wrongly accused of something that leads to an action."""

    run: str
    found: list[tuple[str, float]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    false_actions: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.missed and not self.false_actions

    def line(self) -> str:
        """One line for a person."""
        verdict = "right" if self.right else "WRONG"
        parts = [f"{kind} named after {s:.1f} s" if s > 0 else f"{kind} again, still open" for kind, s in self.found]
        parts += [f"{kind} MISSED" for kind in self.missed] + [
            f"would have acted: {what}" for what in self.false_actions
        ]
        parts += [f"{kind}: no detector yet" for kind in self.skipped]
        said = f"  [{', '.join(self.said)}]" if self.said else ""
        return f"{self.run:26} {verdict}  {'; '.join(parts) or 'nothing to find, no action'}{said}"


def evaluate(directory: Path, config: Config, say: Callable[[str], None], runs: Sequence[str] = ()) -> bool:
    """Replay each run under `directory` and score it; the last line is the summary. True when all runs are right.

    Raises
    ------
    UsageError
        There is no labelled recording in the directory.
    """
    chosen = runs or (real_faults.runs(directory) if directory.is_dir() else ())
    if not chosen:
        raise UsageError(
            f"{directory}: no recordings with labels: expected files such as clean1.nodes.csv and clean1.labels.json"
        )
    able = frozenset(
        kind for name, d in registry().all().items() if config.enabled("detectors", name) for kind in d.kinds
    )
    scores = []
    for run in chosen:
        scores.append(score(run, replay(directory / run, config).newest(), real_faults.labels(directory, run), able))
        say(scores[-1].line())
    say(_summary(scores))
    return all(one.right for one in scores)


def score(run: str, incidents: Sequence[Incident], labels: Sequence[Label], able: frozenset[str]) -> Score:
    """Compare the incidents of one run with its labels; `able` are the kinds that some detector can say."""
    result = Score(
        run, said=[f"{i.kind} {_accused(i) or 'nobody'}{' act' if i.reach is Reach.ACT else ''}" for i in incidents]
    )
    for label in labels:
        right = _right_kinds(label, run)
        match = next((i for i in incidents if i.kind in right and _fits(i, label)), None)
        if match is not None:
            result.found.append((label.kind, (match.timeline.verdict_at_ns - label.start_ns) / NS_PER_S))
        elif label.kind not in HARD_NEGATIVES:
            (result.missed if right & able else result.skipped).append(label.kind)
    result.false_actions = [
        f"{i.kind} on {_accused(i)}" for i in incidents if _drastic(i) and not any(_excused(i, x) for x in labels)
    ]
    return result


def _right_kinds(label: Label, run: str) -> frozenset[str]:
    if label.kind not in RIGHT_KINDS and label.kind not in HARD_NEGATIVES:
        known = ", ".join(sorted({*RIGHT_KINDS, *HARD_NEGATIVES}))
        raise UsageError(f"labels of {run}: unknown kind {label.kind!r}, expected one of {known}")
    return RIGHT_KINDS.get(label.kind, frozenset())


def _accused(incident: Incident) -> str:
    return node_of(incident.culprits[0]) if incident.culprits else ""


def _fits(incident: Incident, label: Label) -> bool:
    return _excused(incident, label) and (_accused(incident) in label.nodes if label.nodes else not _accused(incident))


def _excused(incident: Incident, label: Label) -> bool:
    """Whether the incident is about this fault: its time, and one of its nodes."""
    times = incident.timeline
    began, ended = times.verdict_at_ns, times.closed_at_ns or 2**63
    in_time = (
        began <= label.end_ns + GRACE_NS
        and ended >= label.start_ns - EARLY_NS
        and began >= label.start_ns - EARLY_NS - _open_ns(incident)
    )
    return (
        in_time
        and (not label.nodes or not _accused(incident) or _accused(incident) in label.nodes)
        and (bool(label.nodes) or not _drastic(incident))
    )


def _open_ns(incident: Incident) -> int:
    """A fault that returns while its incident is open was named before it returned."""
    return max(0, (incident.timeline.closed_at_ns or incident.observed_at_ns) - incident.timeline.verdict_at_ns)


def _drastic(incident: Incident) -> bool:
    return (
        reach_at_least(incident.reach, Reach.ACT) and bool(DRASTIC & set(incident.remedy)) and bool(incident.culprits)
    )


def _summary(scores: Sequence[Score]) -> str:
    delays = sorted(delay_s for one in scores for _, delay_s in one.found if delay_s > 0)
    middle = f", median delay {delays[len(delays) // 2]:.1f} s" if delays else ""
    named, missed = sum(len(one.found) for one in scores), sum(len(one.missed) for one in scores)
    right, false = sum(one.right for one in scores), sum(len(one.false_actions) for one in scores)
    runs, later = f"{right} of {len(scores)} runs right", sum(len(one.skipped) for one in scores)
    faults = f"{named} of {named + missed} faults named{middle}"
    return f"{runs}: {faults}, {false} false actions, {later} faults without a detector"
