"""A node's link, a leaf, or the fabric: settled by probes between nodes and by the carrier, never by step timings.

A slow or lost row and column is one node's link; a block is a leaf; everything at once is the fabric, and nobody is to blame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.mesh.blame import Explanation, explain
from detectors.mesh.pairs import RING, Pairs
from detectors.robust import median_of_known
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_MS, NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, StepRow, Verdict
from trainwarden.settings import option

_RAIL, _UNKNOWN_ROLE = 1, 0
_KEPT_STEPS = 400


@dataclass(frozen=True)
class MeshSettings:
    """Settings of `mesh_links`."""

    window_ticks: int = option(5, "round trips are judged by their median over so many ticks")
    warm_ticks: int = option(6, "answers of a pair before it can be called slow")
    factor: float = option(3.0, "a slow pair takes so many times its own usual round trip")
    floor_ms: float = option(1.0, "and longer than usual by at least so much")
    sure_ms: float = option(3.0, "a node without a job is named only when its round trips are longer by so much")
    suffering_ratio: float = option(
        1.2, "a slow link is named only while its job suffers: steps take so many times their usual time"
    )
    standing_s: float = option(
        1.5, "or no step has come for so long; probes alone call a link dead only when its job stands like this"
    )
    slow_s: float = option(3.0, "how long a link must look slow before it is said")
    fabric_s: float = option(5.0, "how long the whole fabric must look slow before it is said")
    fabric_job_ratio: float = option(
        1.5, "the fabric is blamed only while the steps of a job take so many times their usual time"
    )
    dead_ticks: int = option(2, "a link is down after so many ticks without any answer, or without carrier")
    flaps: int = option(
        2, "a link flaps, which counts as down, after so many separate losses of carrier within flap_window_s"
    )
    flap_window_s: float = option(60.0, "window in which losses of carrier are counted")
    losses: int = option(
        2, "ticks within half a minute in which single probes to one node were lost, before losses count"
    )
    loss_risk: float = option(5e-3, "and as unlikely as this must they be at the loss rate that the mesh usually has")
    stalls: int = option(5, "losses count only while steps stall: so many stalled steps within stall_window_s")
    stall_ms: float = option(150.0, "a stalled step takes so much longer than usual")
    stall_window_s: float = option(25.0, "window in which stalled steps are counted")
    quiet_s: float = option(6.0, "a slow link or fabric is taken back after so long without a sign of it")
    hold_s: float = option(20.0, "the same for a link that was down or lost probes")
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Carrier(msgspec.Struct):
    """One rail interface: for how many ticks its carrier was there or not, and when it was lost."""

    up_ticks: int = 0
    down_ticks: int = 0
    down_since_ns: int = 0
    drops_ns: list[int] = []


class Opinion(msgspec.Struct):
    """Something said about a place and not yet taken back.

    `first_ns` is when the picture began, `said_ns` 0 while it is only a suspicion.
    """

    kind: str
    place: str
    first_ns: int
    last_ns: int
    said_ns: int = 0
    value: float = 0.0
    why: str = ""
    job: str = ""
    attempt: int = 0
    rank: int = -1


class Pace(msgspec.Struct):
    """A job's usual step time, and its newest ones."""

    usual_ms: float = 0.0
    steps: int = 0
    newest_ms: list[float] = []
    newest_step: int = -1
    newest_ns: int = 0
    stalls_ns: list[int] = []

    def ratio(self) -> float:
        """Newest over usual."""
        return float(np.median(self.newest_ms)) / self.usual_ms if self.steps > 20 and self.newest_ms else 0.0


class State(msgspec.Struct):
    """State of the detector."""

    pairs: Pairs
    carriers: dict[str, Carrier] = {}
    opinions: dict[str, Opinion] = {}
    paces: dict[str, Pace] = {}
    absent: dict[str, int] = {}


