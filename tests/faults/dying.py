"""A command of ours that kills itself with SIGKILL at a named moment: ``python -m tests.faults.dying MOMENT[:N] COMMAND...``.

Nothing but the moment is different from the real command. N is the how-manieth time the moment comes (1).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from trainwarden.records import ActionStatus, Incident, Verb, Verdict, decode

F = TypeVar("F", bound=Callable[..., Any])
Reached = Callable[[], None]
FAIL_STOP = ("rank_killed", "rank_frozen")


def same_type(real: F) -> Callable[[Any], F]:
    """Decorator: what is decorated stands in for `real`."""
    return lambda stand_in: cast(F, functools.wraps(real)(stand_in))


def countdown(number: int) -> Reached:
    """Dies when called for the `number`-th time."""
    left = [number]

    def reached() -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def says(outputs: Iterable[Any], kind: type[Any]) -> bool:
    """Whether one of these messages accuses somebody of a stop."""
    records = [decode(output.value) for output in outputs if output.topic in ("tw.verdicts", "tw.incidents")]
    return any(isinstance(r, kind) and r.kind in FAIL_STOP and not getattr(r, "clears", False) for r in records)


def patch_worker(moment: str, reached: Reached) -> None:
    from streams.app import Outlet

    real = Outlet.deliver

    async def deliver(self: Outlet, outputs: Iterable[Any]) -> dict[str, int]:
        waiting = list(outputs)
        if moment == "before-incident" and says(waiting, Incident):
            reached()
        if moment == "verdict-without-cut" and says(waiting, Verdict):
            await real(self, [output for output in waiting if output.topic == "tw.verdicts"])
            reached()
        offsets = await real(self, waiting)
        if (moment == "after-verdict" and says(waiting, Verdict)) or (
            moment == "after-incident" and says(waiting, Incident)
        ):
            reached()
        return offsets

    Outlet.deliver = deliver  # type: ignore[method-assign]


def patch_actions(moment: str, reached: Reached) -> None:
    from actions.backends.warden import WardenBackend
    from actions.journal import Journal

    add, restart = Journal.add, WardenBackend.restart

    @same_type(add)
    def add_then_die(self: Journal, row: Any) -> Any:
        written = add(self, row)
        if moment == "after-started" and row.verb == Verb.RESTART.value and row.status is ActionStatus.STARTED:
            reached()
        return written

    @same_type(restart)
    def restart_then_die(self: WardenBackend, *arguments: Any) -> Any:
        outcome = restart(self, *arguments)
        if moment == "after-told":
            reached()
        return outcome

    Journal.add = add_then_die  # type: ignore[method-assign]
    WardenBackend.restart = restart_then_die  # type: ignore[method-assign]


def patch_store(moment: str, reached: Reached) -> None:
    from streams.store.inserts import Inserter

    insert, insert_table = Inserter.insert, Inserter._insert_table

    @same_type(insert)
    def insert_then_die(self: Inserter, *arguments: Any) -> int:
        if moment == "intended":
            reached()
        written = insert(self, *arguments)
        if moment == "inserted":
            reached()
        return written

    @same_type(insert_table)
    def table_then_die(self: Inserter, *arguments: Any) -> None:
        insert_table(self, *arguments)
        if moment == "half-inserted":
            reached()

    Inserter.insert = insert_then_die  # type: ignore[method-assign]
    Inserter._insert_table = table_then_die  # type: ignore[method-assign]


PATCHES = {"worker": patch_worker, "actions": patch_actions, "store": patch_store}


def main() -> None:
    moment, _, number = sys.argv[1].partition(":")
    PATCHES[sys.argv[2]](moment, countdown(int(number or 1)))
    from trainwarden.cli import main as command

    command(sys.argv[2:])


if __name__ == "__main__":
    main()
