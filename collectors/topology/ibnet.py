"""InfiniBand switches above this node, from what somebody with the rights has written to a file: ``ibnetdiscover`` or ``iblinkinfo``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HOST = re.compile(r'^Ca\s+\d+\s+"H-([0-9a-fA-F]{16})"\s*#\s*"([^"]*)"')
SWITCH = re.compile(r'^Switch\s+\d+\s+"S-([0-9a-fA-F]{16})"\s*#\s*"([^"]*)"')
LINK = re.compile(r'^\[(\d{1,3})\](?:\([0-9a-fA-F]+\))?\s+"S-([0-9a-fA-F]{16})"\[(\d{1,3})\]')
LINE_LINK = re.compile(
    r'^(?:0x([0-9a-fA-F]{16})\s+)?(?:"\s*([^"]*?)\s*"\s+)?(\d+)\s+(\d+)\[[^\]]*\]\s+==\(([^)]*)\)==>\s+'
    r'(?:0x([0-9a-fA-F]{16})\s+)?(\d+)\s+(\d+)\[[^\]]*\]\s+"([^"]*)"'
)
OWNER = re.compile(r"^(?:CA|Switch)(?: 0x[0-9a-fA-F]+)?:?\s*(.*?):?$")
GUID = re.compile(r"(?:0x)?([0-9a-fA-F]{16})")
MAX_LINES = 1_000_000


class FormatError(ValueError):
    """A file that is not what it should be; the message says what was found and what was expected."""


@dataclass(frozen=True)
class Uplink:
    """One port of an adapter and the switch it is cabled to."""

    guid: str
    host: str
    port: int
    switch: str
    switch_port: int


def parse_fabric(text: str) -> list[Uplink]:
    """Uplinks of all adapters, from either tool; raises `FormatError` for anything else."""
    if "switchguid=" in text or "caguid=" in text:
        return parse_ibnetdiscover(text)
    if "==(" in text:
        return parse_iblinkinfo(text)
    raise FormatError("neither ibnetdiscover (lines 'caguid=') nor iblinkinfo (links '==(') wrote this")


def parse_ibnetdiscover(text: str) -> list[Uplink]:
    """Uplinks in the blocks of channel adapters; switches are named by their description, those of one description by it and their GUID.

    A file cut in the middle gives what stands in it.
    """
    switches = _switch_names(text)
    found: list[Uplink] = []
    guid, host = "", ""
    for line in _lines(text):
        if match := HOST.match(line):
            guid, host = match.group(1).lower(), match.group(2).strip()
        elif line.startswith("Switch"):
            guid = ""
        elif guid and (match := LINK.match(line)):
            switch = switches.get(match.group(2).lower(), match.group(2).lower())
            found.append(Uplink(guid, host, int(match.group(1)), switch, int(match.group(3))))
    return found


def parse_iblinkinfo(text: str) -> list[Uplink]:
    """Uplinks in the blocks of channel adapters (``CA: node7 HCA-1:``), and of all links with `--line`; not those that are down."""
    found: list[Uplink] = []
    host, is_host = "", False
    for line in _lines(text):
        if line.startswith(("CA", "Switch")) and "==(" not in line:
            is_host = line.startswith("CA")
            match = OWNER.match(line.strip())
            host = match.group(1).strip() if match else ""
            continue
        match = LINE_LINK.match(line.strip())
        if match and (is_host or match.group(2)) and "LinkUp" in match.group(5):
            switch = match.group(9).strip() or (match.group(6) or "").lower()
            owner = match.group(2) or host
            found.append(
                Uplink((match.group(1) or "").lower(), owner, int(match.group(4)), switch, int(match.group(8)))
            )
    return found


def uplinks_of(uplinks: list[Uplink], guids: dict[str, str], node: str) -> dict[str, Uplink]:
    """Uplinks of this node's adapters by adapter name.

    Parameters
    ----------
    guids
        Adapter → node GUID as sysfs spells it (``248a:0703:00a5:95c0``). An adapter whose GUID is not in the file is looked up by the node
        description (``node7 mlx5_0``).
    """
    found: dict[str, Uplink] = {}
    for adapter, text in guids.items():
        guid = normal_guid(text)
        description = f"{node} {adapter}"
        for uplink in uplinks:
            # iblinkinfo prints the GUID of the port, which is the node's or the next ones
            near = (
                bool(guid and uplink.guid)
                and uplink.guid[:14] == guid[:14]
                and 0 <= int(uplink.guid, 16) - int(guid, 16) <= 2
            )
            if near or uplink.host == description:
                found.setdefault(adapter, uplink)
    return found


def normal_guid(text: str) -> str:
    """Sixteen small hex digits, or empty.

    Examples
    --------
    >>> normal_guid("248a:0703:00a5:95c0")
    '248a070300a595c0'
    """
    match = GUID.fullmatch(text.strip().replace(":", ""))
    return match.group(1).lower() if match and match.group(1).strip("0") else ""


def _switch_names(text: str) -> dict[str, str]:
    names = {match.group(1).lower(): match.group(2).strip() for line in _lines(text) if (match := SWITCH.match(line))}
    counted: dict[str, int] = {}
    for name in names.values():
        counted[name] = counted.get(name, 0) + 1
    return {guid: name if name and counted[name] == 1 else f"{name} {guid}".strip() for guid, name in names.items()}


def _lines(text: str) -> Iterator[str]:
    return iter(text.splitlines()[:MAX_LINES])