class MeshLinkDetector(Detector):
    """Says `link_slow`, `link_down` or `fabric_slow`."""

    name = "mesh_links"
    kinds = ("link_slow", "link_down", "fabric_slow")
    Settings = MeshSettings
    settings: MeshSettings

    def __init__(self, settings: MeshSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State(Pairs())

    def update(self, frame: Frame) -> list[Verdict]:
        self._follow_steps(frame)
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            self._follow_absence(tick)
            self._follow_carriers(tick)
            matrix = tick.family("mesh")
            if matrix is not None:
                self._state.pairs.put(tick.at_ns, matrix)
            self._suspect(tick, frame, matrix is not None)
            verdicts += self._speak(tick, frame)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Probes to and from node 3 take 15 ms longer from second 30 on, and so do the steps."""
        frames = SyntheticCluster(seed=1).frames(
            45, lambda second: Scene(rtt_ms={3: 15.0}, network_ms=300.0) if second >= 30 else None
        )
        return Example(frames, "link_slow", node_entity(3))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    # --- what is seen --------------------------------------------------------------------------------------------------------

    def _follow_steps(self, frame: Frame) -> None:
        """Each step once, by whoever reports it first: in a synchronous job all ranks take equally long."""
        for report in frame.steps:
            pace = self._state.paces.setdefault(report.job, Pace())
            if report.rows and report.rows[-1].step < pace.newest_step - 100:
                pace.newest_step = -1
            self._follow_rows(pace, [row for row in report.rows if row.step > pace.newest_step])
            horizon_ns = report.observed_at_ns - int(self.settings.stall_window_s * NS_PER_S)
            pace.stalls_ns = [at for at in pace.stalls_ns if at >= horizon_ns][-256:]
        running = {layout.job for layout in frame.topology.jobs()} | {report.job for report in frame.steps}
        self._state.paces = {job: pace for job, pace in self._state.paces.items() if job in running}

    def _follow_rows(self, pace: Pace, rows: list[StepRow]) -> None:
        plain = [row for row in rows if row.phase in ("train", "") and math.isfinite(row.duration_ms)]
        pace.newest_step = max((row.step for row in rows), default=pace.newest_step)
        pace.newest_ns = max(
            (row.started_at_ns + int(row.duration_ms * NS_PER_MS) for row in plain), default=pace.newest_ns
        )
        pace.newest_ms = [*pace.newest_ms, *(row.duration_ms for row in plain)][-8:]
        usual_now = pace.steps <= 20 or pace.ratio() < self.settings.fabric_job_ratio
        for row in plain:
            learnt = pace.steps > 20
            if learnt and row.duration_ms > pace.usual_ms + self.settings.stall_ms:
                pace.stalls_ns.append(row.started_at_ns)
            if usual_now:
                bounded = min(row.duration_ms, 2.0 * pace.usual_ms) if learnt else row.duration_ms
                pace.usual_ms += max(1.0 / (pace.steps + 1), 1.0 / _KEPT_STEPS) * (bounded - pace.usual_ms)
            pace.steps += 1

    def _follow_absence(self, tick: AlignedTick) -> None:
        before = self._state.absent
        here = zip(tick.nodes, tick.present.tolist(), strict=True)
        self._state.absent = {node: before.get(node, 0) + 1 for node, present in here if not present}

    def _follow_carriers(self, tick: AlignedTick) -> None:
        matrix = tick.family("nic")
        if matrix is None:
            return
        carrier, role, changes = matrix.column("carrier"), matrix.column("role"), matrix.column("carrier_changes_per_s")
        seen = set()
        for row, (node, device) in enumerate(matrix.entities):
            known_role = int(role[row]) if math.isfinite(role[row]) else _UNKNOWN_ROLE
            if known_role in (_RAIL, _UNKNOWN_ROLE) and math.isfinite(carrier[row]) and device != "lo":
                seen.add(f"{node}/{device}")
                port = self._state.carriers.setdefault(f"{node}/{device}", Carrier())
                self._note_carrier(port, tick.at_ns, bool(carrier[row] > 0), bool(changes[row] > 0))
        gone = {node for node in self._state.absent if self._state.absent[node] > 0}
        self._state.carriers = {
            key: port for key, port in self._state.carriers.items() if key in seen or key.partition("/")[0] in gone
        }

    def _note_carrier(self, port: Carrier, at_ns: int, up: bool, changed: bool) -> None:
        was_up = port.up_ticks > 0 or (port.down_ticks == 0 and not up)
        lost = port.up_ticks >= 2 and (changed or not up)
        if lost and (not port.drops_ns or at_ns - port.drops_ns[-1] > 2 * NS_PER_S):
            port.drops_ns = [*port.drops_ns[-31:], at_ns]
        if up:
            port.up_ticks, port.down_ticks = port.up_ticks + 1, 0
        elif port.down_ticks or (was_up and port.up_ticks >= 2):
            port.down_since_ns = port.down_since_ns if port.down_ticks else at_ns
            port.down_ticks, port.up_ticks = port.down_ticks + 1, 0
        horizon_ns = at_ns - int(self.settings.flap_window_s * NS_PER_S)
        port.drops_ns = [drop for drop in port.drops_ns if drop >= horizon_ns]

    # --- what it means -------------------------------------------------------------------------------------------------------

    def _suspect(self, tick: AlignedTick, frame: Frame, probed: bool) -> None:
        for key, port in self._state.carriers.items():
            node = key.partition("/")[0]
            if port.down_ticks >= self.settings.dead_ticks:
                self._support("link_down", node, port.down_since_ns, tick.at_ns, 1.0, "its interface has no carrier")
            elif len(port.drops_ns) >= self.settings.flaps and port.drops_ns[-1] == tick.at_ns:
                why = (
                    f"its interface lost carrier {len(port.drops_ns)} times within {self.settings.flap_window_s:.0f} s"
                )
                self._support("link_down", node, port.drops_ns[0], tick.at_ns, float(len(port.drops_ns)), why)
        if probed and self._state.pairs.keys:
            self._suspect_probes(tick, frame)

    def _suspect_probes(self, tick: AlignedTick, frame: Frame) -> None:
        settings, pairs = self.settings, self._state.pairs
        typical = pairs.typical_rtt(settings.window_ticks, 2)
        slow = pairs.slow(typical, settings.warm_ticks, settings.factor, settings.floor_ms)
        answered = pairs.known >= settings.warm_ticks
        dead = answered & pairs.dead(settings.dead_ticks)
        if dead.any():
            self._support_found("link_down", explain(pairs.keys, dead, frame.topology), tick, frame, dead, typical)
        self._support_found("link_slow", explain(pairs.keys, slow | dead, frame.topology), tick, frame, slow, typical)
        self._suspect_losses(tick, dead | ~answered)
        pairs.learn(np.asarray(~(slow | dead)))

    def _support_found(
        self, kind: str, found: Explanation, tick: AlignedTick, frame: Frame, bad: Array, typical: Array
    ) -> None:
        pairs, back = self._state.pairs, self.settings.window_ticks // 2 * NS_PER_S
        value = float(np.nanmedian(typical[bad])) if np.isfinite(typical[bad]).any() else 0.0
        usual = float(np.median(np.exp(pairs.log_base[bad]))) if bad.any() else 0.0
        first_ns = tick.at_ns - (back if kind == "link_slow" else tick.interval_ms * 1_000_000)
        for node in found.nodes:
            lost = (
                "probes to and from it are lost"
                if kind == "link_down"
                else f"probes take {value:.1f} ms (usual {usual:.2f} ms)"
            )
            if self._is_felt(kind, node, value - usual, tick, frame):
                self._support(kind, node, first_ns, tick.at_ns, value, f"{lost}, those that do not touch it are well")
        if found.leaf:
            why = "probes to most of its nodes suffer, those elsewhere do not"
            self._support(kind, f"leaf:{found.leaf}", first_ns, tick.at_ns, value, why)
        if found.fabric and any(pace.ratio() >= self.settings.fabric_job_ratio for pace in self._state.paces.values()):
            why = f"probes take {value:.1f} ms (usual {usual:.2f} ms) between all nodes"
            self._support("fabric_slow", "fabric:", first_ns, tick.at_ns, value, why)

    def _is_felt(self, kind: str, node: str, rise_ms: float, tick: AlignedTick, frame: Frame) -> bool:
        """Whether the node's job feels what the probes see; a node that is silent altogether is another detector's business."""
        if self._state.absent.get(node, 0):
            return False
        layout = frame.topology.job_of(node)
        pace = self._state.paces.get(layout.job) if layout is not None else None
        if pace is None or pace.steps <= 20:
            return layout is None and (kind == "link_down" or rise_ms >= self.settings.sure_ms)
        # a clock that runs ahead must not make a standing job look busy
        newest_ns = pace.newest_ns if pace.newest_ns < tick.at_ns + 5 * NS_PER_S else 0
        stands = tick.at_ns - newest_ns >= self.settings.standing_s * NS_PER_S
        return stands or (kind == "link_slow" and pace.ratio() >= self.settings.suffering_ratio)

    def _suspect_losses(self, tick: AlignedTick, left_out: Array) -> None:
        """A node that loses single probes while the others do not, and while steps stall as they do when segments are sent again."""
        pairs, settings = self._state.pairs, self.settings
        slots = pairs.recent(RING)
        lost, sent = (
            np.where(left_out[:, None], 0.0, pairs.lost[:, slots]),
            np.where(left_out[:, None], 0.0, pairs.sent[:, slots]),
        )
        stalls = max((len(pace.stalls_ns) for pace in self._state.paces.values()), default=0)
        if lost[:, -1].sum() == 0 or stalls < settings.stalls:
            return
        names, index = np.unique(np.array([target for _, target in pairs.keys]), return_inverse=True)
        by_tick = np.zeros((len(names), len(slots)))
        np.add.at(by_tick, index, lost)
        by_tick[:, (by_tick > 0).sum(axis=0) * 2 > max(len(names), 2)] = 0.0
        totals, probes = by_tick.sum(axis=1), np.bincount(index, weights=sent.sum(axis=1))
        worst = int(np.argmax(totals))
        witnesses = int((lost[index == worst].sum(axis=1) > 0).sum())
        enough = (by_tick[worst] > 0).sum() >= settings.losses and by_tick[worst, -1] > 0
        if not enough or len(names) < 3 or witnesses < min(2, int((index == worst).sum() + 1) // 2):
            return
        others = float(totals.sum() - totals[worst])
        rate = max(pairs.usual_loss_rate(), others / max(float(probes.sum() - probes[worst]), 100.0))
        if _at_least(int(totals[worst]), rate * float(probes[worst])) < settings.loss_risk:
            first_ns = int(pairs.times[slots[int(np.argmax(by_tick[worst] > 0))]])
            why = f"{int(totals[worst])} of {int(probes[worst])} probes to it were lost, of the others {int(others)}"
            self._support(
                "link_slow", str(names[worst]), first_ns, tick.at_ns, float(totals[worst] / probes[worst]), why
            )

    def _support(self, kind: str, place: str, first_ns: int, at_ns: int, value: float, why: str) -> None:
        known = self._state.opinions.get(place)
        if known is not None and known.kind in {kind, "link_down"}:
            known.last_ns, known.value, known.why = at_ns, value, why if known.kind == kind else known.why
            return
        first_ns = min(first_ns, known.first_ns) if known is not None else first_ns
        self._state.opinions[place] = Opinion(kind, place, first_ns, at_ns, 0, value, why)

    # --- saying it -----------------------------------------------------------------------------------------------------------

    def _speak(self, tick: AlignedTick, frame: Frame) -> list[Verdict]:
        verdicts = []
        for place, opinion in sorted(self._state.opinions.items()):
            quiet_s = (tick.at_ns - opinion.last_ns) / NS_PER_S
            if not opinion.said_ns and quiet_s > 2.5:
                del self._state.opinions[place]
            elif opinion.said_ns and quiet_s > self._hold_s(opinion):
                del self._state.opinions[place]
                verdicts.append(self._say(opinion, tick.at_ns, clears=True))
            elif quiet_s == 0 and self._is_ripe(opinion, tick.at_ns):
                self._place_job(opinion, frame)
                opinion.said_ns = tick.at_ns
                verdicts.append(self._say(opinion, tick.at_ns))
        return verdicts

    def _is_ripe(self, opinion: Opinion, at_ns: int) -> bool:
        if opinion.said_ns:
            return at_ns - opinion.said_ns >= self.settings.restate_s * NS_PER_S
        wait_s = {"link_slow": self.settings.slow_s, "fabric_slow": self.settings.fabric_s}.get(opinion.kind, 0.0)
        return at_ns - opinion.first_ns >= wait_s * NS_PER_S and not self._hidden_by_fabric(opinion)

    def _hidden_by_fabric(self, opinion: Opinion) -> bool:
        fabric = self._state.opinions.get("fabric:")
        return fabric is not None and opinion.kind == "link_slow" and fabric.last_ns >= opinion.last_ns - 3 * NS_PER_S

    def _hold_s(self, opinion: Opinion) -> float:
        return self.settings.hold_s if opinion.kind == "link_down" or "lost" in opinion.why else self.settings.quiet_s

    def _place_job(self, opinion: Opinion, frame: Frame) -> None:
        layout = frame.topology.job_of(opinion.place)
        if layout is not None:
            opinion.job, opinion.attempt, opinion.rank = (
                layout.job,
                layout.attempt,
                min(layout.ranks_on(opinion.place), default=-1),
            )
        elif opinion.kind == "fabric_slow" and len(frame.topology.jobs()) == 1:
            opinion.job, opinion.attempt = frame.topology.jobs()[0].job, frame.topology.jobs()[0].attempt

    def _say(self, opinion: Opinion, at_ns: int, clears: bool = False) -> Verdict:
        entity, name = _entity(opinion.place)
        text = f"{name} is well again" if clears else f"{name}: {opinion.why}"
        return self.verdict(
            kind=opinion.kind, entity=entity, window=(min(opinion.first_ns, at_ns), at_ns), onset_at_ns=opinion.first_ns, job=opinion.job,
            attempt=opinion.attempt, rank=opinion.rank, score=opinion.value, value=opinion.value,
            confidence=0.96 if opinion.kind == "link_down" else 0.9, text=text, clears=clears, evidence=self._evidence(opinion),
        )  # fmt: skip

    def _evidence(self, opinion: Opinion) -> tuple[Evidence, ...]:
        pairs = self._state.pairs
        slots = pairs.recent(20)
        times = [int(at) for at in pairs.times[slots]]
        found = []
        for label, mine in (("to", True), ("between others, not", False)):
            rows = np.array([(target == opinion.place) is mine for _, target in pairs.keys], dtype=np.bool_)
            if not rows.any():
                continue
            middle = median_of_known(pairs.rtt_ms[rows][:, slots])
            note = f"lost {int(pairs.lost[rows][:, slots].sum())} of {int(pairs.sent[rows][:, slots].sum())} probes"
            found.append(
                series_evidence(f"probe round trip {label} {opinion.place}", "ms", times, middle.tolist(), note=note)
            )
        ports = [
            (key, port)
            for key, port in self._state.carriers.items()
            if key.startswith(f"{opinion.place}/") and port.drops_ns
        ]
        found += [
            series_evidence(f"carrier lost on {key}", "event", port.drops_ns, [1.0] * len(port.drops_ns))
            for key, port in ports
        ]
        return tuple(found)


def _entity(place: str) -> tuple[Entity, str]:
    kind, _, name = place.partition(":")
    if kind == "fabric" and place.endswith(":"):
        return Entity(EntityKind.FABRIC, "fabric"), "the fabric"
    if kind == "leaf" and name:
        return Entity(EntityKind.LEAF, name), f"leaf {name}"
    return Entity(EntityKind.NODE, place, place), f"the link of {place}"


def _at_least(count: int, mean: float) -> float:
    """Poisson probability of `count` or more."""
    below = sum(math.exp(-mean + k * math.log(max(mean, 1e-12)) - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - below)
