"""Fault codes of Ascend chips: Huawei's levels, what they ask for, and how grave they are."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources

from trainwarden.errors import ConfigError

# level: (severity of the event, remedy)
LEVELS: dict[str, tuple[str, str]] = {
    "NotHandle": ("info", "none"),
    "SubHealth": ("warning", "watch it; drain the node when it goes on"),
    "RestartRequest": ("warning", "restart the application if it cannot go on"),
    "RestartBusiness": ("warning", "restart the application"),
    "FreeRestartNPU": ("warning", "reset the accelerator after the job"),
    "PreSeparateNPU": ("error", "let the job end then take the accelerator out"),
    "RestartNPU": ("error", "reset the accelerator and restart the job"),
    "SeparateNPU": ("critical", "take the node out and replace the accelerator"),
}
UNKNOWN = ("warning", "report it to the vendor")
HEX = re.compile(r"\b(?:0x)?([0-9A-Fa-f]{8,9})\b")


@cache
def shipped() -> Mapping[str, str]:
    """Code → level, as Huawei's device plugin ships it."""
    text = resources.files("collectors.pages").joinpath("ascend_codes.csv").read_text(encoding="utf-8")
    return {row["code"].upper(): row["level"] for row in csv.DictReader(text.splitlines())}


def parse_levels(text: str, key: str) -> dict[str, str]:
    """Code → level in a ``faultCode.json`` of the device plugin, which operators may change.

    Raises
    ------
    ConfigError
        The file is no such table; the sentence names `key`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: the table of fault codes is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{key}: the table of fault codes is a {type(document).__name__}, expected an object of lists"
        )
    found: dict[str, str] = {}
    for group, codes in document.items():
        level = group.removesuffix("Codes").removesuffix("Fault")
        for code in codes if isinstance(codes, list) else []:
            found[str(code).upper()] = level
    return found


def code_of(value: float) -> str:
    """A page's number as Huawei writes the code: eight hexadecimal digits; empty for 0 and for what is none.

    Examples
    --------
    >>> code_of(2162237441.0)
    '80E12001'
    """
    return f"{int(value):08X}" if 0 < value < 1 << 36 and value == int(value) else ""


def codes_in(text: str) -> tuple[str, ...]:
    """Codes in the words of a tool: ``80E01801``, ``0x80e01801 0x8C204E00``; none in ``NA``."""
    return tuple(dict.fromkeys(code.upper() for code in HEX.findall(text)))
