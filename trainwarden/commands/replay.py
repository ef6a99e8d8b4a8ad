"""`trainwarden replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from trainwarden import config as configuration
from trainwarden.cli import ConfigOption
from trainwarden.records import Incident, Record, Verdict

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    recording: Annotated[
        Path, typer.Argument(help="a directory of `trainwarden record`, or <folder>/<run> of real-fault tables")
    ],
    config: ConfigOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="print reports and evidence too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Print the verdicts and incidents of a recording: the same as the live pipeline's on the same records."""
    from streams.replay import replay

    told = replay(recording, configuration.load(config))
    if as_json:
        for record in (*told.verdicts, *told.newest()):
            print(json.dumps(_plain(record)))
        return
    begun = min((v.onset_at_ns for v in told.verdicts), default=0)
    for verdict in told.verdicts:
        _print_verdict(verdict, begun, explain)
    for incident in told.newest():
        _print_incident(incident, begun, explain)
    print(f"{told.frames} frames, {len(told.verdicts)} verdicts, {len(told.newest())} incidents")


def _plain(record: Record) -> dict[str, object]:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return {"record": type(record).__name__.lower(), **msgspec.to_builtins(fields)}


def _print_verdict(verdict: Verdict, begun_ns: int, explain: bool) -> None:
    word = "clears " if verdict.clears else ""
    print(
        f"{_at(verdict.window_end_ns, begun_ns)}  verdict   {verdict.detector}: {word}{verdict.kind} on {verdict.entity}  {verdict.text}"
    )
    if explain:
        for item in verdict.evidence:
            tail = ", ".join(f"{value:g}" for value in item.values[-8:])
            print(f"{'':12}{item.name} [{item.unit}] …{tail}  expected {item.low:g} to {item.high:g} {item.note}")


def _print_incident(incident: Incident, begun_ns: int, explain: bool) -> None:
    culprit = ", ".join(map(str, incident.culprits)) or "nobody"
    remedy = " → ".join(incident.remedy) or "nothing"
    at = _at(incident.timeline.verdict_at_ns, begun_ns)
    what = f"{incident.kind}, culprit {culprit} ({incident.confidence:.0%}), {incident.status}"
    print(f"{at}  incident  {what}; remedy {remedy} [{incident.reach}]")
    if explain:
        print(f"{'':12}{incident.report}")


def _at(moment_ns: int, begun_ns: int) -> str:
    return f"{(moment_ns - begun_ns) / 1e9:+9.2f}s"
