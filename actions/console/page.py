"""The one HTML page: rendered and escaped here, refreshed by a few lines of script; no build step, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from actions.console.model import SILENT_AFTER_S, IncidentLine, NodeLine, Series, Status
from actions.console.text import age, number, unit

MARKS = {"ok": "●", "suspect": "◆", "excluded": "▢", "silent": "?", "unknown": "?"}
LEGEND = {"ok": "reports", "suspect": "suspect", "excluded": "excluded", "silent": "no data"}
CELLS = 200
"""Above this number nodes are cells without text."""
TABLE_ROWS = 30

_CSS = files("actions.console").joinpath("page.css").read_text(encoding="utf-8")
_JS = files("actions.console").joinpath("page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_CSS)}; script-src {_hash(_JS)}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: even a text that slipped through the escaping could run nothing."""


def render_page(status: Status, chosen: str = "") -> str:
    """The whole document. `chosen` is the id of an incident that is shown open."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<title>{escape(title_of(status))}</title><link rel="icon" href="data:,"><style>{_CSS}</style></head><body>'
        '<p id="lost" class="notice" role="alert">Trainwarden does not answer. What is shown is <span id="lost-age"></span> s old.</p>'
        f'<div id="live">{render_live(status, chosen)}</div><script>{_JS}</script></body></html>'
    )


def title_of(status: Status) -> str:
    """Title of the browser's tab: open incidents first."""
    count = len(status.open_incidents)
    return f"({count}) {status.cluster} - Trainwarden" if count else f"{status.cluster} - Trainwarden"


def render_live(status: Status, chosen: str = "") -> str:
    """Everything that changes."""
    return (
        _header(status) + _notices(status) + "<main>" + _nodes(status) + _incidents(status, chosen) + _actions(status)
        + _deliveries(status) + "</main>" + _own_health(status)
    )  # fmt: skip


def _header(status: Status) -> str:
    jobs = "".join(
        f'<span class="job"><b>{escape(job.job)}</b> attempt {job.attempt} &middot; step {number(job.last_step)} &middot; '
        f"{unit(job.step_ms, 'ms')} a step &middot; {job.ranks}/{job.world} ranks &middot; last step {age(job.step_age_s)} ago</span>"
        for job in status.jobs
    )
    reporting = sum(node.tick_age_s is not None and node.tick_age_s <= SILENT_AFTER_S for node in status.nodes)
    telemetry = f"telemetry {reporting}/{len(status.nodes)} nodes"
    old = f", {age(status.telemetry_age_s)} old" if status.telemetry_age_s is not None else ", none in the store"
    kill = (
        '<span class="badge kill">KILL SWITCH ON</span>'
        if status.kill_switch
        else '<span class="badge good">kill switch off</span>'
    )
    return (
        f'<header><h1>{escape(status.cluster)}</h1>{jobs}<span class="badge mode">mode {escape(status.mode)}</span>{kill}'
        f'<span class="right">{telemetry}{old} &middot; {escape(status.at[11:19])} UTC</span></header>'
    )


def _notices(status: Status) -> str:
    told = [f"Kill switch: {status.kill_switch}. Nothing is done until it is removed."] if status.kill_switch else []
    told += [f"{part.name} {part.trouble}: {part.detail}." for part in status.parts if not part.ok]
    told += [
        f"{part.name}: {part.detail}."
        for part in status.parts
        if part.ok and part.name == "actions" and part.detail != "leading"
    ]
    return "".join(f'<p class="notice" role="status">{escape(text)}</p>' for text in told)


def _own_health(status: Status) -> str:
    well = " &middot; ".join(f"{escape(part.name)}: {escape(part.detail)}" for part in status.parts if part.ok)
    return f"<footer>{well}</footer>" if well else ""


def _nodes(status: Status) -> str:
    if not status.nodes:
        inner = '<p class="empty">No node has reported in the last minutes.</p>'
    elif len(status.nodes) > CELLS:
        inner = '<div class="tiny">' + "".join(_cell(node) for node in status.nodes) + "</div>"
    else:
        inner = '<div class="grid">' + "".join(_node(node) for node in status.nodes) + "</div>"
    legend = "".join(f"<span>{MARKS[state]} {text}</span>" for state, text in LEGEND.items())
    return f'<section class="nodes"><h2>Nodes</h2>{inner}<p class="legend">{legend}</p></section>'


def _cell(node: NodeLine) -> str:
    return f'<i class="{escape(node.state)}" title="{escape(f"{node.node}: {node.state}, {node.why}")}"></i>'


def _node(node: NodeLine) -> str:
    ranks = f"rank {', '.join(map(str, node.ranks))}" if node.ranks else "no rank"
    step = f" &middot; step {number(node.last_step)}" if node.last_step is not None else ""
    tick = "no tick" if node.tick_age_s is None else f"tick {age(node.tick_age_s)} ago"
    cpu = f" &middot; cpu {node.cpu_busy_ratio:.0%}" if node.cpu_busy_ratio is not None else ""
    return (
        f'<div class="node {escape(node.state)}"><span class="mark" aria-hidden="true">{MARKS[node.state]}</span><b>{escape(node.node)}</b>'
        f'<p class="why">{escape(node.why)}</p><p>{ranks}{step}</p><p>{tick}{cpu}</p></div>'
    )


