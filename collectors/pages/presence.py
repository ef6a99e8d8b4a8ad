"""Which accelerators of a vendor this machine has, by the PCI bus: asked seldom, since a scan opens every device once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collectors.base import Context
from trainwarden.clock import NS_PER_S

ROOT = "/sys/bus/pci/devices"
AGAIN_NS = 600 * NS_PER_S


@dataclass(frozen=True)
class Maker:
    """How a vendor's accelerators are told from its other devices.

    Attributes
    ----------
    classes
        Beginnings of PCI classes that count (``0x12`` processing accelerators, ``0x03`` display).
    devices
        Beginning of the device ids that count; empty = all.
    """

    vendor: str
    classes: tuple[str, ...]
    devices: str = ""


AMD = Maker("0x1002", ("0x03", "0x12"))
# Huawei also builds the machine: management screens (0x03), compression engines that call themselves accelerators (0xa25x)
ASCEND = Maker("0x19e5", ("0x12",), "0xd")
METAX = Maker("0x9999", ("0x03", "0x12"))


class Presence:
    """The accelerators of one maker."""

    def __init__(self, context: Context, maker: Maker) -> None:
        self._files = context.files
        self._now_ns: Callable[[], int] = context.clock.monotonic_ns
        self._maker = maker
        self._asked_ns: int | None = None
        self._found: tuple[str, ...] = ()

    def addresses(self) -> tuple[str, ...]:
        """PCI addresses in their order, lower case; found anew every ten minutes."""
        now_ns = self._now_ns()
        if self._asked_ns is None or now_ns - self._asked_ns >= AGAIN_NS:
            self._asked_ns = now_ns
            self._found = tuple(name.lower() for name in self._files.names(ROOT) if self._fits(f"{ROOT}/{name}"))
        return self._found

    def _fits(self, path: str) -> bool:
        text = self._files.text
        fits = (
            text(f"{path}/vendor") == self._maker.vendor
            and text(f"{path}/class").startswith(self._maker.classes)
            and text(f"{path}/device").startswith(self._maker.devices)
        )
        self._files.forget(path)
        return fits
