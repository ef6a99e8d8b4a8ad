"""How far a verdict goes: as far as its kind may, and never farther than its detector asks."""

from __future__ import annotations

import pytest

from detectors.base import Detector, Frame
from streams.detect import Pipeline
from trainwarden.config import from_table
from trainwarden.records import Entity, EntityKind, Reach, Verdict
from trainwarden.topology import Topology

NODE = Entity(EntityKind.NODE, "n0", "n0")


class Opinions(Detector):
    """Says each kind with each reach, and each kind without any."""

    name = "opinions"
    kinds = ("compute_slow", "telemetry_lost", "threshold")

    def update(self, frame: Frame) -> list[Verdict]:
        window = (frame.now_ns - 1, frame.now_ns)
        asked = [
            self.verdict(kind=kind, entity=NODE, window=window, reach=reach) for kind in self.kinds for reach in Reach
        ]
        return [*asked, *(self.verdict(kind=kind, entity=NODE, window=window) for kind in self.kinds)]

    def snapshot(self) -> bytes:
        return b""

    def restore(self, payload: bytes) -> None:
        return None


class OnlyOpinions:
    """A registry of one detector."""

    def all(self) -> dict[str, type[Detector]]:
        return {"opinions": Opinions}


@pytest.mark.parametrize(
    ("kind", "reaches"),
    [
        ("compute_slow", ["store", "correlate", "notify", "act", "act"]),
        ("telemetry_lost", ["store", "correlate", "notify", "notify", "notify"]),
        ("threshold", ["store", "correlate", "correlate", "correlate", "correlate"]),
    ],
)
def test_a_verdict_goes_no_farther_than_its_detector_asks_nor_than_its_kind_may(kind: str, reaches: list[str]) -> None:
    config = from_table({"policy": {"kinds": {"telemetry_lost": {"reach": "act"}}}})
    pipeline = Pipeline(config, OnlyOpinions())  # type: ignore[arg-type]
    said = pipeline.run(Frame(10**18, (), (), (), Topology()))
    assert [str(verdict.reach) for verdict in said if verdict.kind == kind] == reaches
