"""Labels as numbers: nodes, jobs, devices and whose they are, kept from batch to batch, since what a node says of itself seldom changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streams.store.lean import devices_of, placements_of
from trainwarden.records import Placement

Codes = NDArray[np.int64]

KEPT_DEVICES = 64
"""Different lists of devices of one node; a node has one for each family, and another while a device is missing."""
KEPT_WORDS = 500_000
"""With more words than this all is forgotten: names that nobody uses twice would fill the memory."""


class Words:
    """Numbers for strings, in the order in which they came."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._words: list[str] = []

    def __len__(self) -> int:
        return len(self._words)

    def code(self, word: str) -> int:
        """The number of a word, the same each time."""
        code = self._codes.get(word)
        if code is None:
            code = self._codes[word] = len(self._words)
            self._words.append(word)
        return code

    def ranked(self, codes: Codes) -> Ranked:
        """The words that `codes` use, in order, and which of them each is."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(self._words)))
        words = [self._words[code] for code in used.tolist()]
        order = sorted(range(len(words)), key=words.__getitem__)
        places = np.empty(len(self._words), dtype=np.int64)
        places[used[order]] = np.arange(len(order))
        return Ranked(places[codes], [words[place] for place in order])


class Ranked(NamedTuple):
    """A column of words: `places` counts in `words`, which are sorted, so places sort as the words do."""

    places: Codes
    words: list[str]

    def taken(self, rows: NDArray[np.intp]) -> Ranked:
        """The same words in other rows."""
        return Ranked(self.places[rows], self.words)

    def column(self) -> Any:
        """As Arrow has it: the store need not look at each row's string to find that it is one of a few."""
        return pa.DictionaryArray.from_arrays(pa.array(self.places.astype(np.int32)), pa.array(self.words, pa.string()))


class Layout(NamedTuple):
    """Devices of one block: how many, and for each a row of `LAYOUT`."""

    devices: int
    owned: Codes


DEVICE, JOB, ATTEMPT, RANK = range(4)
"""Columns of `Layout.owned`; the first two are codes."""


class Owner(NamedTuple):
    """Whose a device's samples are; rank -1 is no single rank."""

    job: str
    attempt: int
    rank: int


class Node:
    """What a node says of its ranks, and the layouts of its blocks."""

    def __init__(self, raw: bytes, words: Words) -> None:
        self.raw = raw
        self.placements = placements_of(raw)
        self._words = words
        self._layouts: dict[bytes, Layout] = {}

    def layout(self, raw: bytes) -> Layout:
        """Of the devices that `raw` names; raises `DecodeError`."""
        layout = self._layouts.get(raw)
        if layout is None:
            made = self._made(devices_of(raw))
            if len(self._layouts) >= KEPT_DEVICES:
                self._layouts.clear()
            layout = self._layouts[raw] = made
        return layout

    def _made(self, devices: Sequence[str]) -> Layout:
        code = self._words.code
        owners = [placement_of(self.placements, device) for device in devices]
        owned = [(code(name), code(o.job), o.attempt, o.rank) for name, o in zip(devices, owners, strict=True)]
        return Layout(len(devices), np.array(owned, dtype=np.int64).reshape(-1, 4))


class Owners:
    """To whom devices belong, by node."""

    def __init__(self) -> None:
        self.words = Words()
        self._nodes: dict[str, Node] = {}

    def trim(self) -> None:
        """Forget everything when it is too much; codes given before mean nothing any more."""
        if len(self.words) > KEPT_WORDS:
            self.words = Words()
            self._nodes.clear()

    def of(self, node: str, placements: bytes) -> Node:
        """The node with these placements; raises `DecodeError`."""
        known = self._nodes.get(node)
        if known is None or known.raw != placements:
            known = self._nodes[node] = Node(placements, self.words)
        return known


def placement_of(placements: tuple[Placement, ...], device: str) -> Owner:
    """Job, attempt and rank of a device's samples.

    A device that one rank owns carries that rank. Samples of the whole node carry the job that runs there (none when several do) and
    the rank only when there is but one; rank -1 is "no single rank".
    """
    for placement in placements:
        if device in (f"rank{placement.rank}", placement.device):
            return Owner(placement.job, placement.attempt, placement.rank)
    jobs = {(placement.job, placement.attempt) for placement in placements}
    if len(jobs) != 1:
        return Owner("", 0, -1)
    job, attempt = jobs.pop()
    return Owner(job, attempt, placements[0].rank if len(placements) == 1 else -1)
