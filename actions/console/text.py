"""The status for a terminal: plain text, aligned, the bad news first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actions.console.model import IncidentLine, NodeLine, Status

SHOWN_NODES = 64
SHOWN_ACTIONS = 12
SHOWN_ENDED = 5
MARKS = {"ok": "ok", "suspect": "SUSPECT", "excluded": "excluded", "silent": "NO DATA", "unknown": "unknown"}


def render_text(status: Status) -> str:
    """The whole status, ending in a line break. Control characters of names are shown as escapes."""
    blocks = [_head(status), _jobs(status), _nodes(status), _incidents(status), _actions(status)]
    return "\n".join(block for block in blocks if block)


def _head(status: Status) -> str:
    telemetry = (
        "no telemetry in the store"
        if status.telemetry_age_s is None
        else f"telemetry {age(status.telemetry_age_s)} old"
    )
    lines = [f"cluster {safe(status.cluster)}   {status.at}   mode {safe(status.mode)}   {telemetry}"]
    if status.kill_switch:
        lines.append(f"KILL SWITCH IS ON, nothing is done: {safe(status.kill_switch)}")
    lines += [f"{part.name} {part.trouble}: {safe(part.detail)}" for part in status.parts if not part.ok]
    lines += [f"worker: {safe(part.detail)}" for part in status.parts if part.ok and part.name == "worker"]
    return "\n".join(lines) + "\n"


def _jobs(status: Status) -> str:
    rows = [
        [
            job.job,
            str(job.attempt),
            f"{job.ranks}/{job.world}",
            number(job.last_step),
            unit(job.step_ms, "ms"),
            age(job.step_age_s),
        ]
        for job in status.jobs
    ]
    return (
        table(["JOB", "ATTEMPT", "RANKS", "STEP", "STEP TIME", "NEWEST STEP"], rows) or "no steps in the last minutes\n"
    )


def _nodes(status: Status) -> str:
    order = ["suspect", "silent", "excluded", "unknown", "ok"]
    worst_first = sorted(status.nodes, key=lambda node: order.index(node.state))
    shown = worst_first if len(worst_first) > SHOWN_NODES else list(status.nodes)
    text = table(
        ["NODE", "STATE", "LAST TICK", "LAST STEP", "RANKS", "CPU", "WHY"],
        [_node(node) for node in shown[:SHOWN_NODES]],
    )
    left = len(status.nodes) - SHOWN_NODES
    return text + (f"and {left} more nodes, none of them worse\n" if left > 0 else "")


def _node(node: NodeLine) -> list[str]:
    step = f"{number(node.last_step)} ({age(node.step_age_s)})" if node.last_step is not None else "-"
    cpu = f"{node.cpu_busy_ratio:.0%}" if node.cpu_busy_ratio is not None else "-"
    return [
        node.node,
        MARKS[node.state],
        age(node.tick_age_s),
        step,
        ",".join(map(str, node.ranks)) or "-",
        cpu,
        node.why,
    ]


def _incidents(status: Status) -> str:
    if not status.incidents:
        return "no incidents\n"
    ended = [incident for incident in status.incidents if not incident.is_open][:SHOWN_ENDED]
    rows = [_incident(incident) for incident in [*status.open_incidents, *ended]]
    text = table(["INCIDENT", "STATUS", "SEVERITY", "KIND", "CULPRIT", "SURE", "BEGAN", "TITLE"], rows)
    reports = [
        f"  {safe(incident.incident_id[:8])}: {safe(incident.report)}\n"
        for incident in status.open_incidents
        if incident.report
    ]
    return text + "".join(reports)


def _incident(incident: IncidentLine) -> list[str]:
    return [incident.incident_id[:8], incident.status, incident.severity, incident.kind, incident.culprit or "nobody",
            f"{incident.confidence:.0%}", incident.began_at[11:19], incident.title]  # fmt: skip


def _actions(status: Status) -> str:
    rows = [[line.at[11:23], line.incident_id[:8], line.verb or "(plan)", line.target, line.status, line.mode,
             "; ".join(filter(None, (line.rail, line.reason)))] for line in status.actions[:SHOWN_ACTIONS]]  # fmt: skip
    return table(["AT", "INCIDENT", "VERB", "TARGET", "STATUS", "MODE", "REASON"], rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns; empty for no rows."""
    cells = [[safe(cell)[:120] for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [list(head), *cells]
    ]
    return "\n".join(lines) + "\n"


def safe(text: str) -> str:
    """`text` without anything that could move a terminal's cursor: names come from machines that may be broken, or hostile."""
    return "".join(character if character.isprintable() else f"\\x{ord(character):02x}" for character in text)


def age(seconds: float | None) -> str:
    """A short age.

    Examples
    --------
    >>> [age(x) for x in (None, 0.4, 42.0, 190.0, 7300.0)]
    ['-', '0.4s', '42s', '3m10s', '2h01m']
    """
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    if seconds < 100:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def number(value: int | None) -> str:
    """A count, or a dash."""
    return "-" if value is None else str(value)


def unit(value: float | None, name: str) -> str:
    """A value with its unit, or a dash."""
    return "-" if value is None else f"{value:g} {name}"
