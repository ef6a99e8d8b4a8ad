"""`trainwarden demo`."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated

import typer

from trainwarden.errors import UnavailableError, UsageError
from trainwarden.records import Mode

BROKERS = ("tansu", "kafka")
GIVEN_BROKER_S = 10.0
MARKER = ".trainwarden-demo"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Fault = Annotated[str, typer.Option(help="freeze, kill, slow, slow-loader, nan, xid-log, link or none")]
Seed = Annotated[int, typer.Option(help="which node is hurt, and how")]
Directory = Annotated[Path, typer.Option(help="where all is written; what an earlier demonstration left there goes")]
KafkaUrl = Annotated[str | None, typer.Option(help="kafka://host:port of a broker that runs; default: an embedded one")]
Broker = Annotated[str, typer.Option(help="embedded broker: tansu or kafka")]
ModeOption = Annotated[str, typer.Option(help="how far the action service may go")]
Minutes = Annotated[float, typer.Option(help="length of a run with --fault none")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write the outcome here too")]


@app.command()
def run(
    fault: Fault = "freeze",
    seed: Seed = 0,
    directory: Directory = Path("demo-run"),
    kafka: KafkaUrl = None,
    broker: Broker = "tansu",
    mode: ModeOption = "auto",
    minutes: Minutes = 15.0,
    json_file: JsonFile = None,
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
    _check(broker, kafka, mode, json_file)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    home = _home(directory)
    layout = Layout(home.directory, seed=seed, broker=broker, kafka_url=kafka, mode=mode)
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:7.2f}  {line}", flush=True)

    try:
        result = scenario.run(layout, chosen, say, quiet_s=minutes * 60)
    except KeyboardInterrupt:
        print("stopped: every process of the demonstration is gone", file=sys.stderr)
        raise SystemExit(130) from None
    print(report.table(result))
    if json_file is not None:
        json_file.write_text(
            json.dumps({"injection": asdict(result.injection), "outcome": asdict(result.outcome)}, indent=1)
        )
    raise SystemExit(0 if result.outcome.passed else 1)


def _check(broker: str, kafka: str | None, mode: str, json_file: Path | None) -> None:
    """What would only fail in the middle of the run, or in a child, is told before anything is started."""
    from trainwarden.bus import connect
    from trainwarden.embedded.kafka import fetch_kafka

    if broker not in BROKERS:
        raise UsageError(f"--broker {broker}: expected {' or '.join(BROKERS)}")
    if mode not in tuple(Mode):
        raise UsageError(f"--mode {mode}: expected one of {', '.join(Mode)}")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file}: there is no directory {json_file.absolute().parent}")
    if kafka is not None:
        connect(kafka).wait_ready(GIVEN_BROKER_S)
    elif broker == "kafka":
        fetch_kafka()


def _interrupt(number: int, frame: object) -> None:
    """The first signal ends the run; a second one does not break the cleaning up."""
    del number, frame
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


@dataclass(frozen=True)
class _Home:
    """The directory of this run. `lock` keeps a second demonstration out as long as this process lives."""

    directory: Path
    lock: IO[str]


def _home(directory: Path) -> _Home:
    """The directory, empty but for our marker; one that holds anything of somebody else's, or is in use, is refused."""
    marker = directory / MARKER
    try:
        if directory.exists() and any(directory.iterdir()) and not marker.exists():
            raise UsageError(
                f"{directory}: is not empty and was not made by a demonstration: choose another --directory"
            )
        directory.mkdir(parents=True, exist_ok=True)
        lock = marker.open("a")
        _own(lock, directory)
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror}): choose another --directory") from None
    return _Home(directory, lock)


def _own(lock: IO[str], directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{directory}: another demonstration runs in it: wait for it, or choose another --directory"
        ) from None


def _require_training() -> None:
    needs = (("torch", "trainwarden[demo]"), ("trainwarden_hook", "trainwarden-hook"), ("sklearn", "trainwarden[demo]"))
    for module, package in needs:
        if importlib.util.find_spec(module) is None:
            raise UnavailableError(f"the demonstration needs {module}: pip install {package}")
