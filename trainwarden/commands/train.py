"""`trainwarden train`: the relation model, from the simulator's normal life to weights and card."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwarden.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from detectors.relation.graph import Graph
    from models.relation.form import Served
    from models.relation.net import Plan, RelationNet, Table

    F32 = NDArray[np.float32]

Proof = tuple["Graph", list["F32"], list["F32"], list["F32"]]
"""A run without faults: its graph, and per round the residuals of nodes and ports, and effects."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PROFILES = ("dense", "pipeline", "moe", "longseq", "ddp", "recsys")
LESSON_KINDS = ("stage_imbalance", "length_imbalance", "pauses", "storage_slow", "bad_release")
"""Work that is slow by design or for everybody: normal life, in which no node is bad. Faults of machines are never learnt from."""
LESSON_ROUNDS = 90
FIRST_LESSON, FIRST_PROOF = 10_000, 20_000
"""Seeds of lessons and of the runs on which evidence is calibrated; tests and benchmarks use smaller ones."""
LEVELS = tuple(0.5 * i for i in range(1, 9))
ISOLATING, SHARED = 52_000_000, 1_700_000
"""Node-rounds of 3,000 node-days, in which no node shall be accused for nothing, and of 100, in which no shared part shall: a wrong word
about a switch or a rack costs a look at it, and no node."""
ACCUSED = ("node", "port", "steady")
LEAST_PRICE = 12.0
"""Of a kind that the calibration runs never showed at all: they are nine node-days, too few to call it free."""


@dataclass(frozen=True)
class Lesson:
    """One run of the simulator to learn from."""

    seed: int
    jobs: str
    nodes: int
    faults: str
    disorder: float


def lessons(first: int, each: int) -> list[Lesson]:
    """For every profile `each` runs of two jobs of 64 nodes or one of 128, every third with work that is slow by design."""
    found = []
    for number in range(each * len(PROFILES)):
        profile = PROFILES[number % len(PROFILES)]
        turn = number // len(PROFILES)
        jobs = f"2x64:{profile}" if turn % 2 else f"128:{profile}"
        kind = LESSON_KINDS[(number + turn) % len(LESSON_KINDS)]
        fits = kind != "stage_imbalance" or profile in ("pipeline", "moe", "longseq")
        faults = (
            f"{kind}@{'job-000/stage1' if kind == 'stage_imbalance' else 'job-000'}:150+200"
            if turn % 3 == 2 and fits
            else "none"
        )
        found.append(Lesson(first + number, jobs, 128, faults, (1.0, 0.6, 1.5)[turn % 3]))
    return found


