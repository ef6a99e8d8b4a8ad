"""Publish and subscribe: one small interface, an in-memory bus for tests and Kafka for everything else.

Examples
--------
>>> bus = connect("memory://doctest")
>>> reader = bus.subscriber(["tw.logs"])
>>> writer = bus.publisher()
>>> writer.publish("tw.logs", b"k", b"hello")
>>> [m.value for m in reader.poll(0.0)]
[b'hello']
"""

from __future__ import annotations

from trainwarden.bus.base import Bus, FailureHandler, Message, Publisher, Subscriber
from trainwarden.bus.dead import decode_or_dead
from trainwarden.config import KafkaConfig
from trainwarden.errors import ConfigError

__all__ = ["Bus", "FailureHandler", "Message", "Publisher", "Subscriber", "connect", "decode_or_dead"]


def connect(where: str | KafkaConfig, solo: bool = False) -> Bus:
    """The bus behind a URL, ``memory://<name>`` (shared within the process) or ``kafka://host:port[,host:port]``, or behind the ``[kafka]``
    table of a configuration, which may also ask for TLS and SASL.

    Nothing is sent yet: an absent broker shows on `Bus.wait_ready` or the first use. With `solo`, publishers have no thread: all is sent
    in `flush`, by who calls it, at half the cost where little is sent often.

    Raises
    ------
    ConfigError
        For any other scheme or a missing address, and for credentials that cannot be used.
    """
    url = where if isinstance(where, str) else where.url
    scheme, _, rest = url.partition("://")
    if scheme == "memory" and rest:
        from trainwarden.bus.memory import MemoryBus

        return MemoryBus.named(rest)
    if scheme == "kafka" and rest:
        from trainwarden.bus.kafka import KafkaBus
        from trainwarden.bus.security import Security, security_of

        security = Security() if isinstance(where, str) else security_of(where)
        return KafkaBus(tuple(rest.split(",")), security=security, solo=solo)
    raise ConfigError(f"kafka.url: {url!r} is no bus, expected kafka://host:port[,host:port] or memory://name")
