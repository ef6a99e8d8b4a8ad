"""What a rail is: one question about a plan, answered by nothing or by one sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from actions.world import World
from trainwarden.records import Plan
from trainwarden.registry import Registry


@dataclass(frozen=True)
class Refusal:
    """Why a plan may not run.

    Attributes
    ----------
    retry_at_ns
        When it is worth asking again; 0 = never, a person must act.
    page
        A person should look at once.
    latch
        From now on the rail refuses by itself until an operator resets it.
    """

    rail: str
    reason: str
    retry_at_ns: int = 0
    page: bool = False
    latch: bool = False


class Rail(ABC):
    """One rail. Subclasses carry `name`, `order` (cheap and final ones first) and a frozen dataclass `Settings`."""

    name: ClassVar[str] = ""
    order: ClassVar[int] = 50
    Settings: ClassVar[type]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def check(self, plan: Plan, world: World) -> Refusal | None:
        """None lets `plan` pass."""

    def refuse(self, reason: str, retry_at_ns: int = 0, page: bool = False, latch: bool = False) -> Refusal:
        return Refusal(self.name, reason, retry_at_ns, page, latch)


RAILS: Registry[Rail] = Registry("actions.rails", Rail)  # type: ignore[type-abstract]


def first_refusal(rails: list[Rail], plan: Plan, world: World) -> Refusal | None:
    """The first objection in the rails' order."""
    return next((refusal for rail in rails if (refusal := rail.check(plan, world)) is not None), None)
