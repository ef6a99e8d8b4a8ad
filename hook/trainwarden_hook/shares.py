"""Shares of the global batch: how many of a step's micro-batches each rank computes.

A step has a fixed number of equal micro-batches; even shares at first. Each one's gradient is weighted by its part of the
global batch, so the averaged gradient is that of the global batch whoever computed what. A change is agreed in three calls
(`handle`): every rank is told of it and looks at a notice board from then on; rank 0 is told to go and at its next boundary,
step s, puts up "from step s + 2 on". No rank begins step s + 2 before rank 0 has handed over its gradients of step s + 1, so
all read it in time, without a collective; whoever else fails meanwhile, all ranks have the old shares or all have the new.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwarden_hook.addresses import first_line
from trainwarden_hook.bulletin import Board, Errands

log = logging.getLogger("trainwarden.hook")
AHEAD_STEPS = 2
GO_WITHIN_S = 10.0
REMEMBERED_STEPS = 12
MAX_FAILURES = 3
VOID = "void"
now_ns = time.perf_counter_ns
Message = dict[str, Any]


def even(total: int, world: int) -> tuple[int, ...]:
    """Equal shares; the first ranks take what does not divide.

    >>> even(32, 5)
    (7, 7, 6, 6, 6)
    """
    low, more = divmod(total, world)
    return tuple(low + (rank < more) for rank in range(world))


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of everything in ``batch`` (tensors, lists, tuples and dicts of them)."""
    if isinstance(batch, Mapping):
        return {key: cut(part, start, stop) for key, part in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and _has_samples(batch[0])):
        return type(batch)([cut(part, start, stop) for part in batch])
    return batch[start:stop]


def size_of(batch: Any) -> int:
    """Number of samples: the length of the first thing that has one."""
    if isinstance(batch, Mapping):
        return size_of(next(iter(batch.values())))
    if isinstance(batch, tuple) or (isinstance(batch, list) and batch and _has_samples(batch[0])):
        return size_of(batch[0])
    return len(batch)


def _has_samples(value: Any) -> bool:
    return hasattr(value, "shape") and len(value.shape) > 0


@dataclass
class Proposal:
    """A change that has been told and not decided."""

    id: str
    shares: tuple[int, ...]
    until: float
    go: bool = False
    decided: threading.Event = field(default_factory=threading.Event)
    at: int | None = None
    failed: str = ""
    failures: int = 0


