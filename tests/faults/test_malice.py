"""Three malicious collectors of 1,250: no healthy node but their own is isolated. The small one is `tests/streams/test_malicious.py`."""

from __future__ import annotations

import pytest

from collectors.simulated.spec import Spec
from tests.faults.malice import FORGERIES, perform

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SPEC = Spec(nodes=1250, seed=3, jobs="200:ddp,100:pipeline", light_share=0.0, idle_share=0.7, disorder=0.3)


def test_three_liars_of_1250() -> None:
    told = perform(SPEC, FORGERIES, begin_s=25, length_s=50)
    assert told.forged > 500
    assert told.acted_on() - told.liars == {told.truly_sick}
    assert not any(verdict.entity.node in told.victims and verdict.reach == "act" for verdict in told.verdicts)
