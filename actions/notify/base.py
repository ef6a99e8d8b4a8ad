"""What a notifier is: it renders a notice into one HTTP request and judges the answer. Everything else is done once, for all of them.

A notifier is one file with one subclass of `Notifier`; ``[notify.<receiver>]`` with ``type = "<name>"`` gives a receiver of its kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from trainwarden.records import ActionResult, Incident, Plan
from trainwarden.registry import Registry
from trainwarden.settings import option


class Cause(StrEnum):
    """Why somebody is told. There is no sixth reason, so nobody is told twice for the same thing."""

    FIRST = "first"
    CHANGED = "changed"
    RESOLVED = "resolved"
    REPEAT = "repeat"
    ACTION = "action"


@dataclass(frozen=True)
class Notice:
    """One thing to tell one receiver.

    Attributes
    ----------
    notice_id
        The same in every attempt, so that a receiver can drop repeats.
    firing
        False when this takes the alert back.
    started_at_ns, ended_at_ns
        Of the alert; `ended_at_ns` is 0 while it fires.
    labels
        Identity, frozen at the first notice: culprit and kind may change, the alert may not become another.
    plans, actions
        What was planned and done about it so far, oldest first.
    """

    notice_id: str
    receiver: str
    cause: Cause
    firing: bool
    incident: Incident
    started_at_ns: int
    ended_at_ns: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    plans: tuple[Plan, ...] = ()
    actions: tuple[ActionResult, ...] = ()


@dataclass(frozen=True)
class Site:
    """Where people find us: `page_url` of the status page, and the file whose presence stops all automation."""

    page_url: str = ""
    kill_switch: str = ""


@dataclass(frozen=True)
class Call:
    """One HTTP POST. `url` and `headers` may hold secrets and are never logged."""

    url: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What came back; `body` is cut to a few kilobytes."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Judgement:
    """What a reply means: delivered, to be tried again (not before `after_s`), or hopeless."""

    delivered: bool
    retry: bool = False
    reason: str = ""
    after_s: float = 0.0


@dataclass(frozen=True)
class DeliverySettings:
    """Settings that every kind of receiver has."""

    repeat_s: float = option(4 * 3600.0, "a firing alert is told again after this time")
    send_resolved: bool = option(True, "whether the end of an incident is told")
    give_up_s: float = option(900.0, "a notice not delivered by then is given up, and counted")
    timeout_s: float = option(5.0, "longest time of one attempt")
    allow_private: bool = option(False, "whether the receiver may have a private or loopback address")
    allow_http: bool = option(False, "whether a public address may be spoken to without TLS")


class Notifier(ABC):
    """A kind of receiver.

    Subclasses set `name` and `Settings` (a dataclass that extends `DeliverySettings`).
    """

    name: ClassVar[str] = ""
    Settings: ClassVar[type[DeliverySettings]] = DeliverySettings

    def __init__(self, receiver: str, settings: Any, site: Site) -> None:
        self.receiver = receiver
        self.settings: Any = settings
        self.site = site

    @abstractmethod
    def render(self, notice: Notice) -> bytes:
        """Body of the request. It is kept with the notice: a retry, even after a restart, sends the same bytes."""

    @abstractmethod
    def call(self, notice_id: str, body: bytes, now_s: int) -> Call:
        """The request to send now; signatures are made here, because they carry the time.

        Raises
        ------
        ConfigError
            When a secret cannot be read.
        """

    @abstractmethod
    def judge(self, reply: Reply) -> Judgement:
        """What `reply` means."""


NOTIFIERS: Registry[Notifier] = Registry("actions.notify", Notifier)  # type: ignore[type-abstract]
