"""Saves to a store elsewhere that nobody announces: told, with nobody accused. A frozen rank is found as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from detectors.base import AlignedTick, FamilyMatrix, Frame
from detectors.contract import run
from detectors.steps.hang import HangDetector
from detectors.steps.processes import STATE_DISK, STATE_STOPPED
from detectors.steps.progress import JobProgress
from detectors.steps.sends import Sends
from detectors.synthetic import Scene, SyntheticCluster
from tests.detectors.steps.jobs import START_NS, spoken
from trainwarden.clock import NS_PER_S
from trainwarden.records import Verdict

BEGINS = 30
MB = 1e6
Rate = Callable[[int, int], float]
"""(second, node) → bytes per second that its device for storage sends."""
SAVER = Scene(standing=True, cpu_cores={0: 1.0})
"""Rank 0 is busy, the others wait for it."""


def sending(nodes: Sequence[int], begin: int = BEGINS, end: int = 10_000, asked_every_s: int = 1) -> Rate:
    """These nodes send to their store, the others next to nothing; no two readings are the same but those repeated."""

    def rate(second: int, node: int) -> float:
        asked = second - second % asked_every_s
        return (150 * MB if node in nodes and begin <= asked < end else 0.2 * MB) + 1e3 * (asked % 7)

    return rate


def said(scene: Scene, stands_s: int, rate: Rate | None = None, device: str = "bond1") -> list[Verdict]:
    """A job of four ranks that trains for half a minute and then stands in this scene for so long."""

    def script(second: int) -> Scene | None:
        return scene if second >= BEGINS else None

    made: Iterable[Frame] = SyntheticCluster(4, seed=3, evaluate_every=10_000).frames(BEGINS + stands_s, script)
    return run(HangDetector(), list(made if rate is None else with_sends(made, rate, device)))


def with_sends(frames: Iterable[Frame], rate: Rate, device: str) -> Iterator[Frame]:
    for frame in frames:
        yield replace(frame, ticks=tuple(_sent(tick, rate, device) for tick in frame.ticks))


def _sent(tick: AlignedTick, rate: Rate, device: str) -> AlignedTick:
    """With a device that sends; one that is there already sends that too while the job stands."""
    second, known = (tick.at_ns - START_NS) // NS_PER_S, tick.families["nic"]
    column, values = known.metrics.index("tx_bytes_per_s"), known.values.copy()
    more = np.array([rate(second, number) for number in range(len(known.entities))], np.float32)
    if device == known.entities[0][1]:
        values[:, column] += more
        return replace(tick, families={**tick.families, "nic": replace(known, values=values)})
    extra = np.zeros_like(values)
    extra[:, column] = more
    entities = (*known.entities, *((node, device) for node, _ in known.entities))
    family = FamilyMatrix("nic", entities, known.metrics, np.vstack([values, extra]))
    return replace(tick, families={**tick.families, "nic": family})


@pytest.mark.parametrize(
    ("states", "device", "every_s"), [({}, "bond1", 1), ({0: STATE_DISK}, "bond1", 10), ({}, "eth0", 1)]
)
def test_a_save_to_a_store_elsewhere_is_known_by_what_it_sends(
    states: dict[int, int], device: str, every_s: int
) -> None:
    """Without the sending this is a frozen rank: busy alone, or waiting in the kernel alone."""
    scene = replace(SAVER, states=states, cpu_cores={0: 0.0} if states else SAVER.cpu_cores)
    assert spoken(said(scene, 20, sending([]), device)) == [("rank_frozen", "n0")]
    rate = sending([0], asked_every_s=every_s)
    verdicts = said(scene, 190, rate, device)
    assert spoken(verdicts) == [("checkpoint_stall", "synthetic")]
    assert verdicts[0].value >= 180
    assert "to a store elsewhere (n0 sends 150 MB/s)" in verdicts[0].text


def test_ranks_that_all_save_and_wait_are_no_hang() -> None:
    quiet = Scene(standing=True)
    assert spoken(said(quiet, 25)) == [("job_hang", "synthetic")]
    assert said(quiet, 25, sending([0, 1, 2, 3])) == []
    assert said(quiet, 25, sending([1, 2, 3])) == []
    assert spoken(said(quiet, 25, sending([2, 3]))) == [("job_hang", "synthetic")], (
        "half of the nodes, the first not among them"
    )


def test_a_frozen_rank_is_found_as_soon_whatever_others_send() -> None:
    stopped, busy = Scene(standing=True, states={2: STATE_STOPPED}), Scene(standing=True, cpu_cores={2: 1.0})
    for scene, nodes in ((stopped, [0, 1, 2, 3]), (busy, [0]), (busy, [0, 1, 3])):
        alone, beside = said(scene, 20)[0], said(scene, 20, sending(nodes))[0]
        assert (beside.kind, beside.entity.name, beside.window_end_ns) == ("rank_frozen", "n2", alone.window_end_ns)


def test_what_a_node_always_sends_and_what_it_sent_before_the_end_of_its_save_excuse_nobody() -> None:
    assert spoken(said(SAVER, 20, sending([0], begin=0))) == [("rank_frozen", "n0")]
    over = said(SAVER, 60, sending([0], end=BEGINS + 20))
    assert spoken(over) == [("rank_frozen", "n0")]
    assert 35 <= over[0].value <= 37, "fifteen seconds after the last it sent"


def test_a_device_that_comes_back_is_unknown_and_excuses_nobody() -> None:
    job, sends = JobProgress("j", nodes=["n0"], steps_seen=9, durations_ms=[500.0] * 9, progress_ns=START_NS), Sends()
    both = (("n0", "bond0"), ("n0", "bond1"))

    def note(entities: tuple[tuple[str, str], ...], second: int, rate: float) -> None:
        values = np.full((len(entities), 1), rate + second, np.float32)
        sends.note(
            FamilyMatrix("nic", entities, ("tx_bytes_per_s",), values), START_NS + second * NS_PER_S, of, {"j": job}
        )

    of = {"n0": "j"}
    note(both, 1, 1.0)
    note(both[:1], 2, 1.0)
    for second in range(10, 14):
        note(both, second, 9 * MB)
    assert sends.state.ticks.tolist() == [4, 0]
    assert sends.senders(["n0"], START_NS + 13 * NS_PER_S) == {"n0": pytest.approx(9 * MB, rel=1e-3)}
    assert sends.senders(["n1"], START_NS + 13 * NS_PER_S) == sends.senders(["n0"], START_NS + 40 * NS_PER_S) == {}