def _incidents(status: Status, chosen: str) -> str:
    shown = "".join(
        _incident(incident, incident.is_open or incident.incident_id == chosen)
        for incident in status.incidents[:TABLE_ROWS]
    )
    return f'<section class="incidents"><h2>Incidents</h2>{shown or "<p class=empty>No incidents.</p>"}</section>'


def _incident(incident: IncidentLine, expanded: bool) -> str:
    over = "" if incident.is_open else " over"
    meta = f"{incident.status} · {incident.severity} · {incident.kind} · {incident.job} · began {incident.began_at[11:19]} UTC"
    main = {f"{incident.kind} {culprit}" for culprit in incident.culprit.split(", ")}
    causes = ", ".join(f"{cause} ({probability:.0%})" for cause, probability in incident.causes if cause not in main)
    facts = {
        "culprit": f"{incident.culprit or 'nobody to blame'}, {incident.confidence:.0%} sure", "also considered": causes,
        "victims": ", ".join(incident.victims[:32]), "last good step": number(incident.last_step),
        "recommended": ", ".join(incident.remedy) or "nothing", "ended because": incident.close_reason,
    }  # fmt: skip
    listed = "".join(
        f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value and value != "-"
    )
    moments = "".join(f"<li>{escape(at[11:23])}<small>{escape(name)}</small></li>" for name, at in incident.timeline)
    return (
        f'<details class="incident{over}" id="{escape(f"i-{incident.incident_id}")}"{" open" if expanded else ""}>'
        f'<summary><b>{escape(incident.title or incident.kind)}</b><span class="meta">{escape(meta)}</span></summary>'
        f'<ol class="time">{moments}</ol><p class="report">{escape(incident.report)}</p><dl class="facts">{listed}</dl>'
        + "".join(_figure(series) for series in incident.evidence[:6])
        + "</details>"
    )


def _figure(series: Series) -> str:
    present = [value for value in series.values if value is not None]
    band = f", expected {_range(series)}" if series.low is not None or series.high is not None else ""
    last = f", last {present[-1]:g}" if present else ", no values"
    caption = f"{series.name} [{series.unit}]{last}{band}{'. ' + series.note if series.note else ''}"
    return f"<figure>{_plot(series, present) if len(present) > 1 else ''}<figcaption>{escape(caption)}</figcaption></figure>"


def _range(series: Series) -> str:
    low = "" if series.low is None else f"{series.low:g}"
    high = "" if series.high is None else f"{series.high:g}"
    return f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"


def _plot(series: Series, present: Sequence[float]) -> str:
    """A sparkline: the expected band behind, gaps where values are absent."""
    bounds = [*present, *(edge for edge in (series.low, series.high) if edge is not None)]
    bottom, top = min(bounds), max(bounds)
    span = (top - bottom) or 1.0

    def y(value: float) -> float:
        return 42 - 38 * (value - bottom) / span

    step = 420 / max(len(series.values) - 1, 1)
    low, high = y(bottom if series.low is None else series.low), y(top if series.high is None else series.high)
    banded = series.low is not None or series.high is not None
    rect = f'<rect x="0" y="{high:.1f}" width="420" height="{max(low - high, 1):.1f}"/>' if banded else ""
    lines = "".join(
        _stroke(points)
        for points in _pieces([(i * step, None if v is None else y(v)) for i, v in enumerate(series.values)])
    )
    return f'<svg viewBox="0 0 420 46" preserveAspectRatio="none" aria-hidden="true">{rect}{lines}</svg>'


def _pieces(points: Iterable[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def _stroke(points: Sequence[tuple[float, float]]) -> str:
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2"/>'
    return '<polyline points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>'


def _actions(status: Status) -> str:
    rows = [
        [(line.at[11:23], "at"), (line.verb or "(plan)", ""), (line.target, ""), (line.status, f"st-{line.status}"), (line.mode, ""),
         ("; ".join(filter(None, (line.rail, line.reason))), ""), (line.incident_id[:8], "at")]
        for line in status.actions[:TABLE_ROWS]
    ]  # fmt: skip
    return _table(
        "Actions", ["at", "verb", "target", "status", "mode", "reason", "incident"], rows, "Nothing has been done."
    )


def _deliveries(status: Status) -> str:
    rows = [
        [(line.at[11:23], "at"), (line.receiver, ""), (line.cause, ""), (str(line.attempt), ""), (line.status, f"st-{line.status}"),
         (line.reason, ""), (line.incident_id[:8], "at")]
        for line in status.deliveries[:TABLE_ROWS]
    ]  # fmt: skip
    head = ["at", "receiver", "cause", "attempt", "status", "reason", "incident"]
    return _table("Who was told", head, rows, "Nobody has been told anything.")


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], empty: str) -> str:
    if not rows:
        return f'<section class="wide"><h2>{heading}</h2><p class="empty">{empty}</p></section>'
    first = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="{escape(kind)}">{escape(text)}</td>' for text, kind in row) + "</tr>"
        for row in rows
    )
    return f'<section class="wide"><h2>{heading}</h2><div class="scroll"><table><tr>{first}</tr>{body}</table></div></section>'
