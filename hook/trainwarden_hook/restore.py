"""Restoring: all ranks agree on the newest save that is whole in the hands of all of them together.

A replicated (data parallel) state is whole in any one save; a sharded one needs the part of every rank
of the world that saved it, in whosever memory, replica or file it lies. Bytes are verified where they
lie before anybody uses them; what must not be used is refused by name, and the next best is tried.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainwarden_hook.addresses import address_towards
from trainwarden_hook.disk import Folder
from trainwarden_hook.memory import Buffers
from trainwarden_hook.offers import Holdings, Key, look
from trainwarden_hook.packing import Header, Refused, aligned, read_index, room, unpack
from trainwarden_hook.pull import Reader, Server
from trainwarden_hook.sharding import Parts, rebuild

log = logging.getLogger("trainwarden.checkpoint")
PREFERENCE = {"memory": 0, "peer": 1, "disk": 2}
VIEWS = frozenset({"model"})
T = TypeVar("T")
Place = Callable[[tuple[Any, ...], Any, Parts | None], Any]


@dataclass
class Candidate:
    """The newest good save that this rank holds; ``step`` -1 when it holds none."""

    step: int = -1
    source: str = "none"
    header: Header | None = None
    payload: memoryview | None = None
    refused: list[str] = field(default_factory=list)


def find(buffers: Buffers, folder: Folder | None, fingerprint: int | None, max_step: int | None) -> Candidate:
    """The newest whole, verified save of one rank on its own."""
    held = look(buffers, folder, fingerprint, max_step)
    best = held.best()
    if best is None:
        return Candidate(refused=held.refused)
    return Candidate(best.header.step, best.source, best.header, best.payload, held.refused)


@dataclass(frozen=True, slots=True)
class Restored:
    """What all ranks have agreed on and this rank has read."""

    step: int
    source: str
    state: dict[str, Any]
    header: Header


@dataclass(frozen=True, slots=True)
class Told:
    """One offer as the other ranks hear of it."""

    holder: int
    number: int
    header: Header
    key: Key
    source: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The save to restore: for every rank that saved, who holds its part (for a whole state, under 0)."""

    key: Key
    holders: dict[int, list[Told]]

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part only."""
        return self.key[2] > 0

    def first(self, saved_rank: int) -> Told:
        """The holder that everybody takes this part from."""
        return self.holders[saved_rank][0]


class Ranks:
    """The collectives of a restore; a process on its own is a world of one."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
        self.world = 1 if self._alone else dist.get_world_size()
        self.rank = 0 if self._alone else dist.get_rank()

    def gather(self, mine: T) -> list[T]:
        """What every rank gives, in rank order."""
        import torch.distributed as dist

        if self._alone:
            return [mine]
        everybody: list[Any] = [None] * self.world
        dist.all_gather_object(everybody, mine)
        return everybody


def choose(told: list[Told], spoilt: set[tuple[int, int]], given_up: set[Key]) -> tuple[Choice | None, list[str]]:
    """The newest save that is whole without the spoilt offers, and a sentence on each newer one that is not."""
    by_key: dict[Key, dict[int, list[Told]]] = {}
    for offer in told:
        if (offer.holder, offer.number) not in spoilt and offer.key not in given_up:
            part = offer.header.rank if offer.header.sharded else 0
            by_key.setdefault(offer.key, {}).setdefault(part, []).append(offer)
    incomplete: list[str] = []
    for key in sorted(by_key, reverse=True):
        missing = sorted(set(range(key[2])) - set(by_key[key]))
        if not missing:
            holders = {part: sorted(offers, key=_preference) for part, offers in by_key[key].items()}
            return Choice(key, holders), incomplete
        ranks = ", ".join(map(str, missing))
        incomplete.append(
            f"step {key[0]} of generation {key[1]} is incomplete: no good save of rank {ranks} of {key[2]}"
        )
    return None, incomplete


def _preference(offer: Told) -> tuple[int, int, int]:
    return PREFERENCE[offer.source], offer.holder, offer.number


def agree(mine: Holdings, place: Place | None = None) -> Restored | None:
    """Agree with all ranks (a collective when a process group is up) and read the state.

    Parameters
    ----------
    place
        ``place(path, tensor or part, parts)`` makes what this rank needs of a tensor: of a `Part` the region it holds
        now, cut from ``parts``; ``None`` leaves all as it was saved.

    Returns
    -------
    Restored or None
        ``None`` when there is no whole good save.
    """
    ranks = Ranks()
    if ranks.world == 1:
        return _Agreement(mine, ranks, None, place).run()
    server = _serve(mine)
    try:
        return _Agreement(mine, ranks, server, place).run()
    finally:
        if server is not None:
            server.close()


def _serve(mine: Holdings) -> Server | None:
    """A rank that cannot be reached can still take its own save, or what others have."""
    host = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"), 0)
    try:
        return Server([offer.payload for offer in mine.offers], host)
    except OSError as error:
        log.warning("the others cannot read the saves of this rank, it cannot listen on %s: %s", host, error)
        return None


