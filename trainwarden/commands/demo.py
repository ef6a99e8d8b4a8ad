"""`trainwarden demo`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.errors import UnavailableError, UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    fault: Annotated[str, typer.Option(help="freeze, kill, slow, slow-loader, nan, xid-log, link or none")] = "freeze",
    seed: Annotated[int, typer.Option(help="which node is hurt, and how")] = 0,
    directory: Annotated[
        Path | None, typer.Option(help="where everything is written; default: a new directory, removed at the end")
    ] = None,
    kafka: Annotated[
        str | None, typer.Option(help="kafka://host:port of a broker that runs; default: an embedded one")
    ] = None,
    broker: Annotated[str, typer.Option(help="embedded broker: tansu or kafka")] = "tansu",
    mode: Annotated[str, typer.Option(help="how far the action service may go")] = "auto",
    minutes: Annotated[float, typer.Option(help="length of a run with --fault none")] = 15.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the outcome here too")] = None,
) -> None:
    """Train a real model on four ranks, hurt one of them, and watch the job heal; exit 0 only if all was right."""
    from trainwarden.demo import report, scenario
    from trainwarden.demo.cluster import Layout
    from trainwarden.demo.faults.base import registry
    from trainwarden.demo.network import require_namespaces

    chosen = registry().get(fault)()
    if chosen.needs_namespaces:
        require_namespaces()
    _require_training()
    signal.signal(signal.SIGTERM, _interrupt)
    home = _home(directory)
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:7.2f}  {line}", flush=True)

    try:
        layout = Layout(home, seed=seed, broker=broker, kafka_url=kafka, mode=mode)
        result = scenario.run(layout, chosen, say, quiet_s=minutes * 60)
    except KeyboardInterrupt:
        print("stopped: every process of the demonstration is gone", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        if directory is None:
            shutil.rmtree(home, ignore_errors=True)
    print(report.table(result))
    if json_file is not None:
        json_file.write_text(
            json.dumps({"injection": asdict(result.injection), "outcome": asdict(result.outcome)}, indent=1)
        )
    raise SystemExit(0 if result.outcome.passed else 1)


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt


def _home(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="trainwarden-demo-"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ".writable").touch()
        (directory / ".writable").unlink()
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror}): choose another --directory") from None
    return directory


def _require_training() -> None:
    for module, package in (
        ("torch", "trainwarden[demo]"),
        ("trainwarden_hook", "trainwarden-hook"),
        ("sklearn", "trainwarden[demo]"),
    ):
        try:
            found = __import__("importlib.util", fromlist=["util"]).find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise UnavailableError(f"the demonstration needs {module}: pip install {package}")
