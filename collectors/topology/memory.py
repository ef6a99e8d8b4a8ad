"""Since when a node's attributes hold, and under which origin they were told: kept over restarts of the agent.

Who reads the topology believes the higher origin for ever. When nobody of that origin speaks any more (the operator's table is gone), a
weaker word would go unheard: after ten minutes the old event is withdrawn, and the weaker one stands.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from trainwarden.clock import NS_PER_S
from trainwarden.records import TopologyEvent
from trainwarden.topology import PRECEDENCE

HOLD_NS = 600 * NS_PER_S


class _Kept(msgspec.Struct):
    origin: str = ""
    valid_from_ns: int = 0
    attributes: dict[str, str] = {}


class NodeMemory:
    """What was said last. `path` None: remembered within this process only."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept = _load(path) if path is not None else _Kept()
        self._weaker_since_ns = 0

    def events(self, entity: str, origin: str, attributes: dict[str, str], now_ns: int) -> list[TopologyEvent]:
        """The events to publish: usually one; unchanged attributes keep their start, those that went away are said to be empty."""
        found: list[TopologyEvent] = []
        if self._holds_stronger(origin, now_ns):
            if now_ns - self._weaker_since_ns >= HOLD_NS:
                found.append(TopologyEvent(entity=entity, origin=origin, valid_from_ns=now_ns, removed=True))
                self._kept = _Kept()
            else:
                origin = self._kept.origin
        gone = {key: "" for key in self._kept.attributes if key not in attributes}
        said = {**gone, **attributes}
        if (origin, said) != (self._kept.origin, self._kept.attributes):
            # a clock that was set back must not make the new word older than the one it replaces
            start_ns = max(now_ns, self._kept.valid_from_ns + 1) if self._kept.origin == origin else now_ns
            self._kept = _Kept(origin, start_ns, said)
            self._save()
        event = TopologyEvent(entity=entity, origin=origin, valid_from_ns=self._kept.valid_from_ns, attributes=said)
        return [*found, event]

    def _holds_stronger(self, origin: str, now_ns: int) -> bool:
        known = self._kept.origin
        stronger = known in PRECEDENCE and PRECEDENCE.index(known) < PRECEDENCE.index(origin)
        if not stronger:
            self._weaker_since_ns = 0
        elif not self._weaker_since_ns or now_ns < self._weaker_since_ns:
            self._weaker_since_ns = now_ns
        return stronger

    def _save(self) -> None:
        if self._path is None:
            return
        scratch = self._path.with_suffix(".tmp")
        try:
            scratch.write_bytes(msgspec.json.encode(self._kept))
            os.replace(scratch, self._path)
        except OSError:
            scratch.unlink(missing_ok=True)  # a full disk costs the memory over restarts, nothing else


def _load(path: Path) -> _Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return _Kept()
