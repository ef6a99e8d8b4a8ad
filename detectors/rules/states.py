"""States that devices report in their samples: remaps that wait, links that are narrow or inactive, clocks held down, GPUs gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from detectors.base import AlignedTick, Detector, FamilyMatrix, Frame, series_evidence
from detectors.rules.statetable import StateRule, first_known, state_rules
from detectors.state import Array, decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, Verdict
from trainwarden.settings import option
from trainwarden.topology import Topology

_NEVER_NS = 0


@dataclass(frozen=True)
class StateSettings:
    """Settings of `device_states`."""

    hold_factor: float = option(1.0, "how long states must stand before they are said, times what the table says")
    rack_ratio: float = option(
        0.67, "heat and power states of this share of a rack's nodes have a cause outside: one is said for all"
    )
    left_out: str = option("", "names of states that are not looked at, separated by blanks")


class Rows(msgspec.Struct):
    """One family's rules × its rows: seconds that the state has stood (time without it counts back), since when, what is usual."""

    keys: tuple[tuple[str, str], ...] = ()
    stood_s: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    first_ns: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    usual: Array = msgspec.field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))

    def align(self, entities: tuple[tuple[str, str], ...], rules: int) -> bool:
        """Make the rows those of this tick, keeping what is known of each; whether they are others than before."""
        if self.stood_s.shape[0] == rules and (entities is self.keys or entities == self.keys):
            return False
        place = {key: number for number, key in enumerate(self.keys)} if self.stood_s.shape[0] == rules else {}
        source = np.array([place.get(key, -1) for key in entities], dtype=np.intp)
        for name, blank, kind in (
            ("stood_s", 0, np.float32),
            ("first_ns", 0, np.int64),
            ("usual", np.nan, np.float32),
        ):
            old = getattr(self, name)
            new = np.full((rules, len(entities)), blank, dtype=kind)
            if place:
                new[:, source >= 0] = old[:, source[source >= 0]]
            setattr(self, name, new)
        self.keys = entities
        return True


class Opinion(msgspec.Struct):
    """A state of a node that was said and stands."""

    first_ns: int
    last_ns: int
    devices: list[str]
    value: float
    job: str = ""
    attempt: int = 0


class State(msgspec.Struct):
    """Rows by family; opinions by node and state; how many GPUs each node reports and has reported, and
    for how long fewer.
    """

    rows: dict[str, Rows] = {}
    opinions: dict[str, dict[str, Opinion]] = {}
    gpu_seen: dict[str, int] = {}
    gpu_count: dict[str, int] = {}
    missing_ticks: dict[str, int] = {}


@dataclass(frozen=True)
class Found:
    """A state that has stood long enough on some devices of a node."""

    node: str
    rule: StateRule
    devices: tuple[str, ...]
    value: float
    first_ns: int


