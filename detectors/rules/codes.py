"""Codes that drivers and kernels print: which mean broken hardware at once, which are only worth a look, and which blame the program."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec

from detectors.base import Detector, Frame, series_evidence
from detectors.state import decode_state, encode_state
from detectors.synthetic import Example, Scene, SyntheticCluster, node_entity
from trainwarden.clock import NS_PER_S
from trainwarden.records import Entity, EntityKind, LogEvent, Verdict
from trainwarden.settings import option

_FATAL_ACTIONS = frozenset({"RESTART_BM", "RESET_GPU", "RESTART_VM", "WORKFLOW_XID_48"})
_LINK_ACTIONS = frozenset({"WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"})
_APPLICATION_XIDS = frozenset({13, 31, 43, 45})
_PROCESS_CODES = frozenset({"oom_kill", "segfault", "cuda_oom", "cuda_error"})
"""Say something of a process or its memory, whatever their severity: never of broken hardware."""
_SYMPTOMS = frozenset({"nccl_timeout", "nccl_net_error", "nccl_peer_closed"})
"""Said by victims: who times out first is not who is to blame."""
_HOOK_CODES = frozenset({"save_refused", "worker_exit", "save_ok", "restored", "hook_bye"})
_MAX_SAID = 4096


@dataclass(frozen=True)
class CodeSettings:
    """Settings of `known_codes`."""

    repeat_s: float = option(60.0, "the same code of the same device is said again only after so long")


@dataclass(frozen=True)
class Meaning:
    """What a code says: kind of verdict, and a clause for the sentence."""

    kind: str
    clause: str


class State(msgspec.Struct):
    """When each (node, code, device) was last said."""

    said_ns: dict[str, int] = {}


class CodeDetector(Detector):
    """Says `fatal_code`, `suspect_code` or `save_failed`."""

    name = "known_codes"
    kinds = ("fatal_code", "suspect_code", "save_failed")
    Settings = CodeSettings
    settings: CodeSettings

    def __init__(self, settings: CodeSettings | None = None) -> None:
        super().__init__(settings)
        self._state = State()

    def update(self, frame: Frame) -> list[Verdict]:
        verdicts = []
        for event in frame.logs:
            meaning = meaning_of(event)
            if meaning is not None and self._is_news(event):
                verdicts.append(self._say(event, meaning, frame))
        return verdicts

    @classmethod
    def example(cls) -> Example:
        """A GPU of node 2 falls off the bus in second 10."""
        fallen = Scene(log_events=[(2, "xid:79", {"pci": "0000:3b:00"}, -1)])
        return Example(
            SyntheticCluster(seed=1).frames(15, lambda second: fallen if second == 10 else None),
            "fatal_code",
            node_entity(2),
        )

    def snapshot(self) -> bytes:
        return encode_state(self._state)

    def restore(self, payload: bytes) -> None:
        self._state = decode_state(payload, State)

    def _is_news(self, event: LogEvent) -> bool:
        key = f"{event.node}|{event.code}|{_device(event)}"
        last_ns = self._state.said_ns.get(key)
        if last_ns is not None and abs(event.observed_at_ns - last_ns) < self.settings.repeat_s * NS_PER_S:
            return False
        self._state.said_ns.pop(key, None)
        self._state.said_ns[key] = event.observed_at_ns
        if len(self._state.said_ns) > _MAX_SAID:
            del self._state.said_ns[next(iter(self._state.said_ns))]
        return True

    def _say(self, event: LogEvent, meaning: Meaning, frame: Frame) -> Verdict:
        layout = frame.topology.job(event.job) if event.job else frame.topology.job_of(event.node)
        ranks = layout.ranks_on(event.node) if layout is not None else ()
        device = _device(event)
        where = f"{event.node}, device {device}" if device else event.node
        text = f"{where} reported {event.code}: {meaning.clause}"
        at_ns = event.observed_at_ns
        line = series_evidence(
            f"log of {event.source or 'the node'}", "event", [at_ns], [float(event.repeat)], note=event.line[:240]
        )
        return self.verdict(
            kind=meaning.kind, entity=Entity(EntityKind.NODE, event.node, event.node), window=(at_ns, at_ns), onset_at_ns=at_ns,
            job=event.job or (layout.job if layout else ""), attempt=layout.attempt if layout else event.attempt,
            rank=event.rank if event.rank >= 0 else min(ranks, default=-1), score=float(event.repeat),
            confidence=0.98 if meaning.kind != "suspect_code" else 0.5, text=text, evidence=(line,),
        )  # fmt: skip


def meaning_of(event: LogEvent) -> Meaning | None:
    """What an event's code means; None when it means nothing by itself.

    Examples
    --------
    >>> meaning_of(LogEvent(code="xid:79", severity="critical")).kind
    'fatal_code'
    >>> meaning_of(LogEvent(code="xid:31", severity="warning")).kind
    'suspect_code'
    """
    name, _, number = event.code.partition(":")
    if name in _HOOK_CODES or name in _SYMPTOMS or not name:
        return None
    if name == "save_failed":
        return Meaning("save_failed", event.attributes.get("error", "") or "the checkpoint was not written")
    if name == "xid":
        return _meaning_of_xid(int(number), event.severity) if number.isdigit() else None
    if event.severity == "critical" and name not in _PROCESS_CODES:
        return Meaning("fatal_code", "broken hardware or a dead kernel by its own words")
    return (
        Meaning("suspect_code", "worth a look; by itself no reason to remove the node")
        if event.severity != "info"
        else None
    )


def _meaning_of_xid(number: int, severity: str) -> Meaning | None:
    action = xid_actions().get(number, "")
    if action in _FATAL_ACTIONS or (action in _LINK_ACTIONS and severity == "critical"):
        return Meaning("fatal_code", f"the vendor's remedy is {action}")
    if number in _APPLICATION_XIDS or action == "RESTART_APP":
        return Meaning(
            "suspect_code", "usually the program's fault; the node is suspect only when it recurs there across jobs"
        )
    if severity == "info" and action == "IGNORE":
        return None
    return Meaning(
        "suspect_code", f"the vendor's remedy is {action or 'unknown'}; by itself no reason to remove the node"
    )


@cache
def xid_actions() -> dict[int, str]:
    """Xid → NVIDIA's recommended action."""
    text = resources.files("detectors.rules").joinpath("xid_action.csv").read_text()
    return {int(row["xid"]): row["action"] for row in csv.DictReader(text.splitlines())}


def _device(event: LogEvent) -> str:
    return next((event.attributes[key] for key in ("pci", "gpu", "device") if event.attributes.get(key)), "")
