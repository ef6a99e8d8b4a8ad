"""Whom to probe, learnt from what the other nodes announce on the topology topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from collectors.base import Worker
from collectors.echo import split_address
from collectors.topology.rotation import Place
from trainwarden import topics
from trainwarden.bus import Bus, Message, Subscriber
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import DecodeError, TrainwardenError, UnavailableError
from trainwarden.records import TopologyEvent, decode

logger = logging.getLogger(__name__)

EVERY_S = 30.0
FORGET_NS = 600 * NS_PER_S
FIRST_POLL_S, POLL_S = 0.5, 0.2
"""A new reader finds its way first. One that knows it hears at once what there is; waiting costs a question every 100 ms."""
MAX_POLLS = 20
"""Many nodes announce themselves all the time: what came by then is passed on, the rest is read at the next turn."""


class Learner(Protocol):
    """Who wants to know the probe addresses of all nodes."""

    def learn(self, peers: dict[str, str]) -> None:
        """Take the present picture, node → ip:port."""
        ...


class PeerLearner:
    """Reads announcements every half minute; a node that announced nothing for ten minutes is forgotten.

    Without a broker, or with one that fails, the last picture stays.

    Parameters
    ----------
    learner
        Who wants to know the addresses; None: nobody.
    rdma
        Called with each node and what it announces as ``rdma_address``, empty when it does not.
    places
        Called with leaf and rail of every node, before `learner` hears of the addresses.
    listeners
        Called with the payloads of other topics, which are read along: one reader is enough for a node.
    """

    def __init__(
        self,
        connect: Callable[[], Bus],
        clock: Clock,
        learner: Learner | None,
        places: Callable[[dict[str, Place]], None] | None = None,
        listeners: Mapping[str, Callable[[bytes], None]] | None = None,
        rdma: Callable[[str, str], None] | None = None,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._learner = learner
        self._tell_places = places
        self._tell_rdma = rdma
        self._listeners = dict(listeners or {})
        self._topics = [topics.TOPOLOGY.name, *self._listeners] if learner is not None else list(self._listeners)
        self._subscriber: Subscriber | None = None
        self._peers: dict[str, tuple[str, int]] = {}
        self._places: dict[str, Place] = {}
        self._worker = Worker("tw-peers", self._turn, self._failed)

    def start(self) -> None:
        """Begin to learn."""
        self._worker.start()

    def close(self) -> None:
        """End."""
        self._worker.close(timeout_s=3.0)
        self._drop()

    def read(self) -> None:
        """Take in everything announced since the last call, and pass the picture on."""
        try:
            patience_s = POLL_S
            if self._subscriber is None:
                self._subscriber, patience_s = self._subscribe(), FIRST_POLL_S
            for _ in range(MAX_POLLS):
                messages = self._subscriber.poll(patience_s)
                for message in messages:
                    self._hear(message)
                if not messages:
                    break
        except TrainwardenError as error:
            logger.info("peers are not learnt now: %s", error)
            self._drop()
        self._forget()
        if self._tell_places is not None:
            self._tell_places({node: self._places[node] for node in self._peers})
        if self._learner is not None:
            self._learner.learn({node: address for node, (address, _) in self._peers.items()})

    def _subscribe(self) -> Subscriber:
        """All topics; only the topology while the others do not exist: a cluster that was set up by an older version."""
        bus = self._connect()
        try:
            return bus.subscriber(self._topics)
        except UnavailableError as error:
            if self._learner is None or not self._listeners:
                raise
            logger.info("only the topology is read: %s", error)
            return bus.subscriber([topics.TOPOLOGY.name])

    def _hear(self, message: Message) -> None:
        listener = self._listeners.get(message.topic)
        if listener is None:
            self._take(message.value)
        else:
            listener(message.value)

    def _take(self, payload: bytes) -> None:
        try:
            event = decode(payload)
        except DecodeError:
            return  # the stream workers bury what nobody can read
        if not isinstance(event, TopologyEvent) or not event.entity.startswith("node:"):
            return
        node = event.entity.removeprefix("node:")
        address = event.attributes.get("probe_address", "")
        if self._tell_rdma is not None:
            self._tell_rdma(node, "" if event.removed else event.attributes.get("rdma_address", ""))
        if event.removed or not _is_address(address):
            self._peers.pop(node, None)
        else:
            self._peers[node] = (address, event.observed_at_ns)
            self._places[node] = Place(event.attributes.get("leaf", ""), event.attributes.get("rail", ""))

    def _forget(self) -> None:
        limit_ns = self._clock.now_ns() - FORGET_NS
        self._peers = {node: known for node, known in self._peers.items() if known[1] >= limit_ns}
        self._places = {node: place for node, place in self._places.items() if node in self._peers}

    def _turn(self) -> None:
        self.read()
        self._worker.wait(EVERY_S)

    def _drop(self) -> None:
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()

    def _failed(self, error: Exception) -> None:
        logger.warning("learning peers failed: %s: %s", type(error).__name__, error)
        try:
            self._drop()
        except Exception as problem:  # noqa: BLE001 - it has failed already; what counts is that another one can be opened
            logger.info("the old reader did not close: %s", problem)
        self._worker.wait(EVERY_S)


def _is_address(text: str) -> bool:
    try:
        split_address(text)
    except ValueError:
        return False
    return True
