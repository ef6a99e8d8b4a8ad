"""Probes between collectors over the training network: round trips and losses per peer, out of band of the job.

One thread sends to every peer a few times a second. It does not wake up for each answer: the kernel notes when it came, and the
next round reads it. Only requests of others wake the thread. All sockets are bound to the rail address, so that the rail is
measured, not whatever route is the shortest.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import socket
import statistics
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from collectors import echo
from collectors.base import NAN, Context, Family, Row, Sample, Source, Worker, family
from collectors.topology.rotation import STABLE, Place, Rotation, probes_per_peer_s
from trainwarden.errors import ConfigError
from trainwarden.records import Gap
from trainwarden.settings import option

logger = logging.getLogger(__name__)

MESH = family(
    "mesh", "mesh",
    ("rtt_ms", "ms", "gauge", "median round trip of the probes answered in this interval, less the peer's own delay"),
    ("rtt_max_ms", "ms", "gauge", "longest of them"),
    ("sent_count", "probes", "gauge", "probes decided in this interval: answered or lost"),
    ("lost_count", "probes", "gauge", "of these, not answered in time"),
)  # fmt: skip

LEARNT_LIMIT = 4096
SIOCGIFADDR = 0x8915
LEFT_LIMIT = 64
"""Peers of past epochs that wait for the next sample."""


@dataclass
class Peer:
    """Probes to one peer. `pending` maps a nonce to the wall and monotonic time of sending."""

    name: str
    address: tuple[str, int]
    socket: socket.socket | None = None
    pending: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    round_trips_ms: list[float] = field(default_factory=list)
    offsets_ms: list[float] = field(default_factory=list)
    lost: int = 0
    absent: int = 0

    @property
    def is_absent(self) -> bool:
        """Whether its host says that nobody listens."""
        return bool(self.absent and not self.round_trips_ms and not self.lost)

    def row(self) -> Row:
        """Numbers of the interval; starts the next one."""
        trips, lost, is_absent = self.round_trips_ms, self.lost, self.is_absent
        self.round_trips_ms, self.lost, self.absent = [], 0, 0
        if is_absent:
            return {"sent_count": 0.0, "lost_count": 0.0}
        return {
            "rtt_ms": statistics.median(trips) if trips else NAN,
            "rtt_max_ms": max(trips, default=NAN),
            "sent_count": float(len(trips) + lost),
            "lost_count": float(lost),
        }


class MeshSource(Source):
    """Prober and responder.

    A probe that comes back as "port unreachable" is neither sent nor lost: the way is fine, only the peer's collector is not there. With
    more than `max_peers` peers, ring neighbours and a node on the same rail are probed for good, the other leaves in turn
    (`collectors.topology.rotation`), and fewer than 20 probes a second leave the node.
    """

    name: ClassVar[str] = "mesh"
    inline: ClassVar[bool] = True
    families: ClassVar[tuple[Family, ...]] = (MESH,)

    @dataclass(frozen=True)
    class Settings:
        """Keys of ``[collector.sources.mesh]``; `rail_address`, `probe_port` and `peers` come from ``[collector]``."""

        rail_address: str = option("", "address that probes leave from and are answered on")
        rail_interface: str = option(
            "", "interface whose IPv4 address it is, where one configuration serves many nodes"
        )
        probe_port: int = option(9471, "UDP port of the responder; 0 switches probing off")
        peers: dict[str, str] = option({}, 'node = "ip:port" of responders')
        learn: bool = option(True, "probe nodes that announce themselves on the topology topic, beside `peers`")
        device: str = option("", "network device to bind to, where several rails share a subnet (needs CAP_NET_RAW)")
        probes_per_s: float = option(4.0, "probes per peer and second")
        timeout_ms: float = option(200.0, "an answer later than this is a loss")
        max_peers: int = option(8, "peers probed at once")
        answers_per_s: float = option(50.0, "answers per second and source address")

    def __init__(self, context: Context, settings: Any) -> None:
        if settings.rail_interface and not settings.rail_address:
            settings = replace(settings, rail_address=address_of(settings.rail_interface))
        super().__init__(context, settings)
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._responder = echo.Responder(settings.answers_per_s)
        self._listening: socket.socket | None = None
        self._problem = "not_started"
        self._next_round = 0.0
        self._retry_at = 0.0
        self._peers: dict[str, Peer] = {}
        self._wanted = {name: _address(name, text) for name, text in settings.peers.items()}
        self._places: dict[str, Place] = {}
        self._rotation: Rotation | None = None
        self._epoch = -1
        self._period_s = 1.0 / settings.probes_per_s
        self._left: list[Peer] = []
        self._changed = True
        self._worker = Worker("tw-mesh", self.turn, self._failed)
        context.facts.rail_address = settings.rail_address
        if settings.probe_port and settings.rail_address:
            context.facts.probe_address = f"{settings.rail_address}:{settings.probe_port}"

    def start(self) -> None:
        """Begin to answer and to probe; an address that is not there yet is waited for."""
        self._problem = "" if self.settings.rail_address or self.settings.probe_port == 0 else "no_rail_address"
        if self.settings.probe_port == 0 or not self.settings.rail_address:
            return
        self._worker.start()

    @property
    def learns(self) -> bool:
        """Whether peers are to be looked for."""
        return bool(self.settings.learn and self.settings.rail_address and self.settings.probe_port)

    def learn(self, peers: dict[str, str]) -> None:
        """Peers found in the topology; those given in the configuration win."""
        given = dict(self.settings.peers)
        merged = {**dict(list(peers.items())[:LEARNT_LIMIT]), **given}
        merged.pop(self.context.node, None)
        wanted = {name: _address(name, text) for name, text in merged.items()}
        with self._lock:
            self._changed = self._changed or wanted != self._wanted
            self._wanted = wanted

    def learn_places(self, places: dict[str, Place]) -> None:
        """Leaf and rail of the nodes, as far as anybody said."""
        own = self.context.facts.board.merged("node")
        here = Place(*(own[key].value if key in own else "" for key in ("leaf", "rail")))
        known = {**places, self.context.node: here if here.leaf else places.get(self.context.node, here)}
        with self._lock:
            self._changed = self._changed or known != self._places
            self._places = known

    def sample(self, now_ns: int) -> Sample:
        del now_ns
        with self._lock:
            left, self._left = self._left, []
            peers = {**{peer.name: peer for peer in left}, **self._peers}
            self.context.facts.agents_gone = frozenset(name for name, peer in peers.items() if peer.is_absent)
            rows = {name: peer.row() for name, peer in sorted(peers.items())}
            offsets = [value for peer in peers.values() for value in peer.offsets_ms]
            for peer in peers.values():
                peer.offsets_ms = []
        self.context.facts.clock_offset_ms = statistics.median(offsets) if offsets else NAN
        self._report_refusals()
        return Sample(MESH.block(rows), (Gap(self.name, self._problem),) if self._problem else ())

    def close(self) -> None:
        self._worker.close()
        for peer in self._peers.values():
            self._drop_socket(peer)
        if self._listening is not None:
            self._poll.unregister(self._listening)
            self._listening.close()

    def turn(self) -> None:
        """One round of the thread: when it is due settle the probes under way and send new ones, then answer others until the next."""
        now = time.monotonic()
        if self._listening is None:
            self._listen(now)
        if now >= self._next_round:
            self._next_round = max(now, self._next_round + self._period_s)
            self._send_round(now)
        if self._poll.poll(max(0.0, self._next_round - now) * 1000) and self._listening is not None:
            self._responder.serve(self._listening, time.monotonic())
        if self._problem == "error":
            self._problem = ""  # a whole turn went well again

    # --- probing ---------------------------------------------------------------------------------------------------------

    def _send_round(self, now: float) -> None:
        for peer in self._peers.values():
            self._collect(peer)
        self._expire(now)
        if self._changed or (self._rotation is not None and self._rotation.epoch_at(time.time_ns()) != self._epoch):
            self._choose()
        nonces = os.urandom(echo.NONCE_BYTES * len(self._peers))
        for number, peer in enumerate(self._peers.values()):
            if peer.socket is None and not self._open(peer):
                continue
            nonce = nonces[number * echo.NONCE_BYTES :][: echo.NONCE_BYTES]
            peer.pending[nonce] = (time.time_ns(), now)
            try:
                if peer.socket is not None:
                    peer.socket.send(echo.request(nonce))
            except OSError as error:
                self._unsent(peer, nonce, error)

    def _unsent(self, peer: Peer, nonce: bytes, error: OSError) -> None:
        with self._lock:
            if peer.pending.pop(nonce, None) is None:
                return
            if error.errno == errno.ECONNREFUSED:
                peer.absent += 1
            else:
                peer.lost += 1

    def _collect(self, peer: Peer) -> None:
        # until every probe is answered: what came twice is read before the next answer
        while peer.socket is not None and peer.pending:
            try:
                found = echo.receive(peer.socket)
            except ConnectionRefusedError:
                self._refused(peer)
                continue
            except OSError:
                return
            if found is None:
                return
            answer = echo.parse(found[0])
            if answer is not None and answer.kind == echo.REPLY:
                self._answered(peer, answer, found[2])

    def _answered(self, peer: Peer, answer: echo.Echo, arrived_ns: int) -> None:
        with self._lock:
            sent = peer.pending.pop(answer.nonce, None)
            if sent is None:
                return
            held_ns = max(0, answer.left_ns - answer.came_ns)
            trip_ms = max(0, arrived_ns - sent[0] - held_ns) / 1e6
            if trip_ms > self.settings.timeout_ms:
                peer.lost += 1
                return
            peer.round_trips_ms.append(trip_ms)
            peer.offsets_ms.append((sent[0] - answer.came_ns + arrived_ns - answer.left_ns) / 2e6)

    def _refused(self, peer: Peer) -> None:
        """The peer's host answers that nobody listens: everything under way to it is accounted for."""
        with self._lock:
            peer.absent += len(peer.pending)
            peer.pending.clear()

    def _expire(self, now: float) -> None:
        limit = now - self.settings.timeout_ms / 1000
        with self._lock:
            for peer in self._peers.values():
                if not peer.pending:
                    continue
                for nonce in [nonce for nonce, (_, sent) in peer.pending.items() if sent <= limit]:
                    del peer.pending[nonce]
                    peer.lost += 1

    def _choose(self) -> None:
        """Make the peers probed those wanted; a changed address is a new peer. What a peer that goes has measured is still told."""
        with self._lock:
            if self._changed:
                self._rotation = self._rotation_of(self._wanted)
            self._changed = False
            chosen = {name: self._wanted[name] for name in self._names()}
            self._period_s = 1.0 / probes_per_peer_s(
                self.settings.probes_per_s,
                len(chosen),
                len(self._wanted) > self.settings.max_peers,
                self.context.facts.rdma_pings,
            )
            self.context.facts.probed = tuple(chosen)
            gone = [peer for name, peer in self._peers.items() if chosen.get(name) != peer.address]
            self._left = [*self._left, *(peer for peer in gone if peer.round_trips_ms or peer.lost)][-LEFT_LIMIT:]
            for peer in gone:
                del self._peers[peer.name]
            for name, address in chosen.items():
                self._peers.setdefault(name, Peer(name, address))
        for peer in gone:
            self._drop_socket(peer)

    def _rotation_of(self, wanted: dict[str, tuple[str, int]]) -> Rotation | None:
        """None on a network so small that everybody, or hardly anybody, is probed."""
        if len(wanted) <= self.settings.max_peers or self.settings.max_peers <= STABLE:
            return None
        places = {name: self._places.get(name, Place()) for name in (*wanted, self.context.node)}
        return Rotation(self.context.node, places, self.settings.max_peers)

    def _names(self) -> list[str]:
        if self._rotation is None:
            return neighbours(self.context.node, list(self._wanted), self.settings.max_peers)
        self._epoch = self._rotation.epoch_at(time.time_ns())
        return self._rotation.peers(self._epoch)

    def _open(self, peer: Peer) -> bool:
        try:
            peer.socket = echo.stamped_socket((self.settings.rail_address, 0), self.settings.device)
            peer.socket.connect(peer.address)
        except OSError as error:
            self._drop_socket(peer)
            with self._lock:
                peer.lost += error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
            return False
        return True

    def _drop_socket(self, peer: Peer) -> None:
        if peer.socket is not None:
            peer.socket.close()
            peer.socket = None

    # --- answering -------------------------------------------------------------------------------------------------------

    def _listen(self, now: float) -> None:
        if now < self._retry_at:
            return
        self._retry_at = now + 2.0
        address = (self.settings.rail_address, self.settings.probe_port)
        try:
            self._listening = echo.stamped_socket(address, self.settings.device)
        except OSError as error:
            self._problem = "port_in_use" if error.errno == errno.EADDRINUSE else "no_rail_address"
            logger.warning("probe responder cannot listen on %s:%d: %s", *address, error.strerror)
            return
        self._problem = ""
        self._poll.register(self._listening, select.POLLIN)

    def _report_refusals(self) -> None:
        refused, self._responder.refused = self._responder.refused, {}
        for reason, count in refused.items():
            self.context.metrics.count("tw_probe_refused_total", count, reason=reason)

    def _failed(self, error: Exception) -> None:
        logger.warning("mesh probe: %s: %s", type(error).__name__, error)
        self._problem = "error"


def address_of(interface: str) -> str:
    """The IPv4 address of an interface; empty when it has none (the gap then says ``no_rail_address``)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            logger.warning("interface %s has no IPv4 address (%s): no probes", interface, error.strerror)
            return ""
    return socket.inet_ntoa(answer[20:24])


def neighbours(node: str, others: list[str], limit: int) -> list[str]:
    """Whom to probe: everybody, or on a large network the two ring neighbours and a choice that is stable per pair of nodes.

    Examples
    --------
    >>> neighbours("n1", ["n0", "n2", "n3"], 16)
    ['n0', 'n2', 'n3']
    """
    ring = sorted({*others, node})
    if len(ring) - 1 <= limit:
        return [name for name in ring if name != node]
    at = ring.index(node)
    near = [ring[at - 1], ring[(at + 1) % len(ring)]]
    rest = sorted(
        (name for name in ring if name not in (node, *near)), key=lambda name: zlib.crc32(f"{node}>{name}".encode())
    )
    return sorted(list(dict.fromkeys([*near, *rest]))[: max(0, limit)])


def _address(name: str, text: str) -> tuple[str, int]:
    try:
        return echo.split_address(text)
    except ValueError as error:
        raise ConfigError(f"collector.peers.{name}: {error}") from None
