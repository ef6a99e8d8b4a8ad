"""A node's link, a leaf, a rail, or the fabric: settled by probes between nodes and by the carrier, never by step timings.

A slow or lost row and column is one node's link; all that passes a leaf or a rail is that shared part, and no node; everything at once is
the fabric, and nobody is to blame.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, Frame, series_evidence
from detectors.mesh.blame import Explanation, blame, blame_ways
from detectors.mesh.congestion import raised_everywhere
from detectors.mesh.losses import Lossy, crowded, least_losses, loser, lossy_everywhere, quiet_rate
from detectors.mesh.pace import Pace, PaceLimits, follow
from detectors.mesh.pairs import RING, Pairs
from detectors.mesh.parts import Parts, facts_of, nodes_of, parts_of
from detectors.mesh.ports import Ports
from detectors.mesh.rows import Rows
from detectors.mesh.surges import MARKED, RESENT_RDMA, RESENT_TCP, Owners, Surges
from detectors.risk import poisson_at_least
from detectors.robust import median_of_known
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Evidence, Reach, Verdict
from trainwarden.settings import option
from trainwarden.topology import JobLayout, Topology

_FABRIC = "fabric|"
_SUBNET = ("leaf", "rail")
_SMALL_MESH = 4.0
_LEAST_EVEN = 4
_LEAST_WAYS = 5
"""Bad probes before it is asked whether they pass one shared part; weak signs must be more."""
_MUTE, _MUTED_AFTER = 2, 3
"""A node of which nothing came for so many ticks does not answer probes either, nor at once when it speaks again."""


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
    loss_risk: float = option(
        5e-3,
        "and at most so likely may they be at the loss rate that the mesh usually has; a mesh of more than four nodes allows less",
    )
    stalls: int = option(5, "losses count only while steps stall: so many stalled steps within stall_window_s")
    stall_ms: float = option(150.0, "a stalled step takes so much longer than usual")
    stall_window_s: float = option(25.0, "window in which stalled steps are counted")
    resent_posterior: float = option(
        0.9,
        "while few nodes of a job send far more again than ever, its lossy node is named at this probability among the nodes of the job",
    )
    sure_loss_risk: float = option(
        1e-9, "probes alone name a node that loses packets when chance would show as much with at most this probability"
    )
    fabric_loss_risk: float = option(
        1e-4,
        "the fabric loses packets when beside its worst node chance would show as many lost probes with at most this probability",
    )
    even_factor: float = option(
        2.0,
        "or when all nodes of a job that suffers, four at least, send far more again than ever, none so many times the median",
    )
    sure_loss_s: float = option(8.0, "and when the losses spread over so long")
    marked_share: float = option(
        0.6,
        "the fabric is congested when this share of the nodes gets more congestion marks than ever, and of the probes is raised",
    )
    marked_s: float = option(10.0, "for so long")
    marked_deviations: float = option(
        3.0, "while the newest steps of a job lie above its usual ones by so many standard errors"
    )
    subnet_s: float = option(4.0, "how long a leaf or a rail must look slow before it is said")
    subnet_factor: float = option(
        1.3, "probes through one leaf or rail count as raised at so many times their usual round trip"
    )
    subnet_sure_factor: float = option(
        3.0,
        "it is said also while no job is known to suffer, when its raised probes take so many times as long as usual",
    )
    subnet_floor_ms: float = option(0.03, "and longer than usual by at least so much")
    quiet_s: float = option(6.0, "a slow link or fabric is taken back after so long without a sign of it")
    hold_s: float = option(20.0, "the same for a link that was down or lost probes")
    restate_s: float = option(10.0, "while a fault lasts, it is said again after so long")


class Opinion(msgspec.Struct):
    """Something said about a place (``"<kind of entity>|<name>"``) and not yet taken back.

    `first_ns` is when the picture began, `said_ns` 0 while it is only a suspicion. What is `mild` no job suffers from yet: it is told, and
    nobody is taken away for it.
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
    mild: bool = False


class State(msgspec.Struct):
    """State of the detector."""

    pairs: Pairs
    ports: Ports
    opinions: dict[str, Opinion] = {}
    paces: dict[str, Pace] = {}
    absent: dict[str, int] = {}
    surges: Surges = msgspec.field(default_factory=Surges)
    muted: dict[str, int] = {}


