"""What is the same for every broker that we run ourselves: its address, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from trainwarden.embedded.child import Child
from trainwarden.embedded.ready import BrokerMetadata
from trainwarden.errors import UnavailableError


class OwnedBroker(ABC):
    """A broker as a process of ours; a context manager that starts and stops it.

    Attributes
    ----------
    name, stop_grace_s
        Who it is, for messages, and how long an orderly end may take before it is killed.
    """

    name: ClassVar[str]
    stop_grace_s: ClassVar[float]

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._child: Child | None = None

    @abstractmethod
    def start(self, timeout_s: float = ...) -> BrokerMetadata:
        """Start it and return when it answers a metadata request; raises `UnavailableError`."""

    @property
    def bootstrap(self) -> str:
        """Address for Kafka clients."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the broker itself.

        Raises
        ------
        UnavailableError
            It is not started.
        """
        return self._running().pid

    def alive(self) -> bool:
        return self._child is not None and self._child.alive()

    def died(self) -> str | None:
        """One sentence when it ended by itself."""
        return self._running().died()

    def wait(self) -> int:
        """Wait until the process ends; return its exit code."""
        return self._running().wait()

    def stop(self) -> None:
        """Stop it in an orderly way: SIGTERM, SIGKILL after `stop_grace_s`."""
        if self._child is not None:
            self._child.stop(self.stop_grace_s)
            self._child = None

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> Child:
        if self._child is None:
            raise UnavailableError(f"{self.name} is not started: call start() first")
        return self._child
