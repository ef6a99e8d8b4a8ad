"""Orders from afar: another sampling interval or log level for some nodes and some time, from the topic ``tw.control``.

An order is checked before it is believed, bounded in value and time, and undone when its time is over. What is no order is a dead letter
and changes nothing. Who may write the topic is the broker's to say (ACLs): an order can make the collector slower or more talkative,
nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from collectors.topology.hostlist import HostlistError, matches, split_hosts
from trainwarden import topics
from trainwarden.clock import NS_PER_S, Clock
from trainwarden.errors import ConfigError, DecodeError
from trainwarden.records import CollectorOrder, decode_as
from trainwarden.selfmetrics import Metrics
from trainwarden.settings import parse_duration_ms

logger = logging.getLogger(__name__)

INTERVAL_MIN_MS, INTERVAL_MAX_MS = 200, 60_000
TTL_MAX_NS = 24 * 3600 * NS_PER_S
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
KEYS = ("interval_ms", "log_level")


class OrderError(ValueError):
    """An order that is none; the message names key, what was found and what was expected."""


def check(order: CollectorOrder) -> None:
    """Raise `OrderError` unless the order may be carried out by whomever it selects.

    Examples
    --------
    >>> check(CollectorOrder(key="interval_ms", value="5s", nodes="gpu[01-08]", observed_at_ns=1, expires_at_ns=60 * NS_PER_S))
    """
    if order.key not in KEYS:
        raise OrderError(f"key {order.key[:40]!r}, expected one of {', '.join(KEYS)}")
    if order.key == "interval_ms":
        interval_ms(order.value)
    elif order.value not in LEVELS:
        raise OrderError(f"log_level {order.value[:40]!r}, expected one of {', '.join(LEVELS)}")
    if not 0 < order.expires_at_ns - order.observed_at_ns <= TTL_MAX_NS:
        raise OrderError("expires_at_ns: expected a moment within 24 hours of observed_at_ns: every order ends")
    selects(order.nodes, "", {})


def interval_ms(text: str) -> int:
    """An interval as in the configuration (``5s``, ``500``), within bounds. Raises `OrderError`."""
    try:
        found = parse_duration_ms(text, "interval_ms", "ms")
    except ConfigError as error:
        raise OrderError(str(error)) from None
    if not INTERVAL_MIN_MS <= found <= INTERVAL_MAX_MS or found != int(found):
        raise OrderError(
            f"interval_ms {text[:40]!r}, expected whole milliseconds between {INTERVAL_MIN_MS} and {INTERVAL_MAX_MS}"
        )
    return int(found)


def selects(nodes: str, node: str, attributes: Mapping[str, str]) -> bool:
    """Whether a selector means this node: names, host lists, patterns with ``*``, or ``attribute=value``, separated by commas.

    Examples
    --------
    >>> [selects(text, "gpu07", {"rack": "r1"}) for text in ("gpu[01-08]", "login*,gpu07", "rack=r1", "rack=r2", "*")]
    [True, True, True, False, True]
    """
    try:
        parts = split_hosts(nodes)
        if not parts:
            raise OrderError("nodes is empty, expected names, patterns such as gpu[001-032] or rack7-*, or rack=r7")
        return any([_selects(part, node, attributes) for part in parts])
    except HostlistError as error:
        raise OrderError(f"nodes: {error}") from None


def _selects(part: str, node: str, attributes: Mapping[str, str]) -> bool:
    key, equals, value = part.partition("=")
    if equals:
        return attributes.get(key.strip()) == value.strip()
    return fnmatchcase(node, part) if "*" in part and "[" not in part else matches(part, node)


class Control:
    """Orders that hold for this node. `hear` may be called from any thread.

    Parameters
    ----------
    attributes
        What is known of the node (rack, leaf...), for selectors.
    dead
        Called with (topic, reason, payload) for what is no order.
    """

    def __init__(
        self,
        node: str,
        clock: Clock,
        metrics: Metrics,
        attributes: Callable[[], Mapping[str, str]],
        dead: Callable[[str, str, bytes], None],
    ) -> None:
        self._node = node
        self._clock = clock
        self._metrics = metrics
        self._attributes = attributes
        self._dead = dead
        self._lock = threading.Lock()
        self._orders: dict[str, CollectorOrder] = {}
        self._level_before: int | None = None

    def hear(self, payload: bytes) -> None:
        """Take in one message of the topic."""
        try:
            order = decode_as(CollectorOrder, payload)
            check(order)
        except (DecodeError, OrderError) as error:
            self._count("refused")
            self._dead(topics.CONTROL.name, f"order ignored: {error}", payload)
            return
        if order.expires_at_ns <= self._clock.now_ns() or not selects(order.nodes, self._node, self._attributes()):
            return
        with self._lock:
            before = self._orders.get(order.key)
            if before is not None and before.observed_at_ns >= order.observed_at_ns:
                return
            self._orders[order.key] = order
        self._count("taken")
        logger.warning(
            "%s is %s until further notice of %s: %s", order.key, order.value, order.author or "nobody", order.comment
        )

    def interval_ms(self, usual_ms: int) -> int:
        """The interval that holds now."""
        order = self._standing("interval_ms")
        return interval_ms(order.value) if order is not None else usual_ms

    def apply_log_level(self) -> None:
        """Make the root logger as talkative as ordered, and as it was when the order is over."""
        order, root = self._standing("log_level"), logging.getLogger()
        if order is not None:
            if self._level_before is None:
                self._level_before = root.level
            root.setLevel(order.value)
        elif self._level_before is not None:
            root.setLevel(self._level_before)
            self._level_before = None

    def _standing(self, key: str) -> CollectorOrder | None:
        order = self._orders.get(key)
        if order is None:
            return None
        now_ns = self._clock.now_ns()
        # a clock that was set back must not prolong an order for ever
        if order.observed_at_ns - TTL_MAX_NS < now_ns < order.expires_at_ns:
            return order
        with self._lock:
            self._orders.pop(key, None)
        self._count("ended")
        logger.warning("%s is as configured again", key)
        return None

    def _count(self, outcome: str) -> None:
        self._metrics.count("tw_control_orders_total", outcome=outcome)