class MeshLinkDetector(Detector):
    """Says `link_slow`, `link_down`, `subnet_slow` or `fabric_slow`."""

    name = "mesh_links"
    version = 5
    kinds = ("link_slow", "link_down", "subnet_slow", "fabric_slow")
    false_alarms_per_node_day = 2e-3
    Settings = MeshSettings
    settings: MeshSettings

    def __init__(self, settings: MeshSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State(Pairs(), Ports())
        self._parts: Parts | None = None
        self._owners, self._port_rows, self._pair_rows = Owners(), Rows(), Rows()
        self._parts_of: tuple[tuple[tuple[str, str], ...], list[dict[str, str]], Topology | None] = ((), [], None)
        chosen = self.settings
        self._limits = PaceLimits(chosen.fabric_job_ratio, chosen.stall_ms, chosen.stall_window_s)

    def update(self, frame: Frame) -> list[Verdict]:
        self._state.paces = follow(self._state.paces, frame.steps, frame.topology, self._limits)
        verdicts: list[Verdict] = []
        for tick in frame.ticks:
            self._follow_absence(tick)
            if (interfaces := tick.family("nic")) is not None:
                self._state.ports.put(
                    tick, interfaces, self._state.absent, self.settings.flap_window_s, self._port_rows
                )
            if (probes := tick.family("mesh")) is not None:
                self._state.pairs.put(tick.at_ns, probes, self._pair_rows)
                self._excuse_silent(frame.topology)
            self._state.surges.put(tick, self._owners)
            self._suspect_ports(tick, frame.topology)
            if probes is not None and self._state.pairs.keys:
                self._suspect_probes(tick, frame)
            verdicts += self._speak(tick, frame)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """Probes to and from node 3 take 15 ms longer from second 30 on, and so do the steps."""
        frames = SyntheticCluster(seed=1).frames(
            45, lambda second: Scene(rtt_ms={3: 15.0}, network_ms=300.0) if second >= 30 else None
        )
        return Example(frames, "link_slow", node_entity(3))

    def coverage(self) -> dict[str, tuple[int, int]]:
        """Pairs of nodes whose usual round trip is known."""
        known = self._state.pairs.known
        return {"pairs": (int((known >= self.settings.warm_ticks).sum()), len(known))}

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    # --- what is seen --------------------------------------------------------------------------------------------------------

    def _follow_absence(self, tick: AlignedTick) -> None:
        if tick.present.all():
            self._state.absent = {}
            return
        before = self._state.absent
        here = zip(tick.nodes, tick.present.tolist(), strict=True)
        self._state.absent = {node: before.get(node, 0) + 1 for node, present in here if not present}

    def _excuse_silent(self, topology: Topology) -> None:
        """Probes to a node whose collector hangs are lost whatever its link does, and those that it finds when it wakes are very late."""
        absent, muted = self._state.absent, self._state.muted
        if not muted and all(ticks < _MUTE for ticks in absent.values()):
            return
        left = {node: ticks - 1 for node, ticks in muted.items() if ticks > 1}
        self._state.muted = left | {node: _MUTED_AFTER for node, ticks in absent.items() if ticks >= _MUTE}
        parts = self._passed(topology)
        for ticks, nodes in ((1, set(muted) | set(self._state.muted)), (_MUTE, set(self._state.muted) - set(muted))):
            if nodes:
                mine = np.array([node in nodes for node in parts.nodes], dtype=np.bool_)
                self._state.pairs.excuse(np.asarray(mine[parts.ends].any(axis=1)), ticks)

    def _passed(self, topology: Topology) -> Parts:
        """The parts that probes pass; worked out again when probes or the attributes of nodes change."""
        keys, (of, known, looked_at) = self._state.pairs.keys, self._parts_of
        if self._parts is not None and of is keys and looked_at is topology:
            return self._parts
        nodes = self._parts.nodes if self._parts is not None and of is keys else nodes_of(keys)
        seen = [topology.attributes(node) for node in nodes]
        same = of is keys and len(known) == len(seen) and all(a is b for a, b in zip(known, seen, strict=True))
        if self._parts is None or not same:
            self._parts = parts_of(keys, nodes, facts_of(nodes, topology))
        self._parts_of = keys, seen, topology
        return self._parts

    # --- what it means -------------------------------------------------------------------------------------------------------

    def _suspect_ports(self, tick: AlignedTick, topology: Topology) -> None:
        ports, settings = self._state.ports, self.settings
        down = np.flatnonzero(ports.down_ticks > 0).tolist()
        if not down and not ports.drops_ns:
            return
        crowded = self._crowded({ports.keys[row][0] for row in (*down, *ports.drops_ns)}, tick, topology)
        for row in sorted({*down, *ports.drops_ns}, key=lambda row: ports.keys[row]):
            node, drops = ports.keys[row][0], ports.drops_ns.get(row, [])
            if node in crowded:
                continue
            if ports.down_ticks[row] >= settings.dead_ticks:
                why = "its interface has no carrier"
                self._support("link_down", f"node|{node}", int(ports.down_since_ns[row]), tick.at_ns, 1.0, why)
            elif len(drops) >= settings.flaps and drops[-1] == tick.at_ns:
                why = f"its interface lost carrier {len(drops)} times within {settings.flap_window_s:.0f} s"
                self._support("link_down", f"node|{node}", drops[0], tick.at_ns, float(len(drops)), why)

    def _crowded(self, hurt: set[str], tick: AlignedTick, topology: Topology) -> set[str]:
        """Nodes that lost their carrier with many others of their leaf: its switch, not they; the leaf is said where it is clear."""
        if len(hurt) < 3:
            return set()
        leaf_of = {node: topology.attributes(node).get("leaf", "") for node in tick.nodes}
        crowd: set[str] = set()
        for leaf in sorted({leaf_of.get(node, "") for node in hurt} - {""}):
            below = [node for node, where in leaf_of.items() if where == leaf]
            struck = [node for node in below if node in hurt]
            if len(struck) >= 3 and 4 * len(struck) > len(below):
                crowd |= set(struck)
                if 3 * len(struck) >= 2 * len(below) and len(below) < len(leaf_of):
                    why = f"{len(struck)} of the {len(below)} nodes below it lost their carrier"
                    self._support("subnet_slow", f"leaf|{leaf}", tick.at_ns, tick.at_ns, float(len(struck)), why)
        return crowd

    def _suspect_probes(self, tick: AlignedTick, frame: Frame) -> None:
        settings, pairs = self.settings, self._state.pairs
        typical = pairs.typical_rtt(settings.window_ticks, 2)
        slow = pairs.slow(typical, settings.warm_ticks, settings.factor, settings.floor_ms)
        answered = pairs.known >= settings.warm_ticks
        dead = answered & pairs.dead(settings.dead_ticks)
        known = answered & (np.isfinite(typical) | dead)
        if dead.any():
            self._support_found(
                "link_down", blame(self._passed(frame.topology), dead, known), tick, frame, dead, typical
            )
        found = Explanation()
        if slow.any() or dead.any():
            found = blame(self._passed(frame.topology), slow | dead, known)
            self._support_found("link_slow", found, tick, frame, slow, typical)
        self._suspect_losses(tick, frame, dead | ~answered)
        self._suspect_resending(tick, frame)
        self._suspect_sure_losses(tick, frame, dead | ~answered)
        self._suspect_lossy_fabric(tick, frame, dead | ~answered)
        self._suspect_resending_everywhere(tick, frame)
        self._suspect_congestion(tick, frame, typical, known)
        self._suspect_shared(tick, frame, typical, slow | dead, known, found == Explanation())
        held = self._through_blamed(frame.topology) | self._between_marked(frame.topology)
        pairs.learn(np.asarray(~(slow | dead | held)))

    def _suspect_shared(
        self, tick: AlignedTick, frame: Frame, typical: Array, strong: Array, known: Array, puzzling: bool
    ) -> None:
        """A leaf or rail through which all probes are a little slower: too little to blame a node for, clear by their number. Or, of
        those that are much slower and that nothing else explains (`puzzling`), some."""  # fmt: skip
        settings, pairs = self.settings, self._state.pairs
        raised = strong | pairs.slow(
            typical, settings.warm_ticks, settings.subnet_factor, settings.subnet_floor_ms, z=2.5
        )
        said = {
            place
            for place, opinion in self._state.opinions.items()
            if opinion.kind == "subnet_slow" and opinion.said_ns
        }
        felt = any(pace.ratio() >= settings.suffering_ratio for pace in self._state.paces.values())
        felt = felt or (bool(self._state.surges.surging(MARKED)) and self._is_measurable())
        only, found = None if felt else said, Explanation()
        if raised.sum() > _LEAST_WAYS:
            found = blame(self._passed(frame.topology), raised, known, weak=True)
        if not found.fabric:
            self._support_subnets(found, raised, typical, tick, frame, only)
        if puzzling and raised.sum() >= 2 and not (found.fabric or found.leaves or found.rails):
            self._suspect_few(tick, frame, typical, strong, known, only)

    def _suspect_few(
        self, tick: AlignedTick, frame: Frame, typical: Array, strong: Array, known: Array, only: set[str] | None
    ) -> None:
        """Plain signs that neither a node nor a whole shared part explains: some ways through a part, or one port."""
        settings, pairs = self.settings, self._state.pairs
        plain = strong | pairs.slow(typical, settings.warm_ticks, settings.subnet_sure_factor, settings.subnet_floor_ms)
        if plain.sum() >= _LEAST_WAYS:
            ways = blame_ways(self._passed(frame.topology), plain, known)
            self._support_subnets(ways, plain, typical, tick, frame, only)
        self._suspect_single_ports(tick, frame, typical, plain, known)

    def _suspect_single_ports(
        self, tick: AlignedTick, frame: Frame, typical: Array, plain: Array, known: Array
    ) -> None:
        """One port of several whose probes take a multiple of their usual time, too short to hurt by itself, while its job is measurably
        slower: where a round trip takes 40 us nothing waits for a millisecond. It is told, and nobody is taken away for it."""  # fmt: skip
        told = {o.place for o in self._state.opinions.values() if o.kind == "link_slow" and o.said_ns}
        if not plain.any() or not (told or self._is_measurable()):
            return
        found = blame(self._passed(frame.topology), plain, known)
        if found.fabric or found.leaves or found.rails:
            return
        first_ns = tick.at_ns - self.settings.window_ticks // 2 * NS_PER_S
        for node, rail in found.rails_of.items():
            if self._state.absent.get(node, 0) or not (f"node|{node}" in told or self._is_slower(node, frame.topology)):
                continue
            mine = plain & self._ends_at(node, frame.topology)
            value, usual = float(np.median(typical[mine])), float(np.median(np.exp(self._state.pairs.log_base[mine])))
            why = (
                f"probes over rail {rail} take {value:.2f} ms (usual {usual:.2f} ms), those over its other rails do not"
            )
            self._support("link_slow", f"node|{node}", first_ns, tick.at_ns, value, why, mild=True)

    def _is_slower(self, node: str, topology: Topology) -> bool:
        """Whether the node's job goes measurably slower; it gets used to that, so what was said stands without."""
        layout = topology.job_of(node)
        pace = self._state.paces.get(layout.job) if layout is not None else None
        return pace is not None and pace.deviations() >= self.settings.marked_deviations

    def _ends_at(self, node: str, topology: Topology) -> Array:
        """Probes from and to a node."""
        parts = self._passed(topology)
        return parts.passing(parts.number[node])

    def _is_measurable(self) -> bool:
        """Whether some job goes slower, by however little, than its usual scatter explains."""
        return any(pace.deviations() >= self.settings.marked_deviations for pace in self._state.paces.values())

    def _between_marked(self, topology: Topology) -> Array:
        """Probes between nodes that both get more congestion marks than ever: what is usual is not learnt there now."""
        marked = self._state.surges.surging(MARKED)
        if not marked:
            return np.zeros(len(self._state.pairs.keys), dtype=np.bool_)
        parts = self._passed(topology)
        return np.asarray(np.array([node in marked for node in parts.nodes], dtype=np.bool_)[parts.ends].all(axis=1))

    def _through_blamed(self, topology: Topology) -> Array:
        """Probes through a shared part, or of a node's link, under suspicion: what is usual there is not learnt now."""
        places = [o.place.partition("|") for o in self._state.opinions.values()]
        names = {name for kind, _, name in places if kind in _SUBNET}
        nodes = {name for kind, _, name in places if kind == "node"}
        if not names and not nodes:
            return np.zeros(len(self._state.pairs.keys), dtype=np.bool_)
        parts = self._passed(topology)
        shared = [number for name in names for number in parts.shared.get(name, ())]
        return parts.passing(*shared, *(parts.number[node] for node in nodes if node in parts.number))

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
            where = f" over rail {found.rails_of[node]}" if node in found.rails_of else ""
            if self._is_felt(kind, node, value - usual, tick, frame):
                why = f"{lost}{where}, those that do not touch it are well"
                self._support(kind, f"node|{node}", first_ns, tick.at_ns, value, why)
        self._support_subnets(found, bad, typical, tick, frame)
        if found.fabric and any(pace.ratio() >= self.settings.fabric_job_ratio for pace in self._state.paces.values()):
            why = f"probes take {value:.1f} ms (usual {usual:.2f} ms) between all nodes"
            self._support("fabric_slow", _FABRIC, first_ns, tick.at_ns, value, why)

    def _support_subnets(
        self,
        found: Explanation,
        bad: Array,
        typical: Array,
        tick: AlignedTick,
        frame: Frame,
        only: set[str] | None = None,
    ) -> None:
        """`only`: no job suffers that is known. What was said stands (a job gets used to being slow), and what is unmistakable is said."""
        first_ns = tick.at_ns - self.settings.window_ticks // 2 * NS_PER_S
        for kind, names in (("leaf", found.leaves), ("rail", found.rails)):
            for name in names:
                place = f"{kind}|{name}"
                mine = self._through(place, frame.topology) & bad
                known = mine & np.isfinite(typical)
                value = float(np.median(typical[known])) if known.any() else 0.0
                usual = float(np.median(np.exp(self._state.pairs.log_base[mine]))) if mine.any() else 0.0
                if only is not None and place not in only and value < self.settings.subnet_sure_factor * usual:
                    continue
                said = f"take {value:.2f} ms (usual {usual:.2f} ms)" if known.any() else "are lost"
                why = f"probes of {self._hosts(place, mine)} nodes through it {said}, those elsewhere do not"
                self._support("subnet_slow", place, first_ns, tick.at_ns, value, why)

    def _hosts(self, place: str, rows: Array) -> int:
        """Nodes below a shared part whose probes are among `rows`."""
        parts, name = self._parts, place.partition("|")[2]
        if parts is None:
            return 0
        number = parts.shared[name][0]
        return int(np.unique(parts.host[rows][parts.through[rows] == number]).size)

    def _through(self, place: str, topology: Topology) -> Array:
        """Probes that pass a place; of a node, those that go to it."""
        kind, _, name = place.partition("|")
        parts = self._passed(topology)
        if kind == "node":
            return np.asarray(parts.ends[:, 1] == parts.number.get(name, -1))
        return parts.passing(*parts.shared.get(name, ())[:1])

    def _is_felt(self, kind: str, node: str, rise_ms: float, tick: AlignedTick, frame: Frame) -> bool:
        """Whether the node's job feels what the probes see; a node that is silent altogether is another detector's business."""
        if self._state.absent.get(node, 0):
            return False
        layout = frame.topology.job_of(node)
        pace = self._state.paces.get(layout.job) if layout is not None else None
        if pace is None or not pace.learnt:
            return layout is None and (kind == "link_down" or rise_ms >= self.settings.sure_ms)
        # a clock that runs ahead must not make a standing job look busy
        newest_ns = pace.newest_ns if pace.newest_ns < tick.at_ns + 5 * NS_PER_S else 0
        stands = tick.at_ns - newest_ns >= self.settings.standing_s * NS_PER_S
        return stands or (kind == "link_slow" and pace.ratio() >= self.settings.suffering_ratio)

    def _suspect_losses(self, tick: AlignedTick, frame: Frame, left_out: Array) -> None:
        """A node that loses single probes, or answers some far too late, while the others do not, and while steps stall as they do when
        segments are sent again."""  # fmt: skip
        pairs, settings = self._state.pairs, self.settings
        newest = np.where(left_out, 0.0, pairs.lost[pairs.cursor] + pairs.late[pairs.cursor])
        if newest.sum() == 0 or not any(self._stalls(pace) for pace in self._state.paces.values()):
            return
        parts, slots = self._passed(frame.topology), pairs.recent(RING)
        lost, sent = (pairs.lost + pairs.late)[slots] * ~left_out, pairs.sent[slots] * ~left_out
        target, count, probed = parts.ends[:, 1], len(parts.nodes), int(parts.targets.sum())
        by_tick = np.stack([np.bincount(target, weights=column, minlength=count) for column in lost], axis=1)
        by_tick[:, (by_tick > 0).sum(axis=0) * 2 > max(probed, 2)] = 0.0
        totals, probes = by_tick.sum(axis=1), np.bincount(target, weights=sent.sum(axis=0), minlength=count)
        worst = int(np.argmax(np.where(parts.targets, totals, -1.0)))
        witnesses = int((lost[:, target == worst].sum(axis=0) > 0).sum())
        enough = (by_tick[worst] > 0).sum() >= settings.losses and by_tick[worst, -1] > 0
        if not enough or probed < 3 or witnesses < min(2, int((target == worst).sum() + 1) // 2):
            return
        others = float(totals.sum() - totals[worst])
        rate = max(pairs.usual_loss_rate(), others / max(float(probes.sum() - probes[worst]), 100.0))
        if poisson_at_least(int(totals[worst]), rate * float(probes[worst])) < self._loss_risk(probed):
            better = self._loser(frame.topology, slots.tolist(), None, least=2)
            if better is not None and better.node != parts.nodes[worst]:
                return
            first_ns = int(pairs.times[slots[int(np.argmax(by_tick[worst] > 0))]])
            why = f"{int(totals[worst])} of {int(probes[worst])} probes to it were lost, of the others {int(others)}"
            self._support(
                "link_slow",
                f"node|{parts.nodes[worst]}",
                first_ns,
                tick.at_ns,
                float(totals[worst] / probes[worst]),
                why,
            )

    def _suspect_resending(self, tick: AlignedTick, frame: Frame) -> None:
        """Few nodes of a job send far more again than ever: one of its links loses segments. Whose, the probes tell, and one lost probe is
        then much: counters of the senders say when, not who, for the loss may be their own or that of those they send to."""  # fmt: skip
        surging = self._state.surges.surging(RESENT_TCP, RESENT_RDMA)
        layouts = {layout.job: layout for node in surging if (layout := frame.topology.job_of(node)) is not None}
        for job, layout in sorted(layouts.items()):
            members = set(layout.nodes)
            hurt = {node: since for node, since in surging.items() if node in members}
            if len(members) < 3 or 2 * len(hurt) > max(len(members), 2):
                continue
            since_ns = min(hurt.values())
            slots = [
                slot
                for slot in self._state.pairs.recent(RING)
                if self._state.pairs.times[slot] >= since_ns - 3 * NS_PER_S
            ]
            found, mild = self._loser(frame.topology, slots, members), not self._suffers(job)
            if found is None or found.posterior < self.settings.resent_posterior or (mild and found.ticks < 2):
                continue
            again = (
                f"{min(hurt)} sends far more again than ever"
                if len(hurt) == 1
                else f"{len(hurt)} nodes of its job send far more again than ever"
            )
            first_ns, lost = min(since_ns, tick.at_ns), found.lost / max(found.sent, 1)
            why = f"{again}; {_told_of(found)}"
            self._support("link_slow", f"node|{found.node}", first_ns, tick.at_ns, lost, why, mild)

    def _suspect_sure_losses(self, tick: AlignedTick, frame: Frame, left_out: Array) -> None:
        """A node that loses probes as chance would not in years, whatever its job feels."""
        pairs, settings = self._state.pairs, self.settings
        if not (pairs.lost[pairs.cursor] * ~left_out).any():
            return
        weight, quiet = float(-np.log(settings.sure_loss_risk)), quiet_rate(pairs.loss_rate, pairs.probes_seen)
        sent = pairs.sent[pairs.cursor]
        least = least_losses(RING, float(sent[sent > 0].mean()) if sent.any() else 1.0, quiet, weight)
        if not self._is_crowded(frame.topology, least):
            return
        slots = pairs.recent(RING).tolist()
        found = self._loser(frame.topology, slots, None, least, weight)
        if found is None or found.posterior < settings.resent_posterior:
            return
        first_ns, last_ns = (int(pairs.times[slots[at]]) for at in (found.first, found.last))
        spread = last_ns - first_ns >= settings.sure_loss_s * NS_PER_S
        if last_ns < tick.at_ns or not spread or found.partners < min(2, found.reached):
            return
        layout = frame.topology.job_of(found.node)
        mild = layout is not None and not self._suffers(layout.job)
        self._support(
            "link_slow",
            f"node|{found.node}",
            first_ns,
            tick.at_ns,
            found.lost / max(found.sent, 1),
            _told_of(found),
            mild,
        )

    def _suspect_lossy_fabric(self, tick: AlignedTick, frame: Frame, left_out: Array) -> None:
        """Most nodes of a job send far more again than ever and its steps stall, while probes are lost on the way to nodes everywhere."""
        pairs, settings = self._state.pairs, self.settings
        if not (pairs.lost[pairs.cursor] * ~left_out).any():
            return
        surging = self._state.surges.surging(RESENT_TCP, RESENT_RDMA)
        since_ns = [since for layout in frame.topology.jobs() if (since := self._resends(layout, surging))]
        if not since_ns:
            return
        slots = np.asarray(
            [slot for slot in pairs.recent(RING) if pairs.times[slot] >= min(since_ns) - 3 * NS_PER_S], dtype=np.int64
        )
        lost, sent = pairs.lost[slots] * ~left_out, pairs.sent[slots] * ~left_out
        rate = pairs.loss_rate_before(pairs.recent(RING))
        parts = self._passed(frame.topology)
        first = lossy_everywhere(parts, lost, sent, rate, settings.marked_share, settings.fabric_loss_risk)
        if first is not None:
            why = f"{int(lost.sum())} of {int(sent.sum())} probes between all nodes were lost, and most nodes send far more again than ever"
            first_ns, ratio = int(pairs.times[slots[first]]), float(lost.sum() / max(sent.sum(), 1.0))
            self._support("fabric_slow", _FABRIC, first_ns, tick.at_ns, ratio, why)

    def _suspect_resending_everywhere(self, tick: AlignedTick, frame: Frame) -> None:
        """All nodes of a job send far more again than ever, about as much each, and its steps stall: no one link does that. Probes, of
        which there are few, may take half a minute to show it."""  # fmt: skip
        surges, factor = self._state.surges, self.settings.even_factor
        surging = surges.surging(RESENT_TCP, RESENT_RDMA)
        if len(surging) < _LEAST_EVEN:
            return
        working = {node for layout in frame.topology.jobs() for node in layout.nodes}
        if len(surging.keys() & working) < self.settings.marked_share * len(working):
            return
        for layout in frame.topology.jobs():
            members, since_ns = set(layout.nodes), self._resends(layout, surging)
            if (
                since_ns
                and len(members) >= _LEAST_EVEN
                and surges.is_even(members, RESENT_TCP, RESENT_RDMA, times=factor)
            ):
                why = f"all {len(members)} nodes of a job send far more again than ever, none much more than the others"
                self._support("fabric_slow", _FABRIC, since_ns, tick.at_ns, float(len(members)), why)

    def _resends(self, layout: JobLayout, surging: dict[str, int]) -> int:
        """Since when most nodes of a job that suffers send far more again than ever; 0 when they do not."""
        members = set(layout.nodes)
        since_ns = [since for node, since in surging.items() if node in members]
        most = len(since_ns) >= max(3, self.settings.marked_share * len(members))
        return min(since_ns) if most and self._suffers(layout.job) else 0

    def _is_crowded(self, topology: Topology, least: int) -> bool:
        pairs = self._state.pairs
        settled = self._parts is not None and self._parts_of[0] is pairs.keys
        parts = self._parts if settled and self._parts is not None else self._passed(topology)
        return bool(crowded(parts, pairs.lost, least).size)

    def _loser(
        self,
        topology: Topology,
        slots: list[int],
        members: set[str] | None,
        least: int = 1,
        least_weight: float = -np.inf,
    ) -> Lossy | None:
        pairs, parts = self._state.pairs, self._passed(topology)
        among = np.array([members is None or node in members for node in parts.nodes], dtype=np.bool_)
        lost = pairs.lost[slots] + (pairs.late[slots] if members is not None else 0.0)
        if members is not None:
            lost = lost * among[parts.ends].any(axis=1)
        quiet = quiet_rate(pairs.loss_rate, pairs.probes_seen)
        return loser(parts, lost, pairs.sent[slots], quiet, among, least, least_weight)

    def _suffers(self, job: str) -> bool:
        pace = self._state.paces.get(job)
        return pace is not None and (self._stalls(pace) or pace.ratio() >= self.settings.suffering_ratio)

    def _suspect_congestion(self, tick: AlignedTick, frame: Frame, typical: Array, known: Array) -> None:
        """Most nodes get more congestion marks than ever, probes take longer everywhere, and a job goes measurably slower for it."""
        share, settings = self._state.surges.share(MARKED), self.settings
        if share < settings.marked_share:
            return
        place = self._state.opinions.get(_FABRIC)
        raised = self._state.pairs.slow(
            typical, settings.warm_ticks, settings.subnet_factor, settings.subnet_floor_ms, z=2.5
        )
        felt = place is not None or self._is_measurable()
        if not felt or not raised_everywhere(self._passed(frame.topology), raised, known, settings.marked_share):
            return
        value, usual = float(np.median(typical[raised])), float(np.median(np.exp(self._state.pairs.log_base[raised])))
        why = f"probes take {value:.2f} ms (usual {usual:.2f} ms) between all nodes, {share:.0%} with more congestion marks than ever"
        self._support("fabric_slow", _FABRIC, tick.at_ns, tick.at_ns, value, why)

    def _stalls(self, pace: Pace) -> bool:
        """Whether enough of a job's steps stall; of long steps, of which the window holds few, half are enough."""
        steps = 1000.0 * self.settings.stall_window_s / max(pace.usual_ms, 1.0)
        return len(pace.stalls_ns) >= min(self.settings.stalls, max(2.0, 0.5 * steps))

    def _loss_risk(self, probed: int) -> float:
        """Less by the number of nodes that are looked at, and by it again: any job's stalls open the question for every node, and a
        larger mesh has more jobs. The setting is for four nodes, where it is about a tenth of a false incident a day."""  # fmt: skip
        return self.settings.loss_risk * min(1.0, _SMALL_MESH / probed) ** 2

    def _support(
        self, kind: str, place: str, first_ns: int, at_ns: int, value: float, why: str, mild: bool = False
    ) -> None:
        known = self._state.opinions.get(place)
        if known is not None and known.kind in {kind, "link_down"}:
            if known.mild and not mild and known.said_ns:
                known.said_ns = at_ns - int(self.settings.restate_s * NS_PER_S)
            known.mild = known.mild and mild
            known.last_ns, known.value, known.why = at_ns, value, why if known.kind == kind else known.why
            return
        first_ns = min(first_ns, known.first_ns) if known is not None else first_ns
        self._state.opinions[place] = Opinion(kind, place, first_ns, at_ns, 0, value, why, mild=mild)

    # --- saying it -----------------------------------------------------------------------------------------------------------

    def _speak(self, tick: AlignedTick, frame: Frame) -> list[Verdict]:
        verdicts = []
        for place, opinion in sorted(self._state.opinions.items()):
            quiet_s = (tick.at_ns - opinion.last_ns) / NS_PER_S
            if not opinion.said_ns and quiet_s > 2.5:
                del self._state.opinions[place]
            elif opinion.said_ns and quiet_s > self._hold_s(opinion):
                del self._state.opinions[place]
                verdicts.append(self._say(opinion, tick.at_ns, frame.topology, clears=True))
            elif quiet_s == 0 and self._is_ripe(opinion, tick.at_ns, frame.topology):
                self._place_job(opinion, frame)
                opinion.said_ns = tick.at_ns
                verdicts.append(self._say(opinion, tick.at_ns, frame.topology))
        return verdicts

    def _is_ripe(self, opinion: Opinion, at_ns: int, topology: Topology) -> bool:
        if opinion.said_ns:
            return at_ns - opinion.said_ns >= self.settings.restate_s * NS_PER_S
        waits = {
            "link_slow": self.settings.slow_s,
            "subnet_slow": self.settings.subnet_s,
            "fabric_slow": self.settings.marked_s if "marks" in opinion.why else self.settings.fabric_s,
        }
        ripe = at_ns - opinion.first_ns >= waits.get(opinion.kind, 0.0) * NS_PER_S
        return ripe and not self._hidden_by_shared(opinion, topology)

    def _hidden_by_shared(self, opinion: Opinion, topology: Topology) -> bool:
        """A wider picture of the last seconds explains this one."""
        if opinion.kind not in ("link_slow", "subnet_slow"):
            return False
        kind, _, name = opinion.place.partition("|")
        leaf, _, rail = name.rpartition("/")
        facts = (
            topology.attributes(name)
            if kind == "node"
            else {"leaf": leaf, "rail": rail, "switch": name}
            if leaf
            else {}
        )
        others = (o for o in self._state.opinions.values() if o.place != opinion.place)
        wider = [o for o in others if o.place == _FABRIC or _covers(o.place, facts)]
        return any(other.last_ns >= opinion.last_ns - 3 * NS_PER_S for other in wider)

    def _hold_s(self, opinion: Opinion) -> float:
        return self.settings.hold_s if opinion.kind == "link_down" or "lost" in opinion.why else self.settings.quiet_s

    def _place_job(self, opinion: Opinion, frame: Frame) -> None:
        kind, _, name = opinion.place.partition("|")
        layout = frame.topology.job_of(name) if kind == "node" else None
        if layout is not None:
            rank = min(layout.ranks_on(name), default=-1)
            opinion.job, opinion.attempt, opinion.rank = layout.job, layout.attempt, rank
        elif opinion.kind in ("fabric_slow", "subnet_slow") and len(frame.topology.jobs()) == 1:
            opinion.job, opinion.attempt = frame.topology.jobs()[0].job, frame.topology.jobs()[0].attempt

    def _say(self, opinion: Opinion, at_ns: int, topology: Topology, clears: bool = False) -> Verdict:
        entity, name = _entity(opinion.place)
        text = f"{name} is well again" if clears else f"{name}: {opinion.why}"
        return self.verdict(
            kind=opinion.kind, entity=entity, window=(min(opinion.first_ns, at_ns), at_ns), onset_at_ns=opinion.first_ns, job=opinion.job,
            attempt=opinion.attempt, rank=opinion.rank, score=opinion.value, value=opinion.value,
            confidence=0.96 if opinion.kind == "link_down" else 0.9, text=text, clears=clears, evidence=self._evidence(opinion, topology),
            reach=Reach.NOTIFY if opinion.mild else Reach.ACT,
        )  # fmt: skip

    def _evidence(self, opinion: Opinion, topology: Topology) -> tuple[Evidence, ...]:
        pairs = self._state.pairs
        if not pairs.keys:
            return self._port_evidence(opinion)
        slots, mine = pairs.recent(20), self._through(opinion.place, topology)
        times = [int(at) for at in pairs.times[slots]]
        name = opinion.place.partition("|")[2] or "all nodes"
        found = []
        for label, rows in (
            ("to" if opinion.place.startswith("node|") else "through", mine),
            ("between others, not", ~mine),
        ):
            if rows.any():
                middle = median_of_known(pairs.rtt_ms[slots][:, rows].T)
                note = f"lost {int(pairs.lost[slots][:, rows].sum())} of {int(pairs.sent[slots][:, rows].sum())} probes"
                found.append(
                    series_evidence(f"probe round trip {label} {name}", "ms", times, middle.tolist(), note=note)
                )
        return (*found, *self._port_evidence(opinion))

    def _port_evidence(self, opinion: Opinion) -> tuple[Evidence, ...]:
        ports = self._state.ports
        mine = [
            (ports.keys[row], drops)
            for row, drops in ports.drops_ns.items()
            if f"node|{ports.keys[row][0]}" == opinion.place
        ]
        return tuple(
            series_evidence(f"carrier lost on {node}/{device}", "event", drops, [1.0] * len(drops))
            for (node, device), drops in sorted(mine)
        )


def _covers(place: str, facts: dict[str, str]) -> bool:
    """Whether a leaf, a leaf's switch of one rail, or a rail is one that a node (or `switch`) with these attributes hangs at."""
    kind, _, name = place.partition("|")
    leaf = facts.get("leaf", "")
    if kind == "leaf":
        return bool(leaf) and (name == leaf or (name.startswith(f"{leaf}/") and not facts.get("switch")))
    return kind == "rail" and (
        name in (facts.get("rail"), f"rail{facts.get('rail')}") or bool(facts.get("probe_rails"))
    )


def _told_of(found: Lossy) -> str:
    where = f" over rail {found.rail}" if found.rail else ""
    return f"{found.lost} of {found.sent} probes to and from it{where} were lost, of the others {found.elsewhere}"


def _entity(place: str) -> tuple[Entity, str]:
    kind, _, name = place.partition("|")
    if kind == "node":
        return Entity(EntityKind.NODE, name, name), f"the link of {name}"
    if kind in _SUBNET:
        return Entity(EntityKind(kind), name), name if name.startswith(kind) else f"{kind} {name}"
    return Entity(EntityKind.FABRIC, "fabric"), "the fabric"
