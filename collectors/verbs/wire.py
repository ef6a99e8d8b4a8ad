"""What child and parent say to each other over a socket that keeps messages apart: JSON, checked by whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collectors.verbs.addresses import Address, address_of

NO_LIBRARY = "no_library"


class WireError(Exception):
    """A message that is none of ours."""


@dataclass(frozen=True)
class Report:
    """What the child says once a second.

    Parameters
    ----------
    problem
        `NO_LIBRARY`, or empty.
    rails
        State of each port (empty: it works; else the reason of a gap) and its address, None while it has none.
    rows
        Median and longest round trip (ms), pings decided and lost, by path.
    """

    problem: str
    rails: Mapping[str, tuple[str, Address | None]]
    rows: Mapping[str, tuple[float | None, float | None, float, float]]
    refused: Mapping[str, int]
    cpu_ms: float


def report(
    rails: Mapping[str, tuple[str, Address | None]],
    rows: Mapping[str, list[float | None]],
    refused: Mapping[str, int],
    cpu_ms: float,
    problem: str = "",
) -> bytes:
    """The message."""
    spelled = {name: [state, address.text() if address is not None else ""] for name, (state, address) in rails.items()}
    return _packed({"problem": problem, "rails": spelled, "rows": rows, "refused": refused, "cpu_ms": cpu_ms})


def report_of(message: bytes) -> Report:
    """The report in a message; raises `WireError`."""
    facts = _unpacked(message)
    try:
        rails = {str(name): (str(state), address_of(text)) for name, (state, text) in facts["rails"].items()}
        rows = {
            str(path): (_number(median), _number(longest), float(sent), float(lost))
            for path, (median, longest, sent, lost) in facts["rows"].items()
        }
        refused = {str(reason): int(count) for reason, count in facts["refused"].items()}
        return Report(str(facts["problem"]), rails, rows, refused, float(facts["cpu_ms"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"a report in which {type(error).__name__}: {error}") from None


def orders(period_s: float, targets: Mapping[str, list[tuple[str, Address]]]) -> bytes:
    """The message that says whom each port asks, as (path, address), and how often."""
    spelled = {rail: [[path, address.text()] for path, address in paths] for rail, paths in targets.items()}
    return _packed({"period_s": period_s, "targets": spelled})


def orders_of(message: bytes) -> tuple[float, dict[str, list[tuple[str, Address]]]]:
    """(period, targets) of a message; raises `WireError`."""
    facts = _unpacked(message)
    try:
        period_s = float(facts["period_s"])
        found: dict[str, list[tuple[str, Address]]] = {}
        for rail, paths in facts["targets"].items():
            known = [(str(path), address_of(text)) for path, text in paths]
            found[str(rail)] = [(path, address) for path, address in known if address is not None]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"orders in which {type(error).__name__}: {error}") from None
    if not 0.01 <= period_s <= 3600:
        raise WireError(f"a period of {period_s} s, expected 0.01 to 3600")
    return period_s, found


def _packed(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, separators=(",", ":")).encode()


def _unpacked(message: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message of {len(message)} bytes is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise WireError(f"a message holds a {type(facts).__name__}, expected an object")
    return facts


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
