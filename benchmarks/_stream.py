"""What a simulated cluster says, second by second and in the order of arrival: input of the benches of the stream path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from collectors.simulated.encode import Encoder, Sent
from collectors.simulated.run import build
from collectors.simulated.spec import START_NS, Spec
from trainwarden.bus import Message
from trainwarden.clock import NS_PER_MS

LENGTH_S = 600.0
"""What the plan of faults is made for, however little of it is asked for."""


def seconds(
    nodes: int, count: int, faults: str = "none", start_ns: int = START_NS, seed: int = 0
) -> Iterator[list[Sent]]:
    """All messages of `nodes` nodes (ticks, steps, logs, catalogues, topology), one list for each of `count` seconds."""
    simulator = build(Spec(nodes=nodes, seed=seed, start_ns=start_ns), faults, LENGTH_S)
    encoder = Encoder(simulator)
    for interval in simulator.intervals(count):
        yield encoder.messages(interval)


class Places:
    """Gives messages the offsets that a broker with one partition for each topic would have given them."""

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()

    def of(self, sent: Iterable[Sent], at_ns: int) -> list[Message]:
        """`sent` as read."""
        return [self._placed(one, at_ns // NS_PER_MS) for one in sent]

    def _placed(self, sent: Sent, at_ms: int) -> Message:
        self._next[sent.topic] += 1
        return Message(sent.topic, 0, self._next[sent.topic] - 1, sent.key, sent.value, at_ms)
