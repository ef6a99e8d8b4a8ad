"""Where a rank stands in a job that is parallel in several ways: its coordinate on each axis, and who does the same work.

A job's `TopologyEvent` says it in its attributes, in one of two ways:

* sizes, ``{"tp": "8", "pp": "4", "dp": "16"}``, absent ones 1, ranks numbered with the first axis of ``"order"`` changing fastest
  (default ``tp-cp-ep-dp-pp``, as Megatron numbers them);
* coordinates, ``{"coordinates": "dp pp;0 0;1 0;0 1;1 1"}``: names of axes, then one entry per rank.

``ep`` counts as an axis of its own where the product of all sizes needs it to reach the number of ranks, else it divides ``dp`` and its
coordinate is the data-parallel one modulo its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "-".join(AXES)
KEYS = (*AXES, "order", "coordinates")
"""Attributes of a job that say how it is parallel."""
MAX_WORLD = 1 << 20
"""A rank number beyond it is an invention of somebody, and a place for each rank below it would be many gigabytes."""
MAX_DIGITS = 9

_SAME_WORK = ("pp", "ep", "role")
_SAME_PARAMETERS = ("pp", "ep", "tp", "role")


@dataclass(frozen=True)
class ParallelLayout:
    """Coordinates of every rank: `axes` names them, `places[rank]` holds one number per axis. Axes not named are of size 1."""

    axes: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]

    @cached_property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(set(self.groups("pp")))

    def coordinate(self, rank: int, axis: str) -> int:
        """Place of a rank on one axis; 0 on an axis that the job does not have."""
        return self.places[rank][self.axes.index(axis)] if axis in self.axes else 0

    def groups(self, *axes: str) -> tuple[int, ...]:
        """Number of the group of each rank, groups being the ranks that agree on `axes`; numbered by first appearance."""
        numbers: dict[tuple[int, ...], int] = {}
        columns = [self.axes.index(axis) for axis in axes if axis in self.axes]
        return tuple(numbers.setdefault(tuple(place[i] for i in columns), len(numbers)) for place in self.places)

    def peer_groups(self) -> tuple[int, ...]:
        """Groups of ranks that do the same work on different data: same stage, same experts, same role."""
        return self.groups(*_SAME_WORK)

    def replica_groups(self) -> tuple[int, ...]:
        """Groups of ranks that hold the same parameters."""
        return self.groups(*_SAME_PARAMETERS)


def parallel_layout(attributes: Mapping[str, str], world: int) -> ParallelLayout | None:
    """The layout that a job's attributes describe, or None when they say nothing, or do not fit `world` ranks.

    Examples
    --------
    >>> layout = parallel_layout({"tp": "2", "pp": "2"}, 4)
    >>> layout.places[3], layout.coordinate(3, "pp"), layout.peer_groups()
    ((1, 0, 0, 0, 1), 1, (0, 0, 1, 1))
    """
    said = tuple(sorted((key, attributes[key]) for key in KEYS if key in attributes))
    return _parsed(said, world) if said and 0 < world <= MAX_WORLD else None


@lru_cache(maxsize=64)
def _parsed(said: tuple[tuple[str, str], ...], world: int) -> ParallelLayout | None:
    attributes = dict(said)
    if "coordinates" in attributes:
        return _from_coordinates(attributes["coordinates"], world)
    return _from_sizes(attributes, world)


def _from_coordinates(text: str, world: int) -> ParallelLayout | None:
    names, _, rest = text.partition(";")
    axes = tuple(names.split())
    entries = [entry.split() for entry in rest.split(";")]
    fits = len(entries) == world and all(len(entry) == len(axes) and all(map(_is_number, entry)) for entry in entries)
    return ParallelLayout(axes, tuple(tuple(map(int, entry)) for entry in entries)) if axes and fits else None


def _from_sizes(attributes: Mapping[str, str], world: int) -> ParallelLayout | None:
    order = tuple(attributes.get("order", DEFAULT_ORDER).split("-"))
    texts = {axis: attributes.get(axis, "1") for axis in AXES}
    if not all(_is_number(text) and int(text) > 0 for text in texts.values()) or len(set(order)) < len(order):
        return None
    sizes = {axis: int(text) for axis, text in texts.items()}
    experts = sizes["ep"]
    own_axis = math.prod(sizes.values()) == world
    if not own_axis:
        sizes["ep"] = 1
    if math.prod(sizes.values()) != world or any(size > 1 and axis not in order for axis, size in sizes.items()):
        return None
    places = tuple(_place(rank, order, sizes) for rank in range(world))
    if own_axis or experts == 1:
        return ParallelLayout(AXES, places)
    ep, dp = AXES.index("ep"), AXES.index("dp")
    return ParallelLayout(AXES, tuple((*p[:ep], p[dp] % experts, *p[ep + 1 :]) for p in places))


def _place(rank: int, order: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    found = dict.fromkeys(AXES, 0)
    for axis in order:
        rank, found[axis] = divmod(rank, sizes.get(axis, 1))
    return tuple(found[axis] for axis in AXES)


def _is_number(text: str) -> bool:
    """Not `isdigit`, which is true of superscripts, and of more digits than `int` reads."""
    return text.isdecimal() and len(text) <= MAX_DIGITS