class Shares:
    """One rank's view of the shares; the training thread works it, the mailbox thread brings commands.

    Parameters
    ----------
    open_board
        Connects to the common notice board; called in the mailbox thread, before anything is promised.
    clock
        Monotonic seconds.
    """

    def __init__(
        self, rank: int, world: int, open_board: Callable[[], Board], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = rank
        self.world = world
        self.total = 0
        self.counts: tuple[int, ...] = ()
        self.applied = ""
        self.pending: Proposal | None = None
        self.step = -1
        self.late: str = ""
        self._open_board = open_board
        self._board: Board | None = None
        self._errands = Errands("trainwarden-shares")
        self._clock = clock
        self._decided: dict[str, Proposal] = {}
        self._micro_ns: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._fixed_ns: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._step_ns: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._lone_ns: list[int] = []
        self._last_began_ns = 0
        self.weight = 1.0
        self.barred = ""

    # -- the training thread

    @property
    def mine(self) -> int:
        """This rank's share."""
        return self.counts[self.rank] if self.counts else 0

    def declare(self, total: int) -> None:
        """Fix the number of micro-batches of a step.

        Raises
        ------
        ValueError
            Fewer than ranks, or another number than before.
        """
        if total < self.world:
            raise ValueError(f"{total} micro-batches for {self.world} ranks: every rank needs one at least")
        if self.total and total != self.total:
            raise ValueError(f"{total} micro-batches in this step, {self.total} in those before: the number is fixed")
        if not self.total:
            self.counts = even(total, self.world)
            self.total = total

    def take(self, batch: Any, total: int, sync: Callable[[bool], None]) -> Iterator[Any]:
        """This rank's micro-batches; gradients are exchanged in the backward pass of the last one.

        Parameters
        ----------
        batch
            The global batch (the same on every rank; each takes its slice), or an iterator of micro-batches of equal
            size, of which as many are drawn as the share says.
        sync
            Switches the exchange of gradients on and off.
        """
        self.declare(total)
        pull = hasattr(batch, "__next__")
        samples = total if pull else size_of(batch)
        if samples < total:
            raise ValueError(f"a global batch of {samples} samples cannot be cut into {total} micro-batches")
        first = sum(self.counts[: self.rank])
        self._lone_ns.clear()
        try:
            for number in range(first, first + self.mine):
                last = number == first + self.mine - 1
                began = self._last_began_ns = now_ns()
                sync(last)
                start, stop = number * samples // total, (number + 1) * samples // total
                self.weight = (stop - start) * self.world / samples
                yield next(batch) if pull else cut(batch, start, stop)
                if not last:
                    self._lone_ns.append(now_ns() - began)
        finally:
            sync(True)

    def boundary(self, step: int) -> None:
        """A step begins: put up, read or apply what is pending."""
        self.step = step
        proposal = self.pending
        if proposal is None:
            return
        try:
            if proposal.at is None:
                _wait_for_device()
                self._decide(proposal, step)
        except Exception as error:
            log.warning("the change %s of shares: %s", proposal.id, error)
            proposal.failures += 1
            if proposal.failures >= MAX_FAILURES:
                self._close(proposal, f"the common store is lost: {error}")
            return
        if proposal.at is not None and step >= proposal.at:
            self._apply(proposal, step)

    def _decide(self, proposal: Proposal, step: int) -> None:
        if self.rank == 0:
            self._publish(proposal, step)
            return
        board = self._board
        assert board is not None, "a proposal is accepted with an open board only"
        text = self._errands.run(lambda: board.look(proposal.id))
        if text == VOID:
            self._close(proposal, "called off")
        elif text is not None:
            proposal.at = int(text)

    def _publish(self, proposal: Proposal, step: int) -> None:
        go = proposal.go
        if not go and self._clock() <= proposal.until:
            return
        board, at = self._board, step + AHEAD_STEPS
        assert board is not None, "a proposal is accepted with an open board only"
        self._errands.run(lambda: board.put(proposal.id, str(at) if go else VOID))
        if go:
            proposal.at = at
            proposal.decided.set()
        else:
            self._close(proposal, "nobody said go in time")

    def _close(self, proposal: Proposal, why: str) -> None:
        proposal.failed = why
        self._remember(proposal)

    def _remember(self, proposal: Proposal) -> None:
        self._decided[proposal.id] = proposal
        while len(self._decided) > 32:
            self._decided.pop(next(iter(self._decided)))
        self.pending = None
        proposal.decided.set()

    def _apply(self, proposal: Proposal, step: int) -> None:
        if step != proposal.at:
            self.late = f"change {proposal.id} was for step {proposal.at}, this rank read it in step {step}"
            log.error("%s: the steps between were weighted unevenly", self.late)
        self.counts, self.applied = proposal.shares, proposal.id
        for values in (self._micro_ns, self._fixed_ns, self._step_ns):
            values.clear()
        self._remember(proposal)
        log.info("from step %d on this rank has %d of %d micro-batches", step, self.mine, self.total)

    def settle(self, duration_ns: float, handed_ns: int, wait_ns: float) -> None:
        """A step has ended: what a micro-batch and what the rest of the step cost this rank.

        ``handed_ns`` is when the last gradient was handed over (0: not known), ``wait_ns`` the waiting after it.
        """
        if not self.total:
            return
        if self._lone_ns:
            micro_ns = statistics.median(self._lone_ns)
        elif handed_ns > self._last_began_ns:
            micro_ns = handed_ns - self._last_began_ns
        else:
            return
        self._micro_ns.append(micro_ns)
        self._step_ns.append(duration_ns)
        self._fixed_ns.append(max(0.0, duration_ns - wait_ns - micro_ns * self.mine))

    # -- the mailbox thread

    def describe(self) -> Message | None:
        """What status shows; ``None`` for a script that has no shares."""
        if not self.total:
            return None
        return {
            "share": self.mine,
            "total": self.total,
            "world": self.world,
            "applied": self.applied,
            "micro_ms": _median_ms(self._micro_ns),
            "fixed_ms": _median_ms(self._fixed_ns),
            "recent_ms": _median_ms(self._step_ns),
            "recent_steps": len(self._step_ns),
            "late": self.late,
        }

    def handle(self, message: Message) -> Message:
        """``prepare``, ``go`` or ``void``."""
        phase, key = message.get("phase"), message.get("id")
        if not isinstance(key, str) or not key:
            return {"error": f"id is {key!r}, expected a text"}
        if phase == "prepare":
            return self._prepare(key, message.get("shares"), bool(message.get("dry_run")))
        if phase == "go":
            return self._go(key, float(message.get("deadline_ms", 3000)) / 1e3)
        if phase == "void":
            return self._void(key)
        return {"error": f"phase is {phase!r}, expected prepare, go or void"}

    def _prepare(self, key: str, shares: object, dry_run: bool) -> Message:
        known = self._known(key)
        if known is not None:
            return {"prepared": True, "step": self.step}
        why = self._refusal(shares)
        if why:
            return {"error": why}
        try:
            board = self._board or self._open_board()
        except Exception as error:
            return {"error": f"the ranks' common store is not to be had: {first_line(error)}"}
        self._board = board
        if not dry_run:
            self.pending = Proposal(key, _numbers(shares), self._clock() + GO_WITHIN_S)
        return {"prepared": True, "step": self.step}

    def _refusal(self, shares: object) -> str:
        if self.barred or not self.total:
            return self.barred or "this script divides no batch by job.shares"
        if self.pending is not None:
            return f"the change {self.pending.id} is not in force yet"
        numbers = _numbers(shares)
        if len(numbers) != self.world or min(numbers, default=0) < 1 or sum(numbers) != self.total:
            return f"shares are {shares!r}, expected {self.world} whole numbers above 0 that add up to {self.total} micro-batches"
        return ""

    def _known(self, key: str) -> Proposal | None:
        pending = self.pending
        return pending if pending is not None and pending.id == key else self._decided.get(key)

    def _go(self, key: str, wait_s: float) -> Message:
        proposal = self._known(key)
        if proposal is None:
            return {"error": f"there is no change {key} to go with: it was not prepared, or this process is new"}
        if self._clock() <= proposal.until:
            proposal.go = True
        if not proposal.decided.wait(wait_s):
            return {"error": f"rank {self.rank} did not reach a step boundary in {wait_s:g} s"}
        if proposal.failed:
            return {"error": f"the change {key} was not made: {proposal.failed}"}
        return {"at": proposal.at}

    def _void(self, key: str) -> Message:
        """Only rank 0 may say so, and only before it has said go: then the others read it at their next boundary."""
        proposal = self._known(key)
        if proposal is not None and not proposal.go:
            proposal.until = float("-inf")
        return {"voided": proposal is not None and not proposal.go}


def _numbers(shares: object) -> tuple[int, ...]:
    if not isinstance(shares, Sequence) or isinstance(shares, str):
        return ()
    return tuple(share for share in shares if isinstance(share, int) and not isinstance(share, bool))


def _median_ms(values: Sequence[float]) -> float | None:
    known = list(values)
    return round(statistics.median(known) / 1e6, 4) if known else None


def _wait_for_device() -> None:
    """A device runs behind its host: the host must not be a step ahead of what it has exchanged when it reads the board."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
