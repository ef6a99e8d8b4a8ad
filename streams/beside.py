"""Work beside an event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Beside:
    """One thread that does one thing after the other.

    One and not a pool: each thread of a pool keeps for itself the memory that a cut took and gave back (with six of them 30 MB more at 500
    nodes), for as long as it takes until each has had a large one.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[..., T], *given: Any) -> T:
        """`work` of what is given, when its turn has come."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)
