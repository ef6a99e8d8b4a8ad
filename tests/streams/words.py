"""A detector for each share of the second stage that says what it saw: ``at:ticks:everything``, for tests on brokers.

``python -m tests.streams.words CONFIG`` is a worker with these, and with the real detector of hangs, which makes an incident.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from detectors.base import Detector, Frame
from detectors.steps.hang import HangDetector
from tests.streams.fingerprint import Detectors
from trainwarden.clock import NS_PER_S
from trainwarden.config import load
from trainwarden.records import Entity, EntityKind, Verdict, encode


class Words(Detector):
    """The first part compares shares (a frame of closed cells is the same in each), the chain in the last one compares runs."""

    name = "words"
    kinds = ("threshold",)

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings)
        self.state = b""

    def update(self, frame: Frame) -> list[Verdict]:
        ticks = hashlib.sha256(str(frame.now_ns).encode())
        for tick in frame.ticks:
            ticks.update(repr((tick.at_ns, tick.nodes, tick.present.tolist(), tick.gaps)).encode())
            for name, family in tick.families.items():
                ticks.update(repr((name, family.entities, family.metrics)).encode() + family.values.tobytes())
        chain = hashlib.sha256(self.state + ticks.digest())
        for record in (*frame.steps, *frame.logs):
            chain.update(encode(record))
        chain.update(repr(frame.topology.jobs()).encode())
        self.state = chain.digest()
        at_ns = frame.ticks[-1].at_ns if frame.ticks else 0
        text = f"{at_ns}:{ticks.hexdigest()}:{self.state.hex()}"
        window = (frame.now_ns, frame.now_ns)
        return [self.verdict(kind="threshold", entity=Entity(EntityKind.SERIES, "all"), window=window, text=text)]

    def snapshot(self) -> bytes:
        return self.state

    def restore(self, payload: bytes) -> None:
        self.state = payload


class Relation(Words):
    name = "relation"


class Lines(Words):
    name = "dynamic_threshold"


class Trends(Words):
    name = "foretell"


class Links(Words):
    name = "mesh_links"


WORDS = (Words, Relation, Lines, Trends, Links)
PATIENCE_NS = 120 * NS_PER_S
"""A loaded machine takes its time for a takeover: here nobody goes on without a block."""


def detectors() -> Detectors:
    return Detectors(*WORDS, HangDetector)


if __name__ == "__main__":
    import logging

    import streams.app
    import streams.detect
    import streams.merge

    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    streams.detect.registry = detectors  # type: ignore[assignment]
    streams.merge.PATIENCE_NS = PATIENCE_NS
    streams.app.run(load(Path(sys.argv[1])))