class _Agreement:
    """One restore: choose, verify, read; until all ranks have read the same save, or none is left."""

    def __init__(self, mine: Holdings, ranks: Ranks, server: Server | None, place: Place | None) -> None:
        self._mine = mine
        self._ranks = ranks
        self._place = place
        self._address = server.address if server is not None else None
        self._readers: dict[int, Reader] = {}

    def run(self) -> Restored | None:
        own = [
            Told(self._ranks.rank, number, offer.header, offer.key, offer.source)
            for number, offer in enumerate(self._mine.offers)
        ]
        everybody = self._ranks.gather((self._address, own))
        self._addresses = [address for address, _ in everybody]
        told = [offer for _, offers in everybody for offer in offers]
        spoilt: set[tuple[int, int]] = set()
        given_up: set[Key] = set()
        named: set[str] = set()
        try:
            while True:
                choice, incomplete = choose(told, spoilt, given_up)
                for sentence in set(incomplete) - named:
                    self._mine.refuse(sentence)
                named.update(incomplete)
                if choice is None:
                    return None
                bad = {each for some in self._ranks.gather(self._spoilt_of(choice)) for each in some}
                if bad:
                    spoilt |= bad
                    continue
                restored = self._read(choice)
                if all(self._ranks.gather(restored is not None)):
                    return restored
                given_up.add(choice.key)
        finally:
            for reader in self._readers.values():
                reader.close()

    def _spoilt_of(self, choice: Choice) -> list[tuple[int, int]]:
        """Verify those of my offers that somebody will read; the numbers of the bad ones."""
        bad = []
        for number in self._wanted_of_mine(choice):
            try:
                self._mine.offers[number].verify()
            except Exception as error:
                # Whatever it is, the others wait for this rank's word.
                self._mine.refuse(str(error))
                bad.append((self._ranks.rank, number))
        return bad

    def _wanted_of_mine(self, choice: Choice) -> list[int]:
        if choice.sharded:
            firsts = [choice.first(part) for part in choice.holders]
            return [told.number for told in firsts if told.holder == self._ranks.rank]
        mine = [told for told in choice.holders[0] if told.holder == self._ranks.rank]
        return [told.number for told in mine[:1]]

    def _read(self, choice: Choice) -> Restored | None:
        try:
            return self._sharded(choice) if choice.sharded else self._whole(choice)
        except Exception as error:
            log.debug("reading step %d failed", choice.key[0], exc_info=True)
            self._mine.refuse(f"step {choice.key[0]} cannot be read: {error}")
            return None

    # -- a whole state

    def _whole(self, choice: Choice) -> Restored:
        mine = self._wanted_of_mine(choice)
        if mine:
            offer = self._mine.offers[mine[0]]
            header, payload, source = offer.header, offer.payload, offer.source
        else:
            header, payload = self._pull_whole(choice)
            source = "peer"
        state = unpack(header, payload, VIEWS)
        if self._place is not None:
            place = self._place
            state = rebuild(state, lambda at, leaf: place(at, leaf, None))
        return Restored(choice.key[0], source, state, header)

    def _pull_whole(self, choice: Choice) -> tuple[Header, memoryview]:
        """From a holder by turns, so that many ranks that lack it do not all ask the same one."""
        per_holder = list({told.holder: told for told in choice.holders[0]}.values())
        begin = self._ranks.rank % len(per_holder)
        problems = []
        for told in per_holder[begin:] + per_holder[:begin]:
            payload = room(told.header.payload_bytes)
            try:
                if self._reader(told.holder).read_summed(told.number, payload) == told.header.payload_crc:
                    return told.header, payload
                problems.append(f"rank {told.holder}: what it sent is corrupt")
            except (OSError, Refused) as error:
                problems.append(f"rank {told.holder}: {error}")
                self._readers.pop(told.holder, None)
        raise OSError("; ".join(problems))

    # -- a sharded one

    def _sharded(self, choice: Choice) -> Restored:
        world, rank = choice.key[2], self._ranks.rank
        base = rank if world == self._ranks.world else rank * world // self._ranks.world
        indexes = {
            part: read_index(choice.first(part).header, self._index_bytes(choice, part)) for part in choice.holders
        }
        parts = Parts(indexes, lambda part, offset, size: self._tensor_bytes(choice, part, offset, size))
        told = choice.first(base)
        payload = self._bytes(told, 0, told.header.payload_bytes)
        state = unpack(told.header, payload, VIEWS)
        if self._place is not None:
            place = self._place
            state = rebuild(state, lambda at, leaf: place(at, leaf, parts))
        local = told.holder == rank and world == self._ranks.world
        return Restored(choice.key[0], told.source if local else "peer", state, told.header)

    def _index_bytes(self, choice: Choice, part: int) -> memoryview:
        told = choice.first(part)
        return self._bytes(told, 0, told.header.index_bytes)

    def _tensor_bytes(self, choice: Choice, part: int, offset: int, size: int) -> memoryview:
        told = choice.first(part)
        return self._bytes(told, aligned(told.header.index_bytes) + offset, size)

    def _bytes(self, told: Told, offset: int, size: int) -> memoryview:
        if told.holder == self._ranks.rank:
            return self._mine.offers[told.number].payload[offset : offset + size]
        target = room(size)
        self._reader(told.holder).read(told.number, offset, target)
        return target

    def _reader(self, holder: int) -> Reader:
        if holder not in self._readers:
            address = self._addresses[holder]
            if address is None:
                raise OSError(f"rank {holder} serves nothing")
            self._readers[holder] = Reader(address)
        return self._readers[holder]
