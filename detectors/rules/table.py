"""The table of codes: what a code means, what the vendor asks for, when its coming back is news, and how long it stands."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from trainwarden.settings import parse_duration_ms

SEVERITIES = ("info", "warning", "error", "critical")
ACTIONS = frozenset({"RESTART_APP", "RESET_GPU", "REBOOT_NODE", "REPLACE", "CHECK_NVLINK", "INSPECT", "UPDATE", "REPORT",
                     "FOLLOW_OTHER", "NONE"})  # fmt: skip
VERDICTS = frozenset({"fatal_code", "suspect_code", "save_failed", "link_rerouted", "none"})


@dataclass(frozen=True)
class Recurrence:
    """So many within so many hours on one node: by `event`, by `line`, or by `job`."""

    count: int
    hours: float
    by: str


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes
    ----------
    quiet_s
        The opinion is taken back after so long without the code; 0 = never for that reason.
    until
        (code, severity) of the event that takes the opinion back, if one does.
    vendor_action
        What the vendor's map says, word for word; empty for codes that are not in it.
    differs
        Why this row is not what the vendor's map says; empty where it agrees.
    """

    code: str
    severity: str
    verdict: str
    action: str
    meaning: str
    remedy: str
    recurrence: Recurrence | None
    quiet_s: float
    until: tuple[str, str]
    vendor_action: str
    vendor_severity: str
    source: str
    differs: str

    @property
    def sticky(self) -> bool:
        """Whether nothing takes the opinion back."""
        return not self.quiet_s and not self.until[0]


class Table:
    """Rules by code. Read only.

    Raises
    ------
    ValueError
        A row has an unknown verdict, action or severity; the message names row and key.
    """

    def __init__(self, rows: list[dict[str, str]], levels: dict[str, str]) -> None:
        self._levels = levels
        self._exact: dict[str, list[Rule]] = {}
        self.rules = tuple(_rule(row, number) for number, row in enumerate(rows, start=2))
        for rule in self.rules:
            for code in expanded(rule.code):
                self._exact.setdefault(code, []).append(rule)

    def find(self, code: str, severity: str) -> Rule | None:
        """The first row that fits, None for a code that means nothing at this severity or is no code."""
        if not code or code.endswith(":"):
            return None
        heard = SEVERITIES.index(severity) if severity in SEVERITIES else 1
        fits = (
            r for key in self._keys(code) for r in self._exact.get(key, ()) if SEVERITIES.index(r.severity) <= heard
        )
        return next(fits, None)

    def codes(self) -> tuple[str, ...]:
        """Every code and family of codes, in order of the table."""
        return tuple(self._exact)

    def _keys(self, code: str) -> tuple[str, ...]:
        name, colon, number = code.partition(":")
        if name == "npu" and number.upper() in self._levels:
            return (f"npu:{self._levels[number.upper()]}",)
        return (code, f"{name}:*", "*") if colon else (code, "*")


@cache
def table() -> Table:
    """The shipped table."""
    files = resources.files("detectors.rules")
    rows = list(csv.DictReader(files.joinpath("codes.csv").read_text(encoding="utf-8").splitlines()))
    levels = csv.DictReader(files.joinpath("ascend_codes.csv").read_text(encoding="utf-8").splitlines())
    return Table(rows, {row["code"].upper(): row["level"] for row in levels})


def expanded(code: str) -> tuple[str, ...]:
    """Codes of a pattern.

    Examples
    --------
    >>> expanded("xid:163-165")
    ('xid:163', 'xid:164', 'xid:165')
    >>> expanded("oom_kill")
    ('oom_kill',)
    """
    name, _, number = code.partition(":")
    low, dash, high = number.partition("-")
    if not (dash and low.isdigit() and high.isdigit()):
        return (code,)
    return tuple(f"{name}:{n}" for n in range(int(low), int(high) + 1))


def _rule(row: dict[str, str], number: int) -> Rule:
    for key, known in (("verdict", VERDICTS), ("action", ACTIONS), ("severity", SEVERITIES)):
        if row[key] not in known:
            raise ValueError(
                f"codes.csv line {number} ({row['code']}): {key} is {row[key]!r}, expected one of {sorted(known)}"
            )
    how, _, rest = row["stands"].partition(":")
    until, _, severity = rest.rpartition("@") if how == "until" else ("", "", "")
    return Rule(
        row["code"], row["severity"], row["verdict"], row["action"], row["meaning"], row["remedy"], _recurrence(row),
        parse_duration_ms(rest, "stands", "s") / 1000 if how == "quiet" else 0.0, (until, severity), row["vendor_action"],
        row["vendor_severity"], row["source"], row["differs"],
    )  # fmt: skip


def _recurrence(row: dict[str, str]) -> Recurrence | None:
    if not row["recur_count"]:
        return None
    return Recurrence(int(row["recur_count"]), float(row["recur_hours"]), row["recur_by"])
