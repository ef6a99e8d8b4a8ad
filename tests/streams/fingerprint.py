"""A detector that says a hash of everything it has ever seen: two runs with equal words saw equal frames in equal order."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from detectors.base import Detector, Frame
from detectors.base import registry as real_registry
from trainwarden.config import load
from trainwarden.records import Entity, EntityKind, Verdict, encode


class Fingerprint(Detector):
    name = "fingerprint"
    kinds = ("threshold",)

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings)
        self.state = b""

    def update(self, frame: Frame) -> list[Verdict]:
        digest = hashlib.sha256(self.state)
        digest.update(str(frame.now_ns).encode())
        for tick in frame.ticks:
            digest.update(repr((tick.at_ns, tick.nodes, tick.present.tolist(), tick.gaps)).encode())
            for name, family in tick.families.items():
                digest.update(repr((name, family.entities, family.metrics)).encode() + family.values.tobytes())
        for record in (*frame.steps, *frame.logs):
            digest.update(encode(record))
        digest.update(repr(frame.topology.jobs()).encode())
        self.state = digest.digest()
        window = (frame.now_ns, frame.now_ns)
        return [
            self.verdict(
                kind="threshold", entity=Entity(EntityKind.SERIES, "all"), window=window, text=self.state.hex()
            )
        ]

    def snapshot(self) -> bytes:
        return self.state

    def restore(self, payload: bytes) -> None:
        self.state = payload


class Fragile(Fingerprint):
    """Breaks on the first log line that says so."""

    name = "fragile"

    def update(self, frame: Frame) -> list[Verdict]:
        if any("poison" in event.line for event in frame.logs):
            raise ZeroDivisionError("poisoned")
        return super().update(frame)


class Detectors:
    """A registry with these detectors, and the real ones on request."""

    def __init__(self, *kinds: type[Detector], real: bool = False) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        if real:
            self._kinds |= real_registry().all()

    def all(self) -> dict[str, type[Detector]]:
        return dict(sorted(self._kinds.items()))


if __name__ == "__main__":
    import logging

    import streams.app
    import streams.detect

    logging.basicConfig(level="INFO", stream=sys.stderr)
    streams.detect.registry = lambda: Detectors(Fingerprint, real=True)  # type: ignore[assignment,return-value]
    streams.app.run(load(Path(sys.argv[1])))
