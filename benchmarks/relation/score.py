"""Answers against truth: who was named, was it right, how long did it take, and how often was somebody named for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.relation.episodes import Played
from benchmarks.relation.ours import culprit
from benchmarks.relation.scenarios import Slot
from detectors.relation.features import ROUND_S
from detectors.relation.floors.base import F32, named, steady

GRACE_ROUNDS = 6
Answer = tuple[int, str, str]
"""Round, kind and name."""


@dataclass
class Marked:
    """How one slot went. `exact`: all of the truth was named and nothing else."""

    seed: int
    size: int
    slot: Slot
    hit: int
    wrong_nodes: int
    wrong_parts: int
    exact: bool
    delay_s: list[float] = field(default_factory=list)


@dataclass
class Sheet:
    """Everything about one method on some jobs."""

    method: str
    slots: list[Marked] = field(default_factory=list)
    outside: int = 0
    node_days: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    stated: list[tuple[float, bool]] = field(default_factory=list)

    def take(self, played: Played, answers: Sequence[Answer]) -> None:
        """Mark the answers on one job."""
        self.node_days += played.node_days
        left = set(range(len(answers)))
        for slot in played.slots:
            first, last = slot.start_s / ROUND_S, slot.end_s / ROUND_S + GRACE_ROUNDS
            mine = [i for i in sorted(left) if first <= answers[i][0] < last]
            left -= set(mine)
            self.slots.append(_mark(played, slot, [answers[i] for i in mine]))
        self.outside += len({answers[i][2] for i in left if culprit(*answers[i][1:])[0] == "node"})

    def take_probabilities(self, played: Played, said: Sequence[tuple[int, str, str, float]]) -> None:
        """What was stated, and whether it was so."""
        for number, kind, name, probability in said:
            truths = [t for slot in played.scenario.slots for t in slot.truth if _during(slot, number)]
            self.stated.append((probability, _match(culprit(kind, name), truths) in truths))

    def add(self, other: Sheet) -> None:
        """Take in what the same method did elsewhere."""
        self.slots += other.slots
        self.stated += other.stated
        self.outside += other.outside
        self.node_days += other.node_days
        self.seconds += other.seconds
        self.rounds += other.rounds

    @property
    def false_isolations(self) -> int:
        return self.outside + sum(mark.wrong_nodes for mark in self.slots)


def _during(slot: Slot, number: int) -> bool:
    return slot.start_s / ROUND_S <= number < slot.end_s / ROUND_S + GRACE_ROUNDS


def _mark(played: Played, slot: Slot, answers: Sequence[Answer]) -> Marked:
    elsewhere = {
        truth
        for other in played.scenario.slots
        if other.start_s == slot.start_s
        for truth in other.truth
        if truth[0] == "rail"
    }
    first: dict[tuple[str, str], int] = {}
    for number, kind, name in answers:
        first.setdefault(_match(culprit(kind, name), slot.truth), number)
    wrong = [answer for answer in first if answer not in slot.truth and answer not in elsewhere]
    hits = [truth for truth in slot.truth if truth in first]
    delays = [(first[truth] + 1) * ROUND_S - slot.start_s for truth in hits]
    nodes = sum(kind == "node" for kind, _ in wrong)
    return Marked(played.scenario.seed, played.scenario.size, slot, len(hits), nodes, len(wrong) - nodes,
                  len(hits) == len(slot.truth) and not wrong, delays)  # fmt: skip


def _match(answer: tuple[str, str], truth: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """An answer in the truth's words: who cannot know the rail may name the leaf alone."""
    return next((t for t in truth if t[0] == answer[0] == "leaf" and t[1].partition("/")[0] == answer[1]), answer)


def answers_at(scores: F32, played: Played, line: float) -> list[Answer]:
    """What a floor says when its scores are held against a line: each thing once per stretch of rounds."""
    flags = steady(scores) > line
    flags[: played.episode.warm] = False
    found: list[Answer] = []
    before: set[tuple[str, str]] = set()
    for number, row in enumerate(flags):
        now = set(named(row, played.episode.graph)) if row.any() else set()
        found += [(number, *answer) for answer in sorted(now - before)]
        before = now
    return found


def calm_scores(scores: F32, played: Played) -> F32:
    """Steady scores of rounds in which nobody is to blame: where the lines of a floor are found, on the tuning split."""
    calm = np.ones(len(scores), dtype=np.bool_)
    calm[: played.episode.warm] = False
    for slot in played.scenario.slots:
        if slot.truth and (slot.job == played.job or slot.truth[0][0] == "rail"):
            calm[int(slot.start_s / ROUND_S) : int(slot.end_s / ROUND_S) + 3 * GRACE_ROUNDS] = False
    return steady(scores)[calm].ravel()


def figures(marks: Sequence[Marked]) -> dict[str, float]:
    """Precision, recall and F1 of nodes, exact localisation by group, share of blameless slots in which a node was named, delays."""
    nodes = [m for m in marks if m.slot.group == "node"]
    hits, wrong = sum(m.hit for m in nodes), sum(m.wrong_nodes for m in nodes)
    precision, recall = hits / max(hits + wrong, 1), hits / max(len(nodes), 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-9) if nodes else float("nan")
    delays = [d for m in marks for d in m.delay_s if m.slot.group in ("node", "subnet")]
    found = {"slots": float(len(marks)), "node_f1": f1, "node_precision": precision,
             "node_recall": recall, "delay_p50_s": _quantile(delays, 0.5), "delay_p95_s": _quantile(delays, 0.95)}  # fmt: skip
    for group in ("node", "subnet", "two", "unequal"):
        mine = [m.exact for m in marks if m.slot.group == group]
        found[f"{group}_exact"] = float(np.mean(mine)) if mine else float("nan")
    calm = [m.wrong_nodes > 0 for m in marks if m.slot.group == "nobody"]
    found["nobody_isolated"] = float(np.mean(calm)) if calm else float("nan")
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")
