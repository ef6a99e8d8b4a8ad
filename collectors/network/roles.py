"""What a network port is for: rails carry the training traffic, others manage the machine or reach its storage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from collectors.files import Files
from trainwarden.errors import ConfigError

ROLES: Mapping[str, float] = {"": 0.0, "rail": 1.0, "management": 2.0, "storage": 3.0}
ACCELERATOR_CLASSES = ("0x03", "0x12")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]+", re.IGNORECASE)
PATTERNS = (
    ("management", re.compile(r".*(mgmt|oob|bmc|ipmi|idrac).*|usb\d+|eno\d+")),
    ("storage", re.compile(r".*(stor|nvmf|nfs|ceph|san\d|weka|lustre).*")),
    ("rail", re.compile(r".*(rail|gpu\d|rdma|roce|hca).*|ib\d+|ibp.*|ibs.*|hsn\d+")),
)


def role_by_name(name: str) -> str:
    """What the name suggests; empty when nothing.

    Examples
    --------
    >>> role_by_name("rail3"), role_by_name("mgmt0"), role_by_name("eth0")
    ('rail', 'management', '')
    """
    return next((role for role, pattern in PATTERNS if pattern.fullmatch(name.lower())), "")


def default_routes(route: str, route6: str = "") -> set[str]:
    """Interfaces that carry a default route, by /proc/net/route and /proc/net/ipv6_route."""
    found = set()
    for words in map(str.split, route.splitlines()[1:]):
        if len(words) >= 8 and words[1] == "00000000" and words[7] == "00000000" and words[2] != "00000000":
            found.add(words[0])
    for words in map(str.split, route6.splitlines()):
        if len(words) >= 10 and set(words[0]) == {"0"} and words[1] == "00" and words[9] != "lo":
            found.add(words[9])
    return found


def bridges(path: str) -> tuple[str, ...]:
    """PCI bridges above a device, root port first, from the real path of its directory.

    Examples
    --------
    >>> bridges("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0")
    ('0000:15:01.0', '0000:16:00.0')
    """
    return tuple(part for part in path.split("/") if PCI_ADDRESS.fullmatch(part))[:-1]


class Neighbours:
    """Which ports sit with an accelerator below one PCI bridge: these are its rails. Looked up once per device."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._accelerators: set[str] | None = None
        self._known: dict[str, str] = {}

    def role(self, device: str, name: str) -> str:
        """``rail`` for a neighbour of an accelerator, else what the name says."""
        if device not in self._known:
            self._known[device] = "rail" if self._beside_accelerator(device) else role_by_name(name)
        return self._known[device]

    def forget(self) -> None:
        """Look again."""
        self._accelerators = None
        self._known.clear()

    def _beside_accelerator(self, device: str) -> bool:
        above = bridges(os.path.realpath(self._files.path(device)))
        if self._accelerators is None:
            self._accelerators = set(self._bridges_of_accelerators())
        return not self._accelerators.isdisjoint(above)

    def _bridges_of_accelerators(self) -> Iterable[str]:
        root = "/sys/bus/pci/devices"
        for address in self._files.names(root):
            if self._files.text(f"{root}/{address}/class").startswith(ACCELERATOR_CLASSES):
                yield from bridges(os.path.realpath(self._files.path(f"{root}/{address}")))
            self._files.forget(f"{root}/{address}")


def compiled(key: str, text: str) -> re.Pattern[str]:
    """A regular expression of the configuration; raises `ConfigError` in one sentence."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{key}: {text!r} is no regular expression: {error}") from None


def checked_roles(key: str, roles: Mapping[str, str]) -> Mapping[str, str]:
    """The configured roles; raises `ConfigError` for a role that does not exist."""
    known = [role for role in ROLES if role]
    for name, role in roles.items():
        if role not in known:
            raise ConfigError(f"{key}.{name}: {role!r} is no role: known are {', '.join(known)}")
    return roles
