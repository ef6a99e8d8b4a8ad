"""Numbers that may still be on their way from a device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

log = logging.getLogger("trainwarden.hook")


class DeviceScalar:
    """A one-element device tensor on its way to pinned host memory; reading it never waits for the device.

    Parameters
    ----------
    host
        Host tensor that receives the value.
    arrived
        Whether the copy has finished; may raise when the device has failed.
    wait
        Block until it has.
    """

    def __init__(self, host: Any, arrived: Callable[[], bool], wait: Callable[[], None]) -> None:
        self._host = host
        self._arrived = arrived
        self._wait = wait
        self.lost = False

    def arrived(self) -> bool:
        """Whether there is nothing more to wait for: the copy has finished, or is lost with its device."""
        try:
            return self.lost or self._arrived()
        except Exception:
            log.exception("a number is lost: its device has failed")
            self.lost = True
            return True

    def value(self) -> float:
        """The number; call it when it has arrived."""
        return float(self._host.item())

    def wait(self) -> float:
        """Block until it has arrived."""
        self._wait()
        return self.value()


Scalar = float | DeviceScalar | None


def scalar(value: Any) -> Scalar:
    """A number, or a device tensor sent on its way; ``None`` stays ``None``."""
    if value is None or isinstance(value, float):
        return value
    on_cpu = getattr(value, "is_cpu", None)
    if on_cpu is None:
        return float(value)
    if on_cpu:
        return float(value.item())
    import torch

    host = torch.empty((), dtype=torch.float32, pin_memory=True)
    host.copy_(value.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return DeviceScalar(host, event.query, event.synchronize)


def here(value: Scalar) -> bool:
    """Whether reading the value would not wait."""
    return not isinstance(value, DeviceScalar) or value.arrived()


def read(value: Scalar) -> float | None:
    """The number if it is here, else ``None``."""
    if isinstance(value, DeviceScalar):
        return value.value() if value.arrived() and not value.lost else None
    return value


def is_bad(value: Scalar) -> bool:
    """Whether the number is NaN or infinite; waits for a device if it must (only before a save)."""
    number = value.wait() if isinstance(value, DeviceScalar) else value
    return number is not None and not math.isfinite(number)
