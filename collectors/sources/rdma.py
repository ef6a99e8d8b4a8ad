"""RDMA ports (/sys/class/infiniband): link state each second, counters of the port and of its driver every ten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from collectors.asking import Answer, Question
from collectors.base import NAN, Context, Family, Row, Sample, Source, family
from collectors.devices import Devices
from collectors.files import Files
from collectors.network.counters import Deltas
from collectors.network.rdma import ALIASES, Counter, PortReader, Reading, gigabits, number_of_state, plain
from collectors.network.roles import ROLES, Neighbours, checked_roles, compiled
from collectors.sources.nic import NIC
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.records import Block, Gap, LogEvent
from trainwarden.settings import option

ROOT = "/sys/class/infiniband"
LINK_UP, ACTIVE = 5, 4
# thirty descriptors a port: with many ports they would use up what a process may have open
PORTS_KEPT_OPEN = 10
COUNTERS_WAIT_S = 5.0
RATE_EVERY_NS = 10 * NS_PER_S

RDMA = family(
    "rdma", "rdma",
    ("state", "enum", "state", "1 down, 2 init (cable fine, no subnet manager), 3 armed, 4 active, 5 active but deferred"),
    ("phys_state", "enum", "state", "1 sleep, 2 polling, 3 disabled, 4 training, 5 link up, 6 error recovery, 7 test"),
    ("remote_physical_errors_per_s", "1/s", "counter", "packets marked bad by the other end"),
    ("switch_relay_errors_per_s", "1/s", "counter", "packets the switch could not forward"),
    ("rx_constraint_errors_per_s", "1/s", "counter", "received packets refused by a rule (partition, raw)"),
    ("tx_constraint_errors_per_s", "1/s", "counter", "packets not sent because of a rule"),
    ("local_link_integrity_errors_per_s", "1/s", "counter", "times local errors passed their threshold"),
    ("buffer_overruns_per_s", "1/s", "counter", "times buffers ran over in consecutive flow control periods"),
    ("management_dropped_per_s", "1/s", "counter", "management packets dropped (VL15)"),
    ("packet_seq_errors_per_s", "1/s", "counter", "sequence error NAKs received: the other end missed packets"),
    ("rnr_naks_per_s", "1/s", "counter", "receiver-not-ready NAKs"),
    ("implied_naks_per_s", "1/s", "counter", "answers that imply a lost one before them"),
    ("duplicate_requests_per_s", "1/s", "counter", "requests received twice: the sender retransmitted"),
    ("out_of_buffer_per_s", "1/s", "counter", "packets dropped for want of a receive buffer"),
    ("adaptive_retransmits_per_s", "1/s", "counter", "adaptive retransmissions"),
    ("adaptive_retransmit_timeouts_per_s", "1/s", "counter", "adaptive retransmissions that timed out"),
    ("slow_restarts_per_s", "1/s", "counter", "slow restarts of RoCE"),
    ("slow_restart_cnps_per_s", "1/s", "counter", "congestion notifications made by slow restart"),
    ("cnp_handled_per_s", "1/s", "counter", "congestion notifications obeyed: this sender slowed down"),
    ("cnp_ignored_per_s", "1/s", "counter", "congestion notifications ignored"),
    ("retransmits_per_s", "1/s", "counter", "packets or segments sent again (EFA, irdma)"),
    ("retransmitted_bytes_per_s", "bytes/s", "counter", "octets sent again (EFA)"),
    ("request_errors_per_s", "1/s", "counter", "requests completed with an error"),
    ("response_errors_per_s", "1/s", "counter", "responses completed with an error"),
    ("flush_errors_per_s", "1/s", "counter", "requests flushed because their queue broke"),
    ("retries_exceeded_per_s", "1/s", "counter", "requests given up after all retries: NCCL sees error 12"),
    ("rnr_retries_exceeded_per_s", "1/s", "counter", "requests given up because the receiver was never ready"),
    ("rx_icrc_errors_per_s", "1/s", "counter", "RoCE packets with a wrong checksum"),
    ("rx_drops_per_s", "1/s", "counter", "packets the adapter dropped"),
    ("protocol_errors_per_s", "1/s", "counter", "packets that broke the protocol"),
    ("unrecoverable_errors_per_s", "1/s", "counter", "errors the driver calls unrecoverable"),
    ("unresponsive_remotes_per_s", "1/s", "counter", "EFA: peers that stopped answering"),
    ("impaired_remotes_per_s", "1/s", "counter", "EFA: connections with trouble on the way"),
    ("read_errors_per_s", "1/s", "counter", "EFA: RDMA reads that failed"),
    ("write_errors_per_s", "1/s", "counter", "EFA: RDMA writes that failed"),
    ("command_errors_per_s", "1/s", "counter", "EFA: commands that failed"),
    ("commands_unanswered_per_s", "1/s", "counter", "EFA: commands without an answer, a sign of a dead device"),
    ("keep_alives_per_s", "1/s", "counter", "EFA: signs of life; none at all means a dead device"),
)  # fmt: skip


@dataclass(frozen=True)
class Port:
    """One port: its device name in our families, and where /sys keeps it."""

    device: str
    number: str

    @classmethod
    def named(cls, name: str) -> Port:
        """The port of a row."""
        device, _, number = name.rpartition("/")
        return cls(device, number)

    @property
    def name(self) -> str:
        """Row name."""
        return f"{self.device}/{self.number}"

    @property
    def directory(self) -> str:
        """Of the device."""
        return f"{ROOT}/{self.device}"

    @property
    def base(self) -> str:
        """Directory of the port."""
        return f"{ROOT}/{self.device}/ports/{self.number}"


class State(NamedTuple):
    """Logical state, physical state, Gbit/s; None where the port does not say."""

    logical: int | None
    physical: int | None
    gbit_per_s: float | None


NO_STATE = State(None, None, None)


class Counted(NamedTuple):
    """What the counters of a port said; None while it is left alone."""

    reading: Reading | None


class RdmaSource(Source):
    """Ports as devices ``mlx5_0/1``: what every network port has goes into the family `nic`, what only RDMA has into `rdma`.

    Each port is read by itself: one that hangs has no state, a gap ``hung:mlx5_0/1``, and no counters once these are stale. Each counter
    file is a request to the adapter's firmware, so counters are read every `counters_every_s`, beside the agent, and their rates are
    repeated until the next reading or until they are stale. A port that refuses is left alone for an hour.
    """

    name: ClassVar[str] = "rdma"
    families: ClassVar[tuple[Family, ...]] = (NIC, RDMA)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.rdma]``."""

        counters_every_s: float = option(10.0, "cadence of counters; link states are read every tick")
        ignore: str = option("", "devices left out (regex), such as ports kept for the fabric manager")
        roles: dict[str, str] = option({}, 'device = "rail", "management" or "storage"')

    def __init__(self, context: Context, settings: Any) -> None:
        super().__init__(context, settings)
        self._ignored = compiled("collector.sources.rdma.ignore", settings.ignore)
        self._roles = checked_roles("collector.sources.rdma.roles", settings.roles)
        self.tree: Callable[[], Files] = lambda: Files(Path(context.files.root or "/"), context.clock)
        self._states: Devices[State] = Devices(
            lambda name: StateReader(self.tree(), context.clock, Port.named(name)).read, together=context.facts.together
        )
        self._counted: Devices[Counted] = Devices(self._counter, COUNTERS_WAIT_S)
        self._counters = Question("rdma", context.clock, settings.counters_every_s, self._read_counters)
        self._rates = PortRates(context)
        self._seen: Answer[dict[Port, Reading | None]] | None = None
        self._ports: list[Port] = []
        self._found_ns: int | None = None
        self._neighbours = Neighbours(context.files)
        self._said: tuple[object, ...] = ()
        self._packed: tuple[Block, ...] = ()

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        ports = self._present()
        if not ports:
            return Sample()
        answer = self._counters.newest()
        if answer is not None and answer is not self._seen:
            self._rates.take(answer.value)
        self._seen = answer
        states = self._states.read([port.name for port in ports])
        return Sample(self._blocks(ports, states, answer is not None), self._gaps(answer))

    def close(self) -> None:
        self._states.close()
        self._counted.close()

    def _blocks(self, ports: list[Port], states: dict[str, State], counted: bool) -> tuple[Block, ...]:
        """The blocks of both families, packed again only when something in them changed."""
        rates: Mapping[str, Row] = self._rates.rows if counted else {}
        said = (rates, tuple(ports), states)
        if said != self._said:
            self._said = said
            links = {p.name: (p, states.get(p.name, NO_STATE)) for p in ports}
            self._packed = NIC.block(
                {n: {**rates.get(n, {}), **_link(state), "role": self._role(p)} for n, (p, state) in links.items()}
            )
            self._packed += RDMA.block({n: {**rates.get(n, {}), **_codes(state)} for n, (_, state) in links.items()})
        return self._packed

    def explain(self) -> str:
        if not self._ports:
            return f"no RDMA device here: {self.context.files.path(ROOT)} is absent or empty"
        answer = self._counters.newest()
        known = (
            {} if answer is None else {p.name: reading for p, reading in answer.value.items() if reading is not None}
        )
        silent = [port.name for port in self._ports if port.name not in known]
        refused = f"; no counters of {', '.join(silent)}" if silent else ""
        return f"{len(self._ports)} ports, counters of {len(known)}{refused}"

    def settle(self, timeout_s: float) -> bool:
        """Wait until the counters that were asked for are there."""
        return self._counters.settle(timeout_s)

    def _present(self) -> list[Port]:
        """Ports that exist; looked for as often as counters are read, for a directory of /sys is dear."""
        now_ns = self.context.clock.monotonic_ns()
        if self._found_ns is None or now_ns - self._found_ns >= self.settings.counters_every_s * NS_PER_S:
            self._found_ns = now_ns
            files = self.context.files
            devices = [d for d in files.names(ROOT) if not (self.settings.ignore and self._ignored.fullmatch(d))]
            self._ports = [Port(d, n) for d in devices for n in files.names(f"{ROOT}/{d}/ports")]
        return self._ports

    def _role(self, port: Port) -> float:
        return ROLES[self._roles.get(port.device) or self._neighbours.role(f"{port.directory}/device", port.device)]

    def _counter(self, name: str) -> Callable[[], Counted]:
        port, files = Port.named(name), self.tree()
        reader = PortReader(files, port.device, port.number)

        def read() -> Counted:
            reading = reader.read(self.context.clock.monotonic_ns())
            if len(self._ports) > PORTS_KEPT_OPEN:
                files.close()
            return Counted(reading)

        return read

    def _read_counters(self) -> dict[Port, Reading | None]:
        """In the thread of the question; a port that hangs there keeps its own thread, and the others are read."""
        ports = {port.name: port for port in self._ports}
        return {ports[name]: counted.reading for name, counted in self._counted.read(ports).items()}

    def _gaps(self, answer: Answer[dict[Port, Reading | None]] | None) -> tuple[Gap, ...]:
        gaps = self._states.gaps(self.name)
        if self._counters.waiting_s > 2 * self.settings.counters_every_s:
            gaps += (Gap(self.name, "counters_hung"),)
        elif not self._counters.open:
            gaps += tuple(Gap(self.name, f"counters_{gap.reason}") for gap in self._counted.gaps(self.name))
        if answer is not None and answer.value and all(reading is None for reading in answer.value.values()):
            gaps += (Gap(self.name, "counters_refused"),)
        return (*gaps, Gap(self.name, "counters_error")) if self._counters.error is not None else gaps


