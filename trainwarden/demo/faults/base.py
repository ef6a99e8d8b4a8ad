"""What a fault is: how it is done to a running job, how it is undone, and what healing it means."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from trainwarden.demo.cluster import Cluster
from trainwarden.records import Mode
from trainwarden.registry import Registry


@dataclass(frozen=True)
class Expectation:
    """The right answer to a fault.

    Attributes
    ----------
    kinds
        Kinds of incident that name it rightly; empty when there must be no incident at all.
    executed
        Verbs that must be carried out, in this order; `optional` ones may be missing (a save is impossible while a link is down).
    recommended
        Verbs that must be recommended and not carried out.
    leaves
        Whether the culprit's node is out of the job afterwards.
    """

    kinds: tuple[str, ...] = ()
    executed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    recommended: tuple[str, ...] = ()
    leaves: bool = False
    within_s: float = 20.0

    def under(self, mode: str) -> Expectation:
        """The right answer when the operator allows less than `auto`: the same verbs, recommended and not carried out."""
        if mode == Mode.AUTO:
            return self
        recommended = self.recommended + tuple(verb for verb in self.executed if verb not in self.optional)
        return replace(self, executed=(), recommended=recommended, leaves=False)


class Fault(ABC):
    """One way to hurt a node. `needs_namespaces`: nodes must live in network namespaces of their own."""

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    needs_namespaces: ClassVar[bool] = False
    expectation: ClassVar[Expectation] = Expectation()
    without_us: ClassVar[str] = ""
    """How long plain torchrun would have stood: a sentence, or empty when it is computed from the run."""

    def prepare(self, cluster: Cluster, number: int) -> None:
        """Look before hurting (measure, check a permission); the fault's time begins after it."""
        del cluster, number

    @abstractmethod
    def inject(self, cluster: Cluster, number: int, rng: random.Random) -> str:
        """Hurt node `number`; returns one sentence of what was done."""

    def undo(self, cluster: Cluster, number: int) -> None:
        """Take away what `inject` left in place (cgroups, queue rules); called at the end in any case."""
        del cluster, number

    def progressed(self, cluster: Cluster, number: int, seconds: float) -> None:
        """Called while waiting, `seconds` after the injection; a transient fault ends itself here."""
        del cluster, number, seconds


def registry() -> Registry[Fault]:
    """All faults by name."""
    return Registry("trainwarden.demo.faults", Fault)  # type: ignore[type-abstract]
