"""Our model on the rounds of a job, as the detector runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.relation.episodes import Played
from detectors.relation.attribution import SLOW, attribute
from detectors.relation.floors.base import F32
from detectors.relation.judge import Calibration, Evidence, Judge, Related
from detectors.relation.opinions import Opinions
from models.relation import weights


@dataclass
class Answers:
    """What was said: (round, kind, name, probability) at the first announcement; scores rounds × nodes; seconds per round."""

    said: list[tuple[int, str, str, float]] = field(default_factory=list)
    scores: list[F32] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    attribution_s: list[float] = field(default_factory=list)


def run(played: Played, model: Path = weights.SHIPPED, served: bool = True) -> Answers:
    """All rounds of a job; `served=False` takes the peers' median and spread instead of the net."""
    trained = weights.load(model)
    calibration = Calibration(trained.node_table, trained.port_table, trained.normal)
    graph = played.episode.graph
    related, judge, opinions, answers = Related(graph), Judge(), Opinions(), Answers()
    judge.settle(graph)
    rails = tuple(map(str, range(played.rounds[0].port.shape[2])))
    evidence: Evidence | None = None
    for number, seen in enumerate(played.rounds):
        begun = time.process_time()
        warm = judge.residuals(
            seen, related, trained.served if served else None, opinions.frozen(evidence, len(graph.nodes))
        ).warm
        evidence = judge.evidence(calibration, related)
        between = time.process_time()
        standing, _ = opinions.take(attribute(evidence, graph, trained.prices, rails) if warm else [], seen.at_ns)
        answers.round_s.append(between - begun)
        answers.attribution_s.append(time.process_time() - between)
        answers.scores.append(evidence.node[list(SLOW)].max(axis=0))
        for opinion, cause in standing:
            if not opinion.said_ns:
                opinion.said_ns = seen.at_ns
                answers.said.append((number, *cause.key, cause.probability))
    return answers


def culprit(kind: str, name: str) -> tuple[str, str]:
    """A port is a matter of its node."""
    return ("node", name.partition("/")[0]) if kind == "port" else (kind, name)


def scores_of(answers: Answers) -> F32:
    return np.stack(answers.scores)
