"""Codes that drivers and kernels print: which mean broken hardware at once, which are only worth a look, and which blame the program.

What a code means, and when that is taken back, is in the table (`codes.csv`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from detectors.base import Detector, Frame, series_evidence
from detectors.rules.places import Places
from detectors.rules.table import Rule, table
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, LogEvent, Verdict
from trainwarden.settings import option

_MAX_SAID = 4096
_MANY_NODES = 5


@dataclass(frozen=True)
class CodeSettings:
    """Settings of `known_codes`."""

    repeat_s: float = option(60.0, "the same code of the same device is said again only after so long")


@dataclass(frozen=True)
class Meaning:
    """What a code says: kind of verdict, and a clause for the sentence."""

    kind: str
    clause: str


class Standing(msgspec.Struct):
    """An opinion that its rule can take back."""

    node: str
    code: str
    device: str
    kind: str
    job: str
    attempt: int
    rank: int
    first_ns: int
    last_ns: int
    quiet_s: float
    until: tuple[str, str]


class State(msgspec.Struct):
    """When each node, code and device was last said, and what stands."""

    said_ns: dict[str, int] = {}
    standing: dict[str, Standing] = {}


class CodeDetector(Detector):
    """Says `fatal_code`, `suspect_code`, `save_failed` or `link_rerouted`."""

    name = "known_codes"
    kinds = ("fatal_code", "suspect_code", "save_failed", "link_rerouted")
    false_alarms_per_node_day = 1e-4
    Settings = CodeSettings
    settings: CodeSettings

    def __init__(self, settings: CodeSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts, places = self._take_back(frame), Places(frame.topology)
        heard = [(event, meaning) for event in frame.logs if (meaning := meaning_of(event)) is not None]
        shared = _shared([event for event, meaning in heard if meaning.kind == "suspect_code"])
        for event, meaning in heard:
            others = shared.get(event.code, set())
            if self._is_news(event) and (not others or event.node == min(others)):
                verdicts.append(self._say(event, meaning, places, len(others)))
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """A GPU of node 2 falls off the bus in second 10."""
        fallen = Scene(log_events=[(2, "xid:79", {"pci": "0000:3b:00"}, -1)])
        return Example(
            SyntheticCluster(seed=1).frames(15, lambda second: fallen if second == 10 else None),
            "fatal_code",
            node_entity(2),
        )

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _is_news(self, event: LogEvent) -> bool:
        key = _key(event)
        last_ns = self._state.said_ns.get(key)
        if last_ns is not None and abs(event.observed_at_ns - last_ns) < self.settings.repeat_s * NS_PER_S:
            return False
        self._state.said_ns.pop(key, None)
        self._state.said_ns[key] = event.observed_at_ns
        if len(self._state.said_ns) > _MAX_SAID:
            oldest = next(iter(self._state.said_ns))
            del self._state.said_ns[oldest]
            self._state.standing.pop(oldest, None)
        return True

    def _say(self, event: LogEvent, meaning: Meaning, places: Places, nodes: int) -> Verdict:
        layout, lowest = places.of(event.node, event.job)
        device = device_of(event)
        where = f"{event.node}, device {device}" if device else event.node
        text = f"{where} reported {event.code}: {meaning.clause}"
        text += f"; so did {nodes - 1} other nodes at once: look for what they share" if nodes else ""
        at_ns = event.observed_at_ns
        line = series_evidence(
            f"log of {event.source or 'the node'}", "event", [at_ns], [float(event.repeat)], note=event.line[:240]
        )
        said = self.verdict(
            kind=meaning.kind, entity=Entity(EntityKind.NODE, event.node, event.node), window=(at_ns, at_ns), onset_at_ns=at_ns,
            job=event.job or (layout.job if layout else ""), attempt=layout.attempt if layout else event.attempt,
            rank=event.rank if event.rank >= 0 else lowest, score=float(event.repeat),
            confidence=0.98 if meaning.kind != "suspect_code" else 0.5, text=text, evidence=(line,),
        )  # fmt: skip
        self._stand(event, said)
        return said

    def _stand(self, event: LogEvent, said: Verdict) -> None:
        rule, key = table().find(event.code, event.severity), _key(event)
        if rule is None or rule.sticky:
            return
        known = self._state.standing.pop(key, None)
        self._state.standing[key] = Standing(
            event.node, event.code, device_of(event), said.kind, said.job, said.attempt, said.rank,
            known.first_ns if known is not None and known.kind == said.kind else said.onset_at_ns, event.observed_at_ns,
            rule.quiet_s, rule.until,
        )  # fmt: skip

    def _take_back(self, frame: Frame) -> list[Verdict]:
        if not self._state.standing:
            return []
        now_ns = max((tick.at_ns for tick in frame.ticks), default=0)
        over = {
            key: now_ns
            for key, s in self._state.standing.items()
            if s.quiet_s and now_ns - s.last_ns > s.quiet_s * NS_PER_S
        }
        enders = {s.until[0] for s in self._state.standing.values()}
        for event in frame.logs:
            if event.code in enders:
                over |= {key: event.observed_at_ns for key, s in self._state.standing.items() if _ends(event, s)}
        return [self._clear(self._state.standing.pop(key), at_ns) for key, at_ns in sorted(over.items())]

    def _clear(self, standing: Standing, at_ns: int) -> Verdict:
        where = f"{standing.node}, device {standing.device}" if standing.device else standing.node
        return self.verdict(
            kind=standing.kind, entity=Entity(EntityKind.NODE, standing.node, standing.node), window=(standing.first_ns, at_ns),
            onset_at_ns=standing.first_ns, job=standing.job, attempt=standing.attempt, rank=standing.rank, confidence=0.9,
            text=f"{where}: {standing.code} is taken back", clears=True,
        )  # fmt: skip


def _shared(events: list[LogEvent]) -> dict[str, set[str]]:
    """Codes that many nodes report in one frame, with these nodes: one of them is told, for all."""
    nodes: dict[str, set[str]] = {}
    for event in events:
        nodes.setdefault(event.code, set()).add(event.node)
    return {code: own for code, own in nodes.items() if len(own) >= _MANY_NODES}


def meaning_of(event: LogEvent) -> Meaning | None:
    """What an event's code means; None when it means nothing by itself.

    Examples
    --------
    >>> meaning_of(LogEvent(code="xid:79", severity="critical")).kind
    'fatal_code'
    >>> meaning_of(LogEvent(code="xid:31", severity="warning")).kind
    'suspect_code'
    """
    rule = table().find(event.code, event.severity)
    if rule is None or rule.verdict == "none":
        return None
    if rule.verdict == "save_failed":
        return Meaning("save_failed", event.attributes.get("error", "") or rule.meaning)
    return Meaning(rule.verdict, _clause(rule))


def xid_actions() -> dict[int, str]:
    """Xid → NVIDIA's recommended action, word for word."""
    found = {
        rule.code: rule.vendor_action for rule in table().rules if rule.vendor_action and rule.code.startswith("xid:")
    }
    return {int(code.partition(":")[2]): action for code, action in found.items()}


def device_of(event: LogEvent) -> str:
    """The device that an event is about, empty when it names none."""
    return next((event.attributes[key] for key in ("pci", "gpu", "device") if event.attributes.get(key)), "")


def _clause(rule: Rule) -> str:
    vendor = f" (the vendor's remedy: {rule.vendor_action})" if rule.vendor_action else ""
    if rule.verdict == "fatal_code":
        return f"{rule.meaning}; remedy: {rule.remedy}{vendor}"
    if rule.action == "RESTART_APP":
        return f"{rule.meaning}; usually the program's fault, the node is suspect only when it recurs there across jobs{vendor}"
    return f"{rule.meaning}; by itself no reason to remove the node; remedy: {rule.remedy}{vendor}"


def _key(event: LogEvent) -> str:
    return f"{event.node}|{event.code}|{device_of(event)}"


def _ends(event: LogEvent, standing: Standing) -> bool:
    code, severity = standing.until
    same_place = event.node == standing.node and device_of(event) == standing.device
    return bool(code) and same_place and event.code == code and event.severity == severity
