"""Our model on the rounds of a job, as the detector runs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.relation.episodes import Played
from detectors.relation.attribution import attribute, own_of_group
from detectors.relation.conviction import convict
from detectors.relation.features import Past, Round
from detectors.relation.judge import Calibration, Evidence, Frozen, Judge, Related
from detectors.relation.opinions import Opinions
from models.relation import weights


@dataclass
class Answers:
    """What was said: (round, kind, name, probability) at the first announcement, and what was to be isolated; seconds per round."""

    said: list[tuple[int, str, str, float]] = field(default_factory=list)
    isolated: list[tuple[int, str, str]] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    attribution_s: list[float] = field(default_factory=list)


def run(played: Played, model: Path = weights.SHIPPED, net: bool = False, without: tuple[str, ...] = ()) -> Answers:
    """All rounds of a job. `net` takes the net's expectation in place of the peers' medians; `without` leaves relations out of the graph,
    or the nodes' own past (``past``: nodes are compared with each other only)."""
    trained = weights.load(model)
    calibration = Calibration(trained.node_table, trained.port_table, trained.normal)
    whole = played.episode.graph
    graph = replace(whole, relations={kind: r for kind, r in whole.relations.items() if kind not in without})
    related, judge, opinions, answers = Related(graph), Judge(), Opinions(), Answers()
    judge.settle(graph)
    rails = tuple(map(str, range(played.rounds[0].port.shape[2])))
    evidence: Evidence | None = None
    isolated: set[tuple[str, str]] = set()
    for number, seen in enumerate(played.rounds):
        begun = time.process_time()
        frozen = opinions.frozen(evidence, len(graph.nodes))
        if "past" in without:
            frozen = _forgetful(judge, seen)
        warm = judge.residuals(seen, related, trained.served if net else None, frozen).warm
        evidence = judge.evidence(calibration, related)
        between = time.process_time()
        if not warm:
            continue
        steady = opinions.steady(own_of_group(evidence.node, graph))
        causes = attribute(evidence, graph, opinions.prices(trained.prices), rails, steady)
        opinions.learn(bool(causes))
        standing, _ = opinions.take(causes, seen.at_ns)
        convict(standing, evidence, judge.sums.effect, graph)
        answers.round_s.append(between - begun)
        answers.attribution_s.append(time.process_time() - between)
        for opinion, cause in standing:
            if not opinion.said_ns:
                opinion.said_ns = seen.at_ns
                answers.said.append((number, *cause.key, cause.probability))
            if opinion.isolates and cause.key not in isolated:
                answers.isolated.append((number, *cause.key))
        isolated = {cause.key for opinion, cause in standing if opinion.isolates}
    return answers


def _forgetful(judge: Judge, seen: Round) -> Frozen:
    """A past that is nothing and stays so: what is left are levels beside those of others."""
    if not judge.past.rounds:
        node, gpu, port = (np.zeros_like(values) for values in (seen.node, seen.gpu, seen.port))
        judge.past = Past(0, node, gpu, port, before=np.zeros((2, *seen.node.shape), dtype=np.float32))
    return np.ones(seen.node.shape[1], dtype=np.bool_), np.ones(seen.port.shape[1:], dtype=np.bool_)


def culprit(kind: str, name: str) -> tuple[str, str]:
    """A port is a matter of its node."""
    return ("node", name.partition("/")[0]) if kind == "port" else (kind, name)
