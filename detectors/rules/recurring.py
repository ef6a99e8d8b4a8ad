"""Harmless codes of one node that come back: a single one means nothing, the third within its window does; and the lemon node, of which
many small things are said that each stay below their own limit.

A node is named only while it stands out: what many nodes report at once is a shared cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from detectors.base import Detector, Frame, series_evidence
from detectors.rules.places import Places
from detectors.rules.table import Recurrence, table
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, LogEvent, Verdict
from trainwarden.settings import option

_MAX_NODES, _MAX_CODES = 4096, 64
_NS_PER_HOUR = 3600 * NS_PER_S


@dataclass(frozen=True)
class RecurringSettings:
    """Settings of `recurring_codes`."""

    burst_s: float = option(
        60.0, "the same code of one node within so long of the last is the same event, however long that goes on"
    )
    lemon_score: float = option(
        2.0, "a node whose different codes add up to so many limits (two of three of one code count 0.67) is a lemon"
    )
    shared_ratio: float = option(
        0.25,
        "a code that more than this share of all nodes report within its window has a shared cause: nobody is named",
    )


class Series(msgspec.Struct):
    """One code of one node: when it came, for which jobs, and the newest line."""

    node: str
    code: str
    at_ns: list[int] = []
    jobs: list[str] = []
    last_ns: int = 0
    line: str = ""
    count: int = 1
    hours: float = 24.0

    def score(self, now_ns: int) -> float:
        """Share of the limit that is reached."""
        return sum(now_ns - at <= self.hours * _NS_PER_HOUR for at in self.at_ns) / self.count


class Said(msgspec.Struct):
    """What was said of a node and stands."""

    first_ns: int
    codes: list[str] = []


class State(msgspec.Struct):
    """Series by node, the node with the oldest news first, and by code; opinions by node."""

    series: dict[str, dict[str, Series]] = {}
    said: dict[str, Said] = {}
    checked_ns: int = 0


class RecurringCodeDetector(Detector):
    """Says `recurring_code`."""

    name = "recurring_codes"
    kinds = ("recurring_code",)
    false_alarms_per_node_day = 1e-3
    Settings = RecurringSettings
    settings: RecurringSettings

    def __init__(self, settings: RecurringSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts = self._take_back(frame)
        touched: dict[str, int] = {}
        places = Places(frame.topology)
        for event in frame.logs:
            rule = table().find(event.code, event.severity)
            if (
                rule is not None
                and rule.recurrence is not None
                and event.node
                and self._count(event, rule.recurrence, places)
            ):
                touched[event.node] = max(event.observed_at_ns, touched.get(event.node, 0))
        if touched:
            shared = self._shared(max(touched.values()), len(frame.topology.nodes()))
            for node, now_ns in sorted(touched.items()):
                verdicts += self._judge(node, shared, now_ns, frame)
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """The carrier of node 1 is lost three times in five minutes."""
        lost = Scene(log_events=[(1, "link_down", {"interface": "eth0"}, -1)])
        frames = SyntheticCluster(seed=1).frames(200, lambda second: lost if second in (20, 100, 180) else None)
        return Example(frames, "recurring_code", node_entity(1))

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _count(self, event: LogEvent, limit: Recurrence, places: Places) -> bool:
        """Note an event; whether it counts."""
        series = self._series(event, limit)
        if not self._is_counted(series, event, limit, places):
            return False
        times = [event.observed_at_ns] * (min(event.repeat, limit.count) if limit.by == "line" else 1)
        series.at_ns = sorted([*series.at_ns, *times])[-limit.count :]
        series.line = event.line[:200]
        return True

    def _series(self, event: LogEvent, limit: Recurrence) -> Series:
        own = self._state.series.pop(event.node, None) or {}
        self._state.series[event.node] = own
        series = own.pop(event.code, None) or Series(event.node, event.code)
        own[event.code] = series
        series.count, series.hours = limit.count, limit.hours
        if len(own) > _MAX_CODES:
            del own[next(iter(own))]
        if len(self._state.series) > _MAX_NODES:
            del self._state.series[next(iter(self._state.series))]
        return series

    def _is_counted(self, series: Series, event: LogEvent, limit: Recurrence, places: Places) -> bool:
        since_ns, first = event.observed_at_ns - series.last_ns, not series.at_ns
        series.last_ns = event.observed_at_ns if first else max(series.last_ns, event.observed_at_ns)
        if limit.by == "event":
            return first or abs(since_ns) >= self.settings.burst_s * NS_PER_S
        if limit.by == "line":
            return first or since_ns != 0
        layout, _ = places.of(event.node, event.job)
        job = event.job or (layout.job if layout is not None else "")
        if not job or job in series.jobs:
            return False
        series.jobs = [*series.jobs, job][-limit.count :]
        return True

    def _shared(self, now_ns: int, nodes: int) -> set[str]:
        """Codes that too many nodes report for any of them to stand out."""
        if nodes < 4:
            return set()
        alike = Counter(s.code for own in self._state.series.values() for s in own.values() if s.score(now_ns) > 0)
        return {code for code, count in alike.items() if count > max(1.0, self.settings.shared_ratio * nodes)}

    def _judge(self, node: str, shared: set[str], now_ns: int, frame: Frame) -> list[Verdict]:
        own = [s for s in self._state.series[node].values() if s.code not in shared]
        over = [s for s in own if s.score(now_ns) >= 1.0]
        total = sum(min(s.score(now_ns), 1.0) for s in own)
        lemon = total >= self.settings.lemon_score and len(own) > 1
        return [self._say(over if over and not lemon else own, total, lemon, now_ns, frame)] if over or lemon else []

    def _say(self, series: list[Series], total: float, lemon: bool, now_ns: int, frame: Frame) -> Verdict:
        series = sorted(series, key=lambda s: -s.score(now_ns))[:6]
        node = series[0].node
        said = self._state.said.setdefault(node, Said(min(s.at_ns[0] for s in series if s.at_ns)))
        said.codes = [s.code for s in series]
        lines = "; ".join(f"{s.code} {len(s.at_ns)} times within {s.hours:g} h (limit {s.count})" for s in series)
        why = (
            "many small things, each below its own limit" if lemon else "what is harmless once has come back too often"
        )
        return self._opinion(said, node, now_ns, frame, f"{node}: {lines}: {why}", total, series)

    def _opinion(
        self, said: Said, node: str, now_ns: int, frame: Frame, text: str, score: float, series: list[Series]
    ) -> Verdict:
        layout = frame.topology.job_of(node)
        evidence = tuple(
            series_evidence(f"{s.code} of {node}", "event", s.at_ns, [1.0] * len(s.at_ns), note=s.line) for s in series
        )
        return self.verdict(
            kind="recurring_code", entity=Entity(EntityKind.NODE, node, node), window=(said.first_ns, now_ns), onset_at_ns=said.first_ns,
            job=layout.job if layout else "", attempt=layout.attempt if layout else 0, score=score, value=score, confidence=0.7, text=text,
            evidence=evidence, clears=not series,
        )  # fmt: skip

    def _take_back(self, frame: Frame) -> list[Verdict]:
        """Once a minute: series whose window has passed are forgotten, and nodes of which nothing is left are well."""
        now_ns = max((tick.at_ns for tick in frame.ticks), default=0)
        if now_ns - self._state.checked_ns < 60 * NS_PER_S:
            return []
        self._state.checked_ns = now_ns
        kept = {node: {c: s for c, s in own.items() if s.score(now_ns) > 0} for node, own in self._state.series.items()}
        self._state.series = {node: own for node, own in kept.items() if own}
        well = [node for node in sorted(self._state.said) if self._is_well(node, now_ns)]
        return [self._well(node, self._state.said.pop(node), now_ns, frame) for node in well]

    def _is_well(self, node: str, now_ns: int) -> bool:
        scores = [s.score(now_ns) for s in self._state.series.get(node, {}).values()]
        return max(scores, default=0.0) < 1.0 and sum(scores) < self.settings.lemon_score

    def _well(self, node: str, said: Said, now_ns: int, frame: Frame) -> Verdict:
        text = f"{node}: {', '.join(said.codes)} came back no more often than they may"
        return self._opinion(said, node, now_ns, frame, text, 0.0, [])
