"""What a warden tells of its node's links, as log events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwarden.records import LogEvent

if TYPE_CHECKING:
    from collectors.sources.steps import Datagram

SEVERITIES = {
    "lost": "error",
    "nccl_lost": "error",
    "nccl_moved": "warning",
    "nccl_failed": "warning",
    "nccl_port_down": "warning",
}
"""Of the rest all are news without blame, but for traffic that a node moved off a bad link of its own."""


def link_events(datagram: Datagram) -> tuple[LogEvent, ...]:
    """The event told; and once more under another code when no traffic of the node goes round a bad link any more."""
    event = datagram.event[:40] or "unknown"
    code = event if event.startswith("nccl_") else f"link_{event}"
    own_fault = event == "moved" and datagram.own
    told = _event(datagram, code, "warning" if own_fault else SEVERITIES.get(event, "info"))
    return (told, _event(datagram, "link_settled", "info")) if datagram.settled else (told,)


def _event(datagram: Datagram, code: str, severity: str) -> LogEvent:
    attributes = {
        "rail": datagram.rail, "to": datagram.to, "interface": datagram.interface, "cause": datagram.cause[:200],
        "peers": datagram.peers[:500], "peer_count": str(datagram.peer_count or ""), "hold_s": f"{datagram.hold_s:g}",
        "at_ns": str(datagram.at_ns or ""),
    }  # fmt: skip
    way = f"rail {datagram.rail} ({datagram.interface})" if datagram.rail else datagram.interface
    onto = f" to rail {datagram.to}" if datagram.to else ""
    why = f": {datagram.cause[:200]}" if datagram.cause else ""
    return LogEvent(
        source="links", severity=severity, code=code, line=f"{code} {way}{onto}, {datagram.peer_count} peers{why}",
        attributes={key: value for key, value in attributes.items() if value not in ("", "nan")}, job=datagram.job,
        attempt=datagram.generation,
    )  # fmt: skip