class StateReader:
    """Reads the state of one port: each tick, in a thread that a sick adapter may keep."""

    def __init__(self, files: Files, clock: Clock, port: Port) -> None:
        self._files = files
        self._clock = clock
        self._base = port.base
        self._rate: tuple[int, int | None, float | None] = (-RATE_EVERY_NS, None, None)

    def read(self) -> State:
        """The state now. The rate is what the link agreed on when it came up: asked when that changes, and now and then."""
        text, now_ns = self._files.text, self._clock.monotonic_ns()
        logical, physical = (
            number_of_state(text(f"{self._base}/state")),
            number_of_state(text(f"{self._base}/phys_state")),
        )
        if physical != self._rate[1] or now_ns - self._rate[0] >= RATE_EVERY_NS:
            self._rate = (now_ns, physical, gigabits(text(f"{self._base}/rate")))
            self._files.forget(f"{self._base}/rate")
        return State(logical, physical, self._rate[2])


class PortRates:
    """Rates of all ports from one reading to the next, and word of counters that stick."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._deltas = Deltas()
        self._stuck: dict[tuple[str, str], int] = {}
        self.rows: dict[str, Row] = {}

    def take(self, readings: Mapping[Port, Reading | None]) -> None:
        """A new reading of every port; None where it was left alone."""
        self.rows = {port.name: self._row(port.name, reading) for port, reading in readings.items() if reading}
        self._deltas.keep(lambda key: isinstance(key, tuple) and key[0] in self.rows)

    def _row(self, name: str, reading: Reading) -> Row:
        row: dict[str, float] = {}
        for column, value in reading.values.items():
            counter = reading.counters[column]
            at_ns = reading.hardware_ns if column in ALIASES else reading.at_ns
            wraps = 0 if counter.sticks else counter.bits if counter.bits < 64 else 0
            key = (name, column)
            rate = self._deltas.per_second(key, value, at_ns, wraps) * counter.factor
            row[column] = NAN if _at_end(counter, value) else rate  # it counts no further: what happens is not known
        if row:
            row["saturated_count"] = float(sum(self._is_stuck(name, c, reading) for c in reading.values))
        return row

    def _is_stuck(self, name: str, column: str, reading: Reading) -> bool:
        """Whether a counter stands at its maximum; two readings in a row make an event, once."""
        counter, value = reading.counters[column], reading.values[column]
        if not _at_end(counter, value):
            self._stuck.pop((name, column), None)
            return False
        times = self._stuck[name, column] = self._stuck.get((name, column), 0) + 1
        if times == 2:
            self._tell(name, reading.names[column], value)
        return True

    def _tell(self, name: str, counter: str, value: int) -> None:
        line = (
            f"{name}: counter {counter} stands at its maximum {value} and counts no further: clear it with perfquery -R"
        )
        event = LogEvent(source="rdma", severity="warning", code="counter_saturated", line=line,
                         attributes={"device": name, "counter": plain(counter), "value": str(value)})  # fmt: skip
        self._context.outlet.log(event, urgent=False)


def _at_end(counter: Counter, value: int) -> bool:
    """Whether a counter that does not wrap stands at its maximum."""
    return counter.sticks and value == 2**counter.bits - 1


def _link(state: State) -> Row:
    return {
        "up": NAN if state.physical is None else float(state.physical == LINK_UP),
        "carrier": NAN if state.logical is None else float(state.logical == ACTIVE),
        "speed_mbps": NAN if state.gbit_per_s is None else state.gbit_per_s * 1000,
    }


def _codes(state: State) -> Row:
    return {
        "state": NAN if state.logical is None else float(state.logical),
        "phys_state": NAN if state.physical is None else float(state.physical),
    }
