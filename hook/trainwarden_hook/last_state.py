"""The save at the moment of failure: a step that breaks leaves the state at its beginning in memory.

When a rank dies the others are thrown out of their collective. Until the optimizer's step begins nothing
has changed the parameters, so what they hold is the state before the broken step: saved then, no step is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.job import Job

log = logging.getLogger("trainwarden.checkpoint")
SEAL_TIMEOUT_S = 30.0


class LastState:
    """Knows whether the state is still that of the beginning of the present step.

    Running statistics (batch normalisation) have seen the broken step's batch, and random numbers have been drawn.
    """

    def __init__(self, job: Job, saver: Saver, state: Callable[[], dict[str, Any]]) -> None:
        self._job = job
        self._saver = saver
        self._state = state
        self._changed_in = -1
        self._watches = False

    def watch(self, optimizer: Any) -> bool:
        """Hear of each optimizer step before it begins; ``False`` for an optimizer that cannot tell."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            return False
        # A method would be bound anew at each removal; the optimizer keeps this one for life.
        register(self._before_step)
        self._watches = True
        return True

    def _before_step(self, *_: Any) -> None:
        self._changed_in = self._job.recorder.step
        self._saver.before_change()

    def save(self, step: int) -> None:
        """Step ``step`` was broken off by an exception: keep the state that it began with.

        Nothing is saved after the optimizer has begun, or when the optimizer cannot tell.
        """
        if not self._watches or self._changed_in == step:
            log.warning("step %d broke off after the optimizer had begun: its state is not saved", step)
            return
        if self._saver.holds(step):
            return
        failure = self._saver.save(step, self._state(), must=True)
        if failure is not None:
            self._job.on_save(failure)
        elif not self._saver.wait_sealed(SEAL_TIMEOUT_S):
            log.warning("the last state, of step %d, was not sealed in %.0f s", step, SEAL_TIMEOUT_S)
