"""What saves this rank can put on the table for a restore: its own memory, replicas of others, files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from trainwarden_hook.disk import Folder, map_file
from trainwarden_hook.memory import Buffer, Buffers
from trainwarden_hook.packing import Header, Refused, fits, verify

log = logging.getLogger("trainwarden.checkpoint")
Key = tuple[int, int, int]


@dataclass(eq=False)
class Offer:
    """One save that looks good; whether its bytes are is looked at when it is wanted.

    Attributes
    ----------
    source
        ``memory`` (of this rank), ``peer`` (a replica that this node holds for another) or ``disk``.
    where
        Path, for people.
    """

    header: Header
    payload: memoryview
    source: str
    where: str
    buffer: Buffer | None = None
    verified: bool = False

    @property
    def key(self) -> Key:
        """Which save of the job it is (a part of): step, generation, world; a whole state is the same in all worlds."""
        header = self.header
        return header.step, header.generation, header.world if header.sharded else 0

    def verify(self) -> None:
        """Look at every byte, once; raises `Refused`."""
        if not self.verified:
            verify(self.header, self.payload, self.where)
            self.verified = True
            if self.buffer is not None:
                self.buffer.keep(self.header)


@dataclass
class Holdings:
    """All offers of one rank, and why others are none."""

    offers: list[Offer] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Note and log why a save is not used."""
        self.refused.append(reason)
        log.warning("not restored: %s", reason)

    def best(self) -> Offer | None:
        """The newest whole save whose bytes are good; those that are not are refused on the way."""
        for offer in sorted(self.offers, key=lambda each: each.key, reverse=True):
            try:
                offer.verify()
            except Refused as error:
                self.refuse(str(error))
            else:
                return offer
        return None


def look(
    buffers: Buffers,
    folder: Folder | None,
    fingerprint: int | None,
    max_step: int | None,
    replicas: Iterable[str] = (),
) -> Holdings:
    """Collect what this rank holds, by headers only.

    Parameters
    ----------
    max_step
        Nothing above this is offered (roll back); ``None`` for no limit.
    replicas
        Paths of replicas that this node keeps for others.
    """
    held = Holdings()
    for buffer in buffers.pair:
        _consider(held, max_step, partial(_of_buffer, buffer, fingerprint))
    for path in replicas:
        _consider(held, max_step, partial(_of_file, path, fingerprint, "peer"))
    for step, path in folder.newest_first() if folder is not None else ():
        if max_step is None or step <= max_step:
            _consider(held, max_step, partial(_of_file, path, fingerprint, "disk"))
    return held


def _of_buffer(buffer: Buffer, fingerprint: int | None) -> Offer | None:
    header = buffer.look(fingerprint)
    return None if header is None else Offer(header, buffer.payload(header), "memory", buffer.path, buffer)


def _of_file(path: str, fingerprint: int | None, source: str) -> Offer:
    header, payload = map_file(path)
    fits(header, len(payload), path, fingerprint)
    return Offer(header, payload[: header.payload_bytes], source, path)


def _consider(held: Holdings, max_step: int | None, read: Callable[[], Offer | None]) -> None:
    try:
        offer = read()
    except (Refused, OSError) as error:
        held.refuse(str(error))
        return
    if offer is None:
        return
    if max_step is not None and offer.header.step > max_step:
        log.info("not restored: %s holds step %d, above the ordered %d", offer.where, offer.header.step, max_step)
        return
    held.offers.append(offer)
