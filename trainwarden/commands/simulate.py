"""`trainwarden simulate`."""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwarden import config as configuration
from trainwarden import topics
from trainwarden.bus import Message, connect
from trainwarden.cli import ConfigOption
from trainwarden.clock import NS_PER_MS, NS_PER_S, Clock, SystemClock
from trainwarden.commands.lifecycle import configure_logging, stop_event
from trainwarden.errors import BusError, UsageError

if TYPE_CHECKING:
    from collectors.simulated.encode import Sent
    from streams.recording import Recorder

log = logging.getLogger(__name__)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FLUSH_TIMEOUT_S = 60.0
RETRY_S = 0.2


@app.command()
def run(
    nodes: Annotated[int, typer.Option(help="machines of eight GPUs")] = 1250,
    minutes: Annotated[float, typer.Option(help="simulated time")] = 30.0,
    rate: Annotated[float, typer.Option(help="ticks per simulated second")] = 1.0,
    seed: Annotated[int, typer.Option(help="same seed, same bytes")] = 0,
    faults: Annotated[
        str, typer.Option(help="none, mix[:COUNT], or KIND[@TARGET][:START[+SECONDS]][xMAGNITUDE],...")
    ] = "none",
    without: Annotated[str, typer.Option(help="kinds that a mix leaves out, comma-separated")] = "",
    jobs: Annotated[
        str, typer.Option(help="mix, or COUNTxNODES:PROFILE,... (dense, pipeline, moe, longseq, ddp, recsys)")
    ] = "mix",
    rails: Annotated[int, typer.Option(help="training adapters per node: 1, 2, 4 or 8")] = 8,
    disorder: Annotated[float, typer.Option(help="scale of the healthy disorder")] = 1.0,
    speed: Annotated[
        str, typer.Option(help="simulated seconds per second, or max; default max to a directory, 1 to Kafka")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="a new directory for the recording")] = None,
    kafka: Annotated[bool, typer.Option("--kafka", help="publish to the broker of the configuration instead")] = False,
    truth: Annotated[
        Path | None, typer.Option(help="where the answers go; default OUT.truth.json, never in the recording")
    ] = None,
    config: ConfigOption = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="show the kinds of fault and end")] = False,
) -> None:
    """Simulate a cluster with faults: to a recording that `trainwarden replay` reads, or live into Kafka."""
    if list_faults:
        _print_faults()
        return
    from collectors.simulated.run import Pace, build, write_truth
    from collectors.simulated.run import run as simulate
    from collectors.simulated.spec import START_NS, Spec

    configure_logging()
    pace_speed = _checked(minutes, speed, out, kafka)
    clock, length_s = SystemClock(), 60.0 * minutes
    start_ns = clock.now_ns() // NS_PER_S * NS_PER_S if kafka else START_NS
    spec = Spec(nodes=nodes, seed=seed, rails=rails, rate_hz=rate, jobs=jobs, disorder=disorder, start_ns=start_ns)
    simulator = build(spec, faults, length_s, [word for word in without.split(",") if word])
    sheet_path = truth or Path(f"{out}.truth.json" if out else f"simulated-{seed}.truth.json")
    sink = _Broker(configuration.load(config).kafka.url, clock) if kafka else _Folder(_given(out), start_ns)
    begun = time.process_time()
    pace = Pace(clock, pace_speed, clock.now_ns() - start_ns if kafka else 0)
    told = simulate(simulator, round(length_s * rate), sink.deliver, pace, stop_event().is_set)
    sink.close()
    sheet = write_truth(sheet_path, simulator, faults, told.intervals / rate)
    print(f"{told.messages} messages, {told.bytes / 1e6:.1f} MB of {nodes} nodes in {told.intervals} ticks, {len(simulator.jobs)} jobs, "
          f"{time.process_time() - begun:.1f} s of processor time, at most {told.behind_s:.1f} s behind")  # fmt: skip
    print(f"{len(sheet['faults'])} faults: {sheet_path}")


def _checked(minutes: float, speed: str, out: Path | None, kafka: bool) -> float:
    """Speed as a number, 0 for as fast as possible."""
    if kafka == (out is not None):
        raise UsageError("trainwarden simulate: give either --out DIRECTORY or --kafka, and only one of them")
    if not 0 < minutes <= 7 * 24 * 60:
        raise UsageError(f"--minutes: {minutes:g} found, expected more than 0 and at most 10080 (a week)")
    word = speed or ("1" if kafka else "max")
    if word == "max":
        return 0.0
    try:
        number = float(word)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1000:
        raise UsageError(f"--speed: {speed!r} found, expected a number above 0 and at most 1000, or max")
    return number


def _given(out: Path | None) -> Path:
    if out is None:
        raise UsageError("--out: no directory given")
    return out


class _Folder:
    """Messages into a recording, laid out over partitions as a broker would."""

    def __init__(self, directory: Path, start_ns: int) -> None:
        from streams.recording import Recorder

        self._recorder: Recorder = Recorder(directory)
        self._start_ns = start_ns
        self._offsets: Counter[tuple[str, int]] = Counter()

    def deliver(self, sent: Sequence[Sent]) -> None:
        for message in sent:
            partition = zlib.crc32(message.key) % topics.BY_NAME[message.topic].partitions
            offset = self._offsets[message.topic, partition]
            self._offsets[message.topic, partition] += 1
            at_ms = (self._start_ns + round(message.arrives_s * NS_PER_S)) // NS_PER_MS
            self._recorder.write(Message(message.topic, partition, offset, message.key, message.value, at_ms))

    def close(self) -> None:
        self._recorder.close()


class _Broker:
    """Messages to a broker; its topics are created first. What it does not take is sent again: a cluster's collectors would."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._clock = clock
        self._bus = connect(url)
        self._bus.wait_ready(10.0)
        self._bus.ensure_topics(topics.ALL)
        self._failed: list[tuple[str, bytes, bytes]] = []
        self._publisher = self._bus.publisher(self._note)

    def deliver(self, sent: Sequence[Sent]) -> None:
        self._publish((message.topic, message.key, message.value) for message in sent)
        end_ns = self._clock.monotonic_ns() + int(FLUSH_TIMEOUT_S * NS_PER_S)
        while (error := self._flush()) is not None:
            if self._clock.monotonic_ns() > end_ns:
                raise error
            failed, self._failed = self._failed, []
            log.warning("%s; %d messages are sent again", error, len(failed))
            self._clock.sleep(RETRY_S)
            self._publish(failed)

    def close(self) -> None:
        self._publisher.close()
        self._bus.close()

    def _publish(self, messages: Iterable[tuple[str, bytes, bytes]]) -> None:
        for topic, key, value in messages:
            self._publisher.publish(topic, key, value)

    def _flush(self) -> BusError | None:
        try:
            self._publisher.flush(FLUSH_TIMEOUT_S)
        except BusError as error:
            return error
        return None

    def _note(self, topic: str, key: bytes, value: bytes, reason: str) -> None:
        del reason
        self._failed.append((topic, key, value))


def _print_faults() -> None:
    from collectors.simulated.faults import kinds

    print(f"{'kind':22} {'strikes':7} {'class':11} {'magnitude':34} {'course':16} right answer")
    for kind in kinds().values():
        low, usual, high = kind.magnitude
        size = f"{low:g} to {high:g}, usually {usual:g} {kind.unit}" if low != high else "-"
        print(f"{kind.name:22} {kind.scope:7} {kind.cls:11} {size[:34]:34} {kind.course!s:16} {kind.action}")
