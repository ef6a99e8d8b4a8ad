"""Three collectors of a cluster lie: in the names of others, about others, and about steps that are not theirs."""

from __future__ import annotations

import numpy as np
import pytest

from collectors.simulated.spec import Spec
from detectors.mesh.blame import explain
from tests.faults.malice import FORGERIES, perform
from trainwarden.topology import Topology

SPEC = Spec(nodes=16, seed=1, jobs="16:ddp", light_share=0.0, idle_share=0.0, disorder=0.3)


@pytest.mark.parametrize("stages", [1, 2])
def test_three_liars_harm_nobody_but_themselves_and_a_sick_node_is_found_all_the_same(stages: int) -> None:
    told = perform(SPEC, FORGERIES, begin_s=25, length_s=55, stages=stages)
    assert told.forged > 500
    assert told.acted_on() - told.liars == {told.truly_sick}
    refused = {letter.reason.split(":")[0] for letter in told.dead}
    assert any("speaks as" in reason for reason in refused), refused
    assert any("tells steps of rank" in reason for reason in refused), refused
    where = [(letter.topic, letter.partition, letter.offset) for letter in told.dead if letter.offset >= 0]
    assert len(where) == len(set(where)), "a record is refused once, however many read it"


def test_probes_of_three_liars_convict_nobody_in_1250() -> None:
    """Each node probes eight others, the liars probe their victim, too: his own probes and those of the honest speak for him."""
    names = [f"n{i}" for i in range(1250)]
    ring = [(name, names[(i + step) % 1250]) for i, name in enumerate(names) for step in (1, 35, 2, 97, 3, 162, 5, 229)]
    victim, liars = "n600", ("n10", "n400", "n599")
    pairs = list(dict.fromkeys([*ring, *((liar, victim) for liar in liars)]))
    bad = np.array([prober in liars and target == victim for prober, target in pairs])
    assert explain(pairs, bad, Topology()).nodes == ()
    honest = np.array([victim in pair for pair in pairs])
    assert explain(pairs, honest, Topology()).nodes == (victim,)
