"""Training side of Trainwarden: what a training script adds to be seen, saved and healed.

>>> import trainwarden_hook as tw
>>> with tw.step(0) as s:
...     s.report(loss=0.5)
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainwarden_hook.job import Job, StepScope, attach, init_process_group, step

__all__ = ["Job", "StepScope", "attach", "init_process_group", "step"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import at the first use: ``import trainwarden_hook`` itself costs microseconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainwarden_hook import job

    return getattr(job, name)