@app.command()
def relation(
    out: Annotated[
        Path | None, typer.Option(help="weights file; the card lies beside it. Default: the shipped one")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="directory for lessons and the checkpoint from which an interrupted training goes on")
    ] = Path("train-run"),
    each: Annotated[
        int, typer.Option(help="runs of the simulator per kind of job; a sixth as many again for calibration")
    ] = 6,
    epochs: Annotated[int, typer.Option(help="passes over all lessons")] = 8,
    seed: Annotated[int, typer.Option(help="same seed, same weights")] = 0,
    with_net: Annotated[
        bool,
        typer.Option(
            "--net", help="the net's expectation in place of the peers' medians: it wins nothing, and is not served"
        ),
    ] = False,
    without: Annotated[
        str, typer.Option(help="ablation: inputs left out, comma-separated: past, dp, pp, ep, rack, leaf, zone, job")
    ] = "",
) -> None:
    """Make the relation model on this machine's processor, in minutes; with the net up to an hour, and it resumes."""
    from models.relation import form, net, weights

    begun_s = time.monotonic()
    if each < 2 or epochs < 1:
        raise UsageError(f"--each {each}, --epochs {epochs} found, expected at least 2 runs and 1 epoch")
    plan = net.Plan(seed=seed, epochs=epochs, without=tuple(filter(None, without.split(","))))
    bar, served, rows = Bar(), {}, 0
    if with_net:
        work.mkdir(parents=True, exist_ok=True)
        table, held_out = _tables(work, lessons(FIRST_LESSON + 1000 * seed, each), bar)
        served, rows = masked(_fit(table, held_out, plan, work / "checkpoint.pt", bar), plan), len(table.target)
    proofs = lessons(FIRST_PROOF + 1000 * seed, max(2, each // 2))
    tables, prices = calibrate(form.Served.of(served) if with_net else None, proofs, bar)
    card = _card(plan if with_net else None, each, rows, bar.losses, round(time.monotonic() - begun_s), prices)
    path = out or (weights.WITH_NET if with_net else weights.SHIPPED)
    weights.save(path, served, tables, prices, card)
    print(f"{path}: {card['seconds']} s; prices " + ", ".join(f"{name} {price:.1f}" for name, price in prices.items()))


class Bar:
    """One line of progress on stderr, rewritten where that is a terminal."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def show(self, what: str, done: int, of: int, more: str = "") -> None:
        """`done` of `of` steps are over."""
        line = f"{what:12} [{'#' * (24 * done // max(of, 1)):24}] {done}/{of} {more}"
        if sys.stderr.isatty():
            print(f"\r{line:100}", end="" if done < of else "\n", file=sys.stderr, flush=True)
        elif done == of or done * 4 // max(of, 1) != (done - 1) * 4 // max(of, 1):
            print(line, file=sys.stderr, flush=True)


def _tables(work: Path, chosen: Sequence[Lesson], bar: Bar) -> tuple[Table, Table]:
    import numpy as np

    from models.relation.net import Table

    parts: list[Table] = []
    for number, lesson in enumerate(chosen):
        path = work / f"lesson-{lesson.seed}-{lesson.disorder:g}.npz"
        if not path.exists():
            made = Table.joined(list(rows_of(lesson)))
            fresh = path.with_suffix(".part.npz")
            np.savez(fresh, given=made.given, base=made.base, target=made.target)
            fresh.replace(path)
        with np.load(path) as kept:
            parts.append(Table(kept["given"], kept["base"], kept["target"]))
        bar.show("lessons", number + 1, len(chosen))
    return Table.joined([p for i, p in enumerate(parts) if i % 10 != 9]), Table.joined(
        [p for i, p in enumerate(parts) if i % 10 == 9]
    )


def rows_of(lesson: Lesson, share: float = 0.35) -> Iterator[Table]:
    """Rows of a run: a share of the nodes of each warm round."""
    import numpy as np

    from detectors.relation.features import Past
    from detectors.relation.judge import Related
    from models.relation import form
    from models.relation.net import Table
    from trainwarden.commands.simulated_rounds import graph_of_job, rounds_of

    simulator = simulator_of(lesson)
    graphs = [Related(graph_of_job(simulator.layout, run.grid)) for run in simulator.jobs]
    pasts = [Past() for _ in graphs]
    stream = np.random.default_rng(lesson.seed)
    for rounds in rounds_of(simulator, LESSON_ROUNDS):
        for seen, past, related in zip(rounds, pasts, graphs, strict=True):
            found = past.advance(seen, np.zeros(len(related.graph.nodes), dtype=np.bool_))
            if found.warm:
                given, base = form.inputs(found.node, found.before, related.messages(found.node))
                rows = stream.random(len(given)) < share
                yield Table(given[rows], base[rows], found.node.T[rows])


def simulator_of(lesson: Lesson) -> Any:
    """The simulator of a lesson."""
    from collectors.simulated.run import build
    from collectors.simulated.spec import Spec
    from trainwarden.commands.simulated_rounds import RATE_HZ

    spec = Spec(nodes=lesson.nodes, seed=lesson.seed, jobs=lesson.jobs, rate_hz=RATE_HZ, disorder=lesson.disorder)
    return build(spec, lesson.faults, LESSON_ROUNDS / RATE_HZ)


def _fit(table: Table, held_out: Table, plan: Plan, checkpoint: Path, bar: Bar) -> RelationNet:
    from models.relation import net

    def told(progress: net.Progress) -> None:
        bar.losses.append(progress.held_out)
        bar.show(
            "training", progress.epoch + 1, plan.epochs, f"loss {progress.loss:.4f}, held out {progress.held_out:.4f}"
        )

    return net.train(table, held_out, plan, checkpoint, told)


def masked(fitted: RelationNet, plan: Plan) -> dict[str, F32]:
    """Weights as they are served: inputs that an ablation left out have no way in."""
    from models.relation import form

    served = fitted.served()
    for name in plan.without:
        served["linear"][:, form.block(name)] = 0.0
        served["first"][:, form.block(name)] = 0.0
    return served


def calibrate(served: Served | None, proofs: Sequence[Lesson], bar: Bar) -> tuple[dict[str, F32], dict[str, float]]:
    """Tables of healthy sums, and the price of each kind of cause, from runs in which no node is bad; without a net, of the medians."""
    import numpy as np

    from detectors.relation.attribution import KINDS
    from detectors.relation.judge import LONG, SHORT, Calibration

    runs: list[Proof] = []
    for number, proof in enumerate(proofs):
        runs += _residuals(proof, served)
        bar.show("calibrating", number + 1, len(proofs))
    normal = np.array([_normal_quantile(10.0**-level) for level in LEVELS], dtype=np.float32)
    tables = [np.stack([_quantiles(_ends(runs, place, span)) for span in (SHORT, LONG)]) for place in (1, 2)]
    made = Calibration(tables[0], tables[1], normal)
    gains = [_gains(run, made) for run in runs]
    prices = {
        kind: _price([g for one in gains for g in one[kind]], ISOLATING if kind in ACCUSED else SHARED)
        for kind in (*KINDS, "steady")
    }
    return {"node_table": made.node, "port_table": made.port, "normal": made.normal}, prices


def _ends(runs: Sequence[Proof], place: int, span: int) -> list[F32]:
    """Sums over `span` rounds of all runs, those of too little effect left out as in service."""
    import numpy as np

    from detectors.relation.judge import of_some_effect, sums_of

    found = []
    for run in runs:
        kept = [np.asarray(part) for part in (run[1] if place == 1 else run[2])]
        for end in range(span, len(kept) + 1, 2):
            sums = sums_of(kept[end - span : end], span)
            found.append(of_some_effect(sums, list(run[3][:end])) if place == 1 else sums)
    return found


def _residuals(proof: Lesson, served: Served | None) -> list[Proof]:
    import numpy as np

    from detectors.relation.judge import Judge, Related
    from trainwarden.commands.simulated_rounds import graph_of_job, rounds_of

    simulator = simulator_of(proof)
    related = [Related(graph_of_job(simulator.layout, run.grid)) for run in simulator.jobs]
    judges = [Judge() for _ in related]
    found: list[Proof] = [(one.graph, [], [], []) for one in related]
    for rounds in rounds_of(simulator, LESSON_ROUNDS):
        for seen, judge, one, kept in zip(rounds, judges, related, found, strict=True):
            judge.settle(one.graph)
            if judge.residuals(seen, one, served, (np.zeros(len(one.graph.nodes), dtype=np.bool_), None)).warm:
                kept[1].append(judge.sums.node[-1])
                kept[2].append(judge.sums.port[-1].reshape(4, -1).astype(np.float16))
                kept[3].append(judge.sums.effect[-1])
    return found


def _quantiles(sums: list[F32]) -> F32:
    """channels × levels: what sums exceed, on the side that means sick, with probabilities 10^-level; ascending, above zero."""
    import numpy as np

    joined = np.concatenate(sums, axis=1)
    found = np.stack([np.quantile(joined, 1.0 - 10.0**-level, axis=1) for level in LEVELS], axis=1)
    return np.maximum.accumulate(np.maximum(found, 1e-3 * np.arange(1, len(LEVELS) + 1)), axis=1).astype(np.float32)


def _gains(run: Proof, made: Any) -> dict[str, list[float]]:
    """The largest gain that a cause of each kind, and the largest mean gain that a node (`steady`) keeps for two rounds, in each round of a
    run, prices not paid, except for how restless the job is."""
    import numpy as np

    from detectors.relation.attribution import CROWDED, KINDS, borne_out, candidates, own_of_group, third, unexplained
    from detectors.relation.judge import Evidence, Judge, Sums
    from detectors.relation.opinions import Opinions

    graph, nodes, ports, effects = run
    free = dict.fromkeys((*KINDS, "steady"), 0.0)
    found: dict[str, list[float]] = {kind: [] for kind in free}
    rails = ports[0].shape[1] // len(graph.nodes)
    judge = Judge(nodes=list(graph.nodes))
    judge.past.port = np.zeros((4, len(graph.nodes), rails), dtype=np.float32)
    judge.sums, opinions = Sums(), Opinions()
    before: dict[tuple[str, str], float] = {}
    lately = np.zeros(len(graph.nodes), dtype=np.float32)
    for node, port, effect in zip(nodes, ports, effects, strict=True):
        judge.sums.put(node, port.astype(np.float32).reshape(4, len(graph.nodes), rails), effect)
        seen = judge.evidence(made)
        evidence = Evidence(own_of_group(seen.node, graph), seen.port)
        paid = opinions.prices(free)
        # that step clocks say late is asked in service only: it is not to make the price lower
        mean = borne_out(opinions.steady(evidence.node), opinions.lately[-1])
        opinions.learn(False)
        now = {cause.key: cause.gain for cause in candidates(evidence, graph, paid, tuple(map(str, range(rails))))}
        steady = {key: min(gain, before.get(key, 0.0)) for key, gain in now.items()}
        before = now
        for kind in KINDS:
            most = max((gain for key, gain in steady.items() if key[0] == kind), default=0.0)
            found[kind].append(most)
        beyond = unexplained(evidence.node)
        mean -= beyond * max(paid["restless_steady"], CROWDED * third(mean * beyond))
        found["steady"].append(max(float(np.minimum(mean, lately).max()), 0.0))
        lately = mean
    return found


def _price(gains: list[float], node_rounds: int) -> float:
    """What a gain exceeds by chance once in so many node-rounds, if the tail beyond the last hundredth is exponential."""
    import numpy as np

    values = np.array(gains)
    start = float(np.quantile(values, 0.99))
    excess = values[values > start] - start
    slope = max(1.0, float(excess.mean()) if excess.size else 1.0)
    return max(LEAST_PRICE, start + slope * float(np.log(0.01 * node_rounds / 128)))


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return -NormalDist().inv_cdf(probability)


def _card(
    plan: Plan | None, each: int, rows: int, losses: list[float], seconds: int, prices: dict[str, float]
) -> dict[str, Any]:
    from collectors.simulated.spec import VERSION

    proofs = max(2, each // 2) * len(PROFILES)
    found: dict[str, Any] = {
        "model": "relation: what each node shows beyond its own past and its relatives' medians", "simulator_version": VERSION,
        "data": f"{proofs} simulated runs of {LESSON_ROUNDS} rounds of 5 s at 128 nodes, seeds from {FIRST_PROOF}, for calibration; no "
        "machine is at fault in any", "kinds_in_training": list(LESSON_KINDS),
        "prices": {name: round(price, 2) for name, price in prices.items()}, "seconds": seconds,
        "limits": "Results on simulated data are results about that model of a cluster; no real cluster's telemetry was seen.",
    }  # fmt: skip
    return found if plan is None else found | _card_of_net(plan, each, rows, losses)


def _card_of_net(plan: Plan, each: int, rows: int, losses: list[float]) -> dict[str, Any]:
    from models.relation import net

    lessons_of = f"{each * len(PROFILES)} further runs, seeds from {FIRST_LESSON + 1000 * plan.seed}"
    return {"net": lessons_of, "plan": asdict(plan), "rows": rows, "held_out_loss": [round(x, 5) for x in losses],
            "torch": net.TORCH_VERSION}  # fmt: skip
