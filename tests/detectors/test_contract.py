"""Every registered detector keeps the contract."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from detectors import contract
from detectors.base import Detector, Frame, pack_state, registry, unpack_state
from detectors.rules.codes import CodeDetector
from detectors.steps.straggler import StragglerDetector
from trainwarden.records import Entity, EntityKind, Verdict

DETECTORS = registry().all()


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("detector", DETECTORS.values(), ids=DETECTORS)
def test_contract(detector: type[Detector], check: contract.Check) -> None:
    check(detector)


def test_a_detector_that_says_nothing_fails_the_contract() -> None:
    class Mute(CodeDetector):
        name = "mute"

        def update(self, frame: Frame) -> list[Verdict]:
            return []

    with pytest.raises(AssertionError, match="did not say fatal_code"):
        contract.fires_on_its_example(Mute)


def test_a_detector_whose_verdicts_only_the_store_would_see_fails_the_contract() -> None:
    class Bare(CodeDetector):
        name = "bare"

        def update(self, frame: Frame) -> list[Verdict]:
            return [replace(verdict, reach=Verdict().reach) for verdict in super().update(frame)]

    with pytest.raises(AssertionError, match=r"no farther than the store: make it by `self\.verdict"):
        contract.fires_on_its_example(Bare)


def test_a_detector_with_hidden_state_fails_the_contract() -> None:
    class Forgetful(StragglerDetector):
        name = "forgetful"

        def restore(self, payload: bytes) -> None:
            del payload

    with pytest.raises(AssertionError, match=r"differs after a restore|state after restores"):
        contract.snapshot_is_exact(Forgetful)


def test_a_detector_that_does_not_state_its_rate_fails_the_contract() -> None:
    class Silent(CodeDetector):
        name = "silent"
        false_alarms_per_node_day = float("inf")

    with pytest.raises(AssertionError, match="does not state its false-alarm rate"):
        contract.states_its_false_alarm_rate(Silent)


class Nervous(Detector):
    """Speaks of every node every five minutes, whatever happens."""

    name = ""
    kinds = ("device_state",)
    false_alarms_per_node_day = 1.0

    def __init__(self, settings: object | None = None) -> None:
        super().__init__(settings)
        self.seen: list[int] = []

    def update(self, frame: Frame) -> list[Verdict]:
        said = []
        for tick in frame.ticks:
            self.seen.append(tick.at_ns)
            if len(self.seen) % 300 == 0:
                nodes = (Entity(EntityKind.NODE, node, node) for node in tick.nodes)
                said += [
                    self.verdict(kind="device_state", entity=node, window=(tick.at_ns, tick.at_ns)) for node in nodes
                ]
        return said

    def snapshot(self) -> bytes:
        return pack_state(self.seen)

    def restore(self, payload: bytes) -> None:
        self.seen = unpack_state(payload)


def test_a_detector_that_speaks_more_often_than_it_states_fails_the_contract() -> None:
    with pytest.raises(AssertionError, match=r"spoke \d+ times in 0.17 node-days"):
        contract.states_its_false_alarm_rate(Nervous)
    Nervous.false_alarms_per_node_day = 300.0
    contract.states_its_false_alarm_rate(Nervous)


def test_a_detector_that_keeps_everything_fails_the_contract() -> None:
    with pytest.raises(AssertionError, match="state grew from"):
        contract.memory_is_flat(Nervous)


def test_a_detector_that_reads_meaning_into_names_fails_the_contract() -> None:
    class Parsing(CodeDetector):
        name = "parsing"

        def update(self, frame: Frame) -> list[Verdict]:
            return [v for v in super().update(frame) if v.entity.name.isalnum()]

    with pytest.raises(AssertionError, match="odd names"):
        contract.survives_odd_names(Parsing)


def test_a_detector_that_draws_from_the_global_generator_fails_the_contract() -> None:
    class Dicing(CodeDetector):
        name = "dicing"

        def update(self, frame: Frame) -> list[Verdict]:
            return [replace(v, score=float(np.random.random())) for v in super().update(frame)]

    np.random.seed(0)
    with pytest.raises(AssertionError, match="two answers"):
        contract.is_deterministic(Dicing)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("detector", DETECTORS.values(), ids=DETECTORS)
def test_memory_is_flat_over_many_ticks(detector: type[Detector]) -> None:
    """A twentieth of the million of `contract.SLOW_CHECKS`, which `python -m benchmarks.endurance --ticks 1000000` runs."""
    contract.memory_is_flat(detector, 50_000)
