"""What sources say of this node and its jobs, each fact with its origin, merged by precedence; contradictions are kept apart and told."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

ORIGINS = ("operator", "scheduler", "hook", "discovered", "inferred")
"""Who is believed first. Within one origin the fact that holds for longer wins: a newcomer must not flip what was known."""

EVENT_ORIGIN = {"discovered": "inferred"}
"""Origins of facts that a `TopologyEvent` calls by another name."""

MAX_VALUE = 2000


@dataclass(frozen=True)
class Claim:
    """One source's word for one attribute. `since_ns`: wall clock of when it first said so."""

    value: str
    origin: str
    source: str
    since_ns: int

    @property
    def standing(self) -> tuple[int, int, str]:
        """Smaller is believed first."""
        return ORIGINS.index(self.origin), self.since_ns, self.source


@dataclass(frozen=True)
class Conflict:
    """Two sources that do not agree about one attribute."""

    entity: str
    key: str
    kept: Claim
    other: Claim

    @property
    def identity(self) -> tuple[str, ...]:
        """The same contradiction has the same identity."""
        return (self.entity, self.key, self.kept.source, self.kept.value, self.other.source, self.other.value)

    def attributes(self) -> dict[str, str]:
        """For the log event: both values and who says them."""
        return {
            "entity": self.entity, "key": self.key,
            "kept": self.kept.value, "kept_origin": self.kept.origin, "kept_source": self.kept.source,
            "other": self.other.value, "other_origin": self.other.origin, "other_source": self.other.source,
        }  # fmt: skip

    def sentence(self) -> str:
        """What to read in the log."""
        return (
            f"{self.entity}: {self.key} is {self.kept.value!r} after {self.kept.source} ({self.kept.origin}) and {self.other.value!r} "
            f"after {self.other.source} ({self.other.origin}): {self.kept.source} is believed; correct the one that is wrong"
        )


class FactBoard:
    """Facts by entity and source. Thread-safe.

    Examples
    --------
    >>> board = FactBoard()
    >>> board.tell("node", "fabric", "discovered", {"leaf": "sw7"}, 1)
    >>> board.tell("node", "inventory", "operator", {"leaf": "leaf7", "rack": "r1"}, 2)
    >>> {key: claim.value for key, claim in board.merged("node").items()}
    {'leaf': 'leaf7', 'rack': 'r1'}
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, dict[str, dict[str, Claim]]] = {}

    def tell(self, entity: str, source: str, origin: str, attributes: Mapping[str, str], now_ns: int) -> None:
        """All that `source` says of `entity` from now on: what it said before and says no more is withdrawn. Empty values are no facts."""
        if origin not in ORIGINS:
            raise ValueError(f"origin {origin!r} of {source}, expected one of {', '.join(ORIGINS)}")
        with self._lock:
            sources = self._said.setdefault(entity, {})
            before = sources.get(source, {})
            sources[source] = {
                key: _kept(before.get(key), Claim(value[:MAX_VALUE], origin, source, now_ns))
                for key, value in attributes.items()
                if value
            }

    def keep(self, entities: set[str]) -> None:
        """Forget all other entities but the node: jobs that ended."""
        with self._lock:
            self._said = {entity: said for entity, said in self._said.items() if entity == "node" or entity in entities}

    def merged(self, entity: str) -> dict[str, Claim]:
        """The claim believed for each attribute, by its name."""
        return {key: claims[0] for key, claims in self._by_key(entity).items()}

    def conflicts(self) -> list[Conflict]:
        """Every pair of claims that contradict each other, one of them the one believed."""
        with self._lock:
            entities = sorted(self._said)
        return [
            Conflict(entity, key, claims[0], other)
            for entity in entities
            for key, claims in self._by_key(entity).items()
            for other in claims[1:]
            if other.value != claims[0].value
        ]

    def _by_key(self, entity: str) -> dict[str, list[Claim]]:
        found: dict[str, list[Claim]] = {}
        with self._lock:
            for said in self._said.get(entity, {}).values():
                for key, claim in said.items():
                    found.setdefault(key, []).append(claim)
        return {key: sorted(found[key], key=lambda claim: claim.standing) for key in sorted(found)}


def _kept(before: Claim | None, now: Claim) -> Claim:
    """A claim repeated keeps its start."""
    same = before is not None and (before.value, before.origin) == (now.value, now.origin)
    return before if same and before is not None else now
