"""Jobs that nobody hears of any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainwarden.clock import NS_PER_S

JOB_SILENCE_NS = 1800 * NS_PER_S
"""Longer than any save, evaluation or restart that a job comes back from; the contract holds detectors to no more than this."""

J = TypeVar("J")


def forget_silent(jobs: dict[str, J], now_ns: int, heard_ns: Callable[[J], int]) -> None:
    """Drop the jobs last heard of, by `heard_ns`, longer than half an hour ago.

    Examples
    --------
    >>> jobs = {"old": 0, "new": JOB_SILENCE_NS}
    >>> forget_silent(jobs, JOB_SILENCE_NS + 1, lambda heard: heard)
    >>> jobs == {"new": JOB_SILENCE_NS}
    True
    """
    for name in [name for name, job in jobs.items() if now_ns - heard_ns(job) > JOB_SILENCE_NS]:
        del jobs[name]
