"""Who speaks for a node: one collector at a time, known by its boot id.

Records are not signed, so anybody who may write to a raw topic can speak in a node's name. What he cannot do is to silence the node's own
collector or to know its boot id (64 random bits, made anew at each start, readable only by whoever may read the raw topics). So the voice
that has a node keeps it for as long as it speaks, and another one waits until the first has been silent: a collector that was started again
is heard then, an impostor is found out by the next word of the one whose name he took, and all that he said is refused.

A collector that starts again names the boot id of the one before it in its ticks (`Tick.succeeds`). Who can do that is heard at once, and
takes a node back from whoever got it by a silence alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trainwarden.clock import NS_PER_S
from trainwarden.records import Record, Tick

HANDOVER_NS = 2 * NS_PER_S
"""A node is given to another voice when its own has been silent for so long; shorter than a restart takes."""
DATED_HANDOVER_NS = 10 * NS_PER_S
"""The same by what records say of their time: of a backlog much comes at once, and who went and who came lie in it one after the other.
More than `AHEAD_NS`, and so nobody gets a node by dating his words ahead."""
WARY_HANDOVER_NS, WARY_NS = 60 * NS_PER_S, 600 * NS_PER_S
"""The same for a node in whose name somebody was heard to lie, and how long that is remembered."""
AHEAD_NS = 5 * NS_PER_S
"""A voice that dates its words so far ahead could not be told to be later than the other: it waits longer, too."""
FORGET_NS = 3600 * NS_PER_S
FORMER_KEPT = 3
LAST_NS = 2**63
HELD_LIMIT = 500
"""Records of one node that may wait for a hand-over."""


class Spoken(Protocol):
    """A record and where it lay."""

    @property
    def record(self) -> Record:
        """The record."""
        ...


S = TypeVar("S", bound=Spoken)


@dataclass
class _Voice(Generic[S]):
    """Who has a node (`boot`), when he was last heard, the first and the newest time that he named, those before him, and who claims the
    node now (`claim`) with what he said (`held`)."""

    boot: str
    heard_ns: int
    first_ns: int
    newest_ns: int
    former: list[str] = field(default_factory=list)
    wary_ns: int = 0
    claim: str = ""
    claimed_ns: int = 0
    held: list[S] = field(default_factory=list)


class Voices(Generic[S]):
    """Lets through what the voice of each node says. Time is the time of cuts, so that a replay decides the same."""

    def __init__(self) -> None:
        self._voices: dict[str, _Voice[S]] = {}
        self._prune_ns = 0
        self.unproven: set[str] = set()
        """Nodes whose voice got them by a silence alone."""

    def admit(self, spoken: Sequence[S], now_ns: int) -> tuple[list[S], list[tuple[S, str]]]:
        """What counts, in no order, and what is refused with the reason. Records without node or boot id are nobody's and count."""
        admitted: list[S] = []
        claims: list[S] = []
        refused: list[tuple[S, str]] = []
        for item in spoken:
            record = item.record
            voice = self._voices.get(record.node) if record.node and record.boot_id else None
            if voice is not None and record.boot_id == voice.boot:
                if voice.claim:
                    refused += self._heard(voice, record, now_ns)
                else:  # as nearly always
                    voice.heard_ns = now_ns
                    voice.newest_ns = max(voice.newest_ns, record.observed_at_ns)
                admitted.append(item)
            else:
                claims.append(item)
        claims.sort(key=_turn)
        for item in claims:
            self._claim(item, now_ns, admitted, refused)
        for voice in self._voices.values():
            if voice.held:
                self._settle(voice, now_ns, admitted)
        self._prune(now_ns)
        return admitted, refused

    def knows(self, node: str) -> bool:
        """Whether the node has a voice of its own."""
        return node in self._voices

    def boot(self, node: str) -> str:
        """Boot id of the voice that has the node; empty when nobody has."""
        voice = self._voices.get(node)
        return voice.boot if voice is not None else ""

    def waiting(self) -> frozenset[str]:
        """Nodes in whose name somebody speaks who is not believed yet."""
        return frozenset(node for node, voice in self._voices.items() if voice.held)

    def held(self) -> Iterable[tuple[str, S]]:
        """(node, record) of all that waits."""
        return ((node, item) for node, voice in self._voices.items() for item in voice.held)

    def snapshot(self) -> dict[str, list[object]]:
        """Plain containers, without what is held."""
        return {
            node: [v.boot, v.heard_ns, v.first_ns, v.newest_ns, v.former, v.wary_ns, v.claim, v.claimed_ns]
            for node, v in self._voices.items()
        }

    def restore(self, state: dict[str, list[object]], held: Iterable[tuple[str, S]]) -> None:
        """Take `snapshot`'s and `held`'s containers over."""
        self._voices = {node: _Voice(*fields) for node, fields in state.items()}  # type: ignore[arg-type]
        self._prune_ns = 0
        for node, item in held:
            self._voices[node].held.append(item)

    def _heard(self, voice: _Voice[S], record: Record, now_ns: int) -> list[tuple[S, str]]:
        """The voice has spoken: whoever claims its node meanwhile has lied, unless this was said before he came."""
        if record.observed_at_ns <= voice.claimed_ns:
            return []
        voice.heard_ns, voice.newest_ns = now_ns, max(voice.newest_ns, record.observed_at_ns)
        return self._found_out(voice, record.node, now_ns)

    def _found_out(self, voice: _Voice[S], node: str, now_ns: int) -> list[tuple[S, str]]:
        reason = _reason(node, voice.claim, voice.boot)
        refused = [(item, reason) for item in voice.held]
        voice.claim, voice.held, voice.wary_ns = "", [], now_ns + WARY_NS
        return refused

    def _claim(self, item: S, now_ns: int, admitted: list[S], refused: list[tuple[S, str]]) -> None:
        record = item.record
        if not record.node or not record.boot_id:
            admitted.append(item)
            return
        voice = self._voices.get(record.node)
        if voice is None:
            voice = self._voices[record.node] = _Voice(
                record.boot_id, now_ns, record.observed_at_ns, record.observed_at_ns
            )
        if record.boot_id in voice.former:
            refused += self._return(voice, record, now_ns)
            admitted.append(item)
        elif record.boot_id == voice.boot:
            voice.heard_ns, voice.newest_ns = now_ns, max(voice.newest_ns, record.observed_at_ns)
            admitted.append(item)
        elif self._succeeds(voice, record):
            refused += self._hand_over(voice, record, now_ns, admitted)
            admitted.append(item)
        elif voice.claim not in ("", record.boot_id) or len(voice.held) >= HELD_LIMIT:
            refused.append((item, _reason(record.node, record.boot_id, voice.boot)))
        else:
            if not voice.claim:
                voice.claim, voice.claimed_ns = record.boot_id, min(record.observed_at_ns, now_ns)
            voice.held.append(item)
            if len(voice.held) >= HELD_LIMIT:
                self._settle(voice, now_ns, admitted)

    def _succeeds(self, voice: _Voice[S], record: Record) -> bool:
        """Whether this one knows the boot id of who has the node, or of who had it before it was lost by a silence."""
        before = record.succeeds if isinstance(record, Tick) else ""
        return bool(before) and (before == voice.boot or (record.node in self.unproven and before in voice.former))

    def _hand_over(self, voice: _Voice[S], record: Record, now_ns: int, admitted: list[S]) -> list[tuple[S, str]]:
        """To one who has proved that he is the next; whoever else claims the node is refused, and who has it without a proof loses it."""
        first_ns, refused = record.observed_at_ns, []
        if voice.claim == record.boot_id:
            admitted += voice.held
            first_ns = min(first_ns, voice.claimed_ns)
        elif voice.claim:
            refused = self._found_out(voice, record.node, now_ns)
        if isinstance(record, Tick) and record.succeeds == voice.boot:
            voice.former = [*voice.former, voice.boot][-FORMER_KEPT:]
        else:
            voice.wary_ns = now_ns + WARY_NS
        voice.boot, voice.heard_ns, voice.first_ns, voice.newest_ns = (
            record.boot_id,
            now_ns,
            first_ns,
            record.observed_at_ns,
        )
        voice.claim, voice.held = "", []
        self.unproven.discard(record.node)
        return refused

    def _return(self, voice: _Voice[S], record: Record, now_ns: int) -> list[tuple[S, str]]:
        """One who was thought gone: what he said before he went still counts. When he speaks on, he was never gone."""
        if record.observed_at_ns <= voice.first_ns:
            return []
        refused = self._found_out(voice, record.node, now_ns) if voice.claim else []
        voice.former.remove(record.boot_id)
        voice.boot, voice.heard_ns = record.boot_id, now_ns
        voice.first_ns = voice.newest_ns = record.observed_at_ns
        voice.wary_ns = now_ns + WARY_NS
        return refused

    def _settle(self, voice: _Voice[S], now_ns: int, admitted: list[S]) -> None:
        voice.heard_ns = min(voice.heard_ns, now_ns)  # the worker's clock was set back
        if not self._is_due(voice, now_ns):
            return
        admitted += voice.held
        self.unproven.add(voice.held[0].record.node)
        voice.former = [*voice.former, voice.boot][-FORMER_KEPT:]
        voice.boot, voice.heard_ns, voice.first_ns = voice.claim, now_ns, voice.claimed_ns
        voice.newest_ns = max(item.record.observed_at_ns for item in voice.held)
        voice.claim, voice.held = "", []

    def _is_due(self, voice: _Voice[S], now_ns: int) -> bool:
        newest_ns = max(item.record.observed_at_ns for item in voice.held)
        silent_ns = now_ns - voice.heard_ns
        if newest_ns > now_ns + AHEAD_NS or now_ns < voice.wary_ns:
            return silent_ns >= WARY_HANDOVER_NS
        return silent_ns >= HANDOVER_NS or newest_ns - voice.newest_ns >= DATED_HANDOVER_NS

    def _prune(self, now_ns: int) -> None:
        """Nodes that nobody has heard of for long, and the inventions of who makes up names."""
        if abs(now_ns - self._prune_ns) < FORGET_NS / 6:
            return
        self._prune_ns = now_ns
        self._voices = {n: v for n, v in self._voices.items() if v.held or now_ns - v.heard_ns < FORGET_NS}
        self.unproven &= self._voices.keys()


def _turn(item: Spoken) -> int:
    """Those who name a predecessor come first, one after the other."""
    record = item.record
    return record.observed_at_ns - LAST_NS if isinstance(record, Tick) and record.succeeds else 0


def _reason(node: str, claims: str, has: str) -> str:
    return (
        f"boot {claims} speaks as {node} while boot {has} does: two collectors have one name, or somebody forges records; "
        "look who writes to the raw topics"
    )