class DeviceStateDetector(Detector):
    """Says `device_state`."""

    name = "device_states"
    kinds = ("device_state",)
    false_alarms_per_node_day = 1e-3
    Settings = StateSettings
    settings: StateSettings

    def __init__(self, settings: StateSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()
        rules = [rule for rule in state_rules() if rule.state not in self.settings.left_out.split()]
        self._rules = {family: [r for r in rules if r.family == family] for family in {r.family for r in rules}}
        self._by_name = {rule.state: rule for rule in rules}

    def update(self, frame: Frame) -> list[Verdict]:
        return [verdict for tick in frame.ticks for verdict in self._tick(tick, frame.topology)]

    @classmethod
    def example(cls) -> Example:
        """A GPU of node 2 waits for a reset after a row remap."""
        waits = Scene(gpu={(2, 3, "row_remap_pending"): 1.0})
        frames = SyntheticCluster(seed=1, gpus=8).frames(60, lambda second: waits if second >= 20 else None)
        return Example(frames, "device_state", node_entity(2))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _tick(self, tick: AlignedTick, topology: Topology) -> list[Verdict]:
        found: list[Found] = []
        for family in sorted(self._rules):
            matrix = tick.family(family)
            if matrix is not None and len(matrix.entities):
                found += self._states_of(matrix, self._rules[family], tick)
        found += self._missing(tick)
        return [*self._say_all(found, tick, topology), *self._take_back(tick)]

    # --- what is seen --------------------------------------------------------------------------------------------------------

    def _states_of(self, matrix: FamilyMatrix, rules: list[StateRule], tick: AlignedTick) -> list[Found]:
        rows = self._state.rows.setdefault(matrix.family, Rows())
        if rows.align(matrix.entities, len(rules)) and matrix.family == "gpu":
            self._state.gpu_seen = dict(Counter(node for node, _ in matrix.entities))
        found: list[Found] = []
        for column, rule in enumerate(rules):
            if rule.test != "rows_missing":
                found += self._state_of(matrix, rule, rows, column, tick)
        return found

    def _state_of(
        self, matrix: FamilyMatrix, rule: StateRule, rows: Rows, column: int, tick: AlignedTick
    ) -> list[Found]:
        holds = rule.holds(matrix, rows.usual[column])
        rows.usual[column] = rule.follow(matrix, rows.usual[column])
        stood, step_s = rows.stood_s[column], tick.interval_ms / 1000
        if not holds.any() and not stood.any():
            return []
        begins = holds & (stood <= 0)
        rows.first_ns[column, begins] = tick.at_ns
        hold_s = rule.hold_s * self.settings.hold_factor
        most_s = max(2.0 * hold_s, step_s)
        rows.stood_s[column] = np.clip(np.where(holds, stood + step_s, stood - step_s), 0.0, most_s)
        ripe = np.flatnonzero(holds & (rows.stood_s[column] >= max(hold_s, step_s))).tolist()
        return self._by_node(ripe, matrix, rule, rows.first_ns[column])

    def _by_node(self, ripe: list[int], matrix: FamilyMatrix, rule: StateRule, first_ns: Array) -> list[Found]:
        value = first_known(matrix, rule.metric)
        by_node: dict[str, list[int]] = {}
        for row in ripe:
            by_node.setdefault(matrix.entities[row][0], []).append(row)
        return [
            Found(node, rule, tuple(sorted(matrix.entities[r][1] for r in own)), float(value[own[0]]) if value is not None else 0.0,
                  int(min(first_ns[r] for r in own)))
            for node, own in by_node.items()
        ]  # fmt: skip

    def _missing(self, tick: AlignedTick) -> list[Found]:
        """Nodes that are there and report fewer GPUs than they did; the highest number so far is what they have."""
        rule, counted = self._by_name.get("gpu_missing"), self._state.gpu_seen
        matrix = tick.family("gpu")
        if rule is None or matrix is None or (counted == self._state.gpu_count and not self._state.missing_ticks):
            return []
        here = set(np.array(tick.nodes, dtype=object)[tick.present].tolist())
        known = {node: max(counted.get(node, 0), self._state.gpu_count.get(node, 0)) for node in tick.nodes}
        self._state.gpu_count = {node: count for node, count in known.items() if count}
        fewer = {
            node for node, count in self._state.gpu_count.items() if node in here and 0 < counted.get(node, 0) < count
        }
        before = self._state.missing_ticks
        self._state.missing_ticks = {node: before.get(node, 0) + 1 for node in sorted(fewer)}
        step_s = tick.interval_ms / 1000
        ripe = [
            node
            for node, ticks in self._state.missing_ticks.items()
            if ticks * step_s >= rule.hold_s * self.settings.hold_factor
        ]
        return [
            Found(node, rule, (f"{self._state.gpu_count[node] - counted[node]} of {self._state.gpu_count[node]} GPUs",),
                  float(counted[node]), tick.at_ns - int((self._state.missing_ticks[node] - 1) * step_s * NS_PER_S))
            for node in ripe
        ]  # fmt: skip

    # --- saying it -----------------------------------------------------------------------------------------------------------

    def _say_all(self, found: list[Found], tick: AlignedTick, topology: Topology) -> list[Verdict]:
        verdicts = []
        outside = self._outside(found, tick, topology)
        for one in sorted(found, key=lambda f: (f.node, f.rule.state)):
            known = self._state.opinions.get(one.node, {}).get(one.rule.state)
            if known is not None:
                known.last_ns = tick.at_ns
            elif (one.node, one.rule.state) not in outside:
                verdicts.append(self._say(one, tick, topology, ""))
            elif outside[one.node, one.rule.state]:
                verdicts.append(self._say(one, tick, topology, outside[one.node, one.rule.state]))
        return verdicts

    def _outside(self, found: list[Found], tick: AlignedTick, topology: Topology) -> dict[tuple[str, str], str]:
        """(node, state) that most of a rack has: a remark for the one that is said, nothing for the others."""
        shared = [one for one in found if one.rule.shared]
        if len(shared) < 3:
            return {}
        rack_of = {node: topology.attributes(node).get("rack", "") for node in tick.nodes}
        size = Counter(rack_of.values())
        groups: dict[tuple[str, str], list[str]] = {}
        for one in sorted(shared, key=lambda f: f.node):
            groups.setdefault((rack_of.get(one.node, ""), one.rule.state), []).append(one.node)
        remarks: dict[tuple[str, str], str] = {}
        for (rack, state), nodes in groups.items():
            if rack and len(nodes) >= 3 and len(nodes) >= self.settings.rack_ratio * size[rack]:
                spoken = any(state in self._state.opinions.get(node, {}) for node in nodes)
                remarks |= {(node, state): "" for node in nodes}
                remarks[nodes[0], state] = (
                    ""
                    if spoken
                    else f"; so have {len(nodes) - 1} others of rack {rack}: look at the room, not at the node"
                )
        return remarks

    def _say(self, one: Found, tick: AlignedTick, topology: Topology, remark: str) -> Verdict:
        layout = topology.job_of(one.node)
        opinion = Opinion(
            one.first_ns,
            tick.at_ns,
            list(one.devices),
            one.value,
            layout.job if layout else "",
            layout.attempt if layout else 0,
        )
        self._state.opinions.setdefault(one.node, {})[one.rule.state] = opinion
        text = f"{one.node}, {', '.join(one.devices)}: {one.rule.meaning}{remark}; remedy: {one.rule.remedy}"
        name = one.rule.metric[0] if one.rule.metric else "gpu_count"
        evidence = series_evidence(
            f"{name} of {', '.join(one.devices)}", "", [one.first_ns, tick.at_ns], [one.value] * 2, note=one.rule.source
        )
        return self._verdict(one.node, one.rule, opinion, tick.at_ns, text=text, evidence=(evidence,))

    def _take_back(self, tick: AlignedTick) -> list[Verdict]:
        """States without a sign for long enough are over; a node that is silent says nothing either way, one that is gone is forgotten."""
        if not self._state.opinions:
            return []
        expected, here = set(tick.nodes), set(np.array(tick.nodes, dtype=object)[tick.present].tolist())
        self._state.opinions = {node: own for node, own in self._state.opinions.items() if node in expected}
        verdicts = []
        for node in sorted(set(self._state.opinions) & here):
            own = self._state.opinions[node]
            for state in [s for s, o in own.items() if tick.at_ns - o.last_ns >= self._by_name[s].clear_s * NS_PER_S]:
                rule, opinion = self._by_name[state], own.pop(state)
                text = f"{node}, {', '.join(opinion.devices)}: no longer so: {rule.meaning}"
                verdicts.append(self._verdict(node, rule, opinion, tick.at_ns, text=text, clears=True))
            if not own:
                del self._state.opinions[node]
        return verdicts

    def _verdict(self, node: str, rule: StateRule, opinion: Opinion, at_ns: int, **facts: object) -> Verdict:
        return self.verdict(
            kind="device_state", entity=Entity(EntityKind.NODE, node, node), window=(opinion.first_ns, at_ns),
            onset_at_ns=opinion.first_ns, job=opinion.job, attempt=opinion.attempt, score=1.0, value=opinion.value, high=rule.limit,
            confidence=0.9, **facts,
        )  # fmt: skip
