"""The public face of the training side: `attach`, `step`, `init_process_group`."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainwarden_hook import announcing, segments, steps
from trainwarden_hook.bulletin import StoreBoard
from trainwarden_hook.checksums import EVERY_STEPS, Checksums
from trainwarden_hook.environment import Environment
from trainwarden_hook.mailbox import Mailbox
from trainwarden_hook.regroup import SWITCH, Regroup
from trainwarden_hook.shares import Shares
from trainwarden_hook.steps import Phase, StepRecorder
from trainwarden_hook.wire import Sender

if TYPE_CHECKING:
    from trainwarden_hook.checkpoint import Saver, SaveReport

log = logging.getLogger("trainwarden.hook")


class StepScope:
    """What ``with job.step(n) as s`` gives: the phase marks and `report`. One object serves all steps."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._step = -1

    def aim(self, step: int) -> StepScope:
        """Set the number of the next step."""
        self._step = step
        return self

    def __enter__(self) -> StepScope:
        self._job.enter_step(self._step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is None:
            self._job.leave_step()
            return False
        return isinstance(error, Exception) and self._job.break_step(self._step, error)

    def data(self) -> Phase:
        """Fetching the batch."""
        return self._job.recorder.phases[0]

    def forward(self) -> Phase:
        """Forward pass and loss."""
        return self._job.recorder.phases[1]

    def backward(self) -> Phase:
        """Backward pass; split into local work and waiting for the others."""
        return self._job.recorder.phases[2]

    def optimizer(self) -> Phase:
        """Optimizer step."""
        return self._job.recorder.phases[3]

    def report(self, loss: Any = None, samples: int | None = None) -> None:
        """Say the loss (number or tensor) and the number of samples of this step on this rank."""
        self._job.guard("report", lambda: self._job.recorder.report(loss, samples))


class Job:
    """One rank's connection to Trainwarden.

    Nothing here stops or slows training: what fails is counted in ``errors`` by place and logged once.

    Attributes
    ----------
    start_step
        The first step to run: 0, or the step of the restored save.
    extra
        The script's own values (numbers, texts, tensors), saved and restored with the rest; for example the data position.
    restored_from
        ``memory``, ``disk``, ``peer`` or ``none``.
    """

    def __init__(self, environment: Environment | None = None) -> None:
        self.environment = environment or Environment.read()
        self.sender = Sender(self.environment.socket_path)
        self.recorder = StepRecorder(self.sender, self.environment, None)
        self.mailbox = Mailbox(self._why_not)
        self.errors: Counter[str] = Counter()
        self.start_step = 0
        self.extra: dict[str, Any] = {}
        self.restored_from = "none"
        self.refused: list[str] = []
        self._saver: Saver | None = None
        self._state: Callable[[], dict[str, Any]] | None = None
        self.division = Shares(
            self.environment.rank, self.environment.world, lambda: StoreBoard(self.environment.generation)
        )
        self.mailbox.shares = self.division
        self._switch: Callable[[bool], None] = _no_switch
        self._every = 0
        self._commanded: int | None = None
        self._scope = StepScope(self)
        self.regroup: Regroup | None = None
        self.regrouped = False
        self._rejoin: Callable[[], None] | None = None
        self.on_failed_step: Callable[[int], None] = lambda step: None

    def guard(self, place: str, action: Callable[[], Any]) -> Any:
        """Run ``action``; a failure is counted, logged once per place, and yields ``None``."""
        try:
            return action()
        except Exception:
            self.errors[place] += 1
            if self.errors[place] == 1:
                log.exception("%s failed; training goes on without it", place)
            return None

    # -- opening

    def open(self) -> None:
        """Say hello to the collector and open the mailbox."""
        environment = self.environment
        if not self.sender.silent:
            self.guard("announcing", lambda: announcing.listen(self.recorder.pauses))
        self.recorder.outbox.send(
            "hello",
            {
                **environment.identity(),
                "local_rank": environment.local_rank,
                "at_ns": time.time_ns(),
            },
        )
        if environment.mailbox_path:
            self.mailbox.open(environment.mailbox_path, environment.rank, environment.generation)

    def tap_gradients(self, model: Any) -> None:
        """Register the communication hook on a DDP model."""
        self._switch = sync_switch(model)
        self.guard("announcing", lambda: announcing.watch_model(model))
        if not hasattr(model, "register_comm_hook"):
            return
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(model, DistributedDataParallel):
            # Sharded models hand other things to a hook: ours would break their backward pass.
            log.info("%s is no DistributedDataParallel: gradients are not looked at", type(model).__name__)
            return
        from trainwarden_hook.gradients import GradientTap

        group = model.process_group
        if group.size() != self.environment.world:
            self.division.barred = "shares are for jobs in which every rank is a replica"
        tap = GradientTap(group.size(), group)
        # DDP inspects the annotations of a hook and does not resolve text ones; a lambda has none.
        model.register_comm_hook(None, lambda state, bucket: tap(state, bucket))  # noqa: PLW0108
        self.recorder.tap = tap
        if group.size() > 1:
            self.watch_replicas(model.module)

    def watch_replicas(self, model: Any, every: int = EVERY_STEPS, chunk_bytes: int = 0) -> None:
        """Report a checksum of the parameters every so many steps (0: none); on by itself for DDP.

        Parameters
        ----------
        every, chunk_bytes
            How often, and how much of the model each time (0: by where it is); the same on every rank.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.recorder.checksums = Checksums(parameters, every, chunk_bytes) if every and parameters else None

    def use_saver(self, saver: Saver, state: Callable[[], dict[str, Any]], every: int) -> None:
        """Save ``state()`` every ``every`` steps (0: by command only)."""
        self._saver, self._state, self._every = saver, state, every

    # -- steps

    def step(self, step: int) -> StepScope:
        """Context of the training step number ``step``."""
        return self._scope.aim(step)

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps to run: ``range(start_step, total)`` for a loop that may outlive a peer.

        With ``trainwarden-run --in-process`` a step that breaks because a peer has died raises nothing out of
        ``with job.step(...)``: `regrouped` is then true until the next one, which is the step that all ranks agreed on.

        Examples
        --------
        >>> import trainwarden_hook as tw
        >>> list(tw.Job().steps(3))
        [0, 1, 2]
        """
        if self._rejoin is not None and os.environ.get(SWITCH) == "1":
            self.regroup = Regroup(self, self._rejoin)
        step = self.start_step
        while step < total:
            self.regrouped = False
            yield step
            step = self.start_step if self.regrouped else step + 1

    def use_rejoin(self, rejoin: Callable[[], None]) -> None:
        """What joins a new world after the group is there; see `trainwarden_hook.regroup`."""
        self._rejoin = rejoin

    def break_step(self, step: int, error: Exception) -> bool:
        """A step was broken off: keep the state; true when this process goes on in a new world."""
        regroup = self.regroup
        if regroup is not None:
            self.guard("leave", regroup.leave)
        self.guard("last save", lambda: self.on_failed_step(step))
        if regroup is None:
            return False
        self.regrouped = bool(self.guard("regroup", lambda: regroup.attempt(step, error)))
        return self.regrouped

    def renew(self, environment: Environment) -> None:
        """The same process in another generation."""
        self.environment = environment
        self.recorder.renew(environment)
        self.division = Shares(environment.rank, environment.world, lambda: StoreBoard(environment.generation))
        self.mailbox.shares = self.division

    def enter_step(self, step: int) -> None:
        """Step boundary: saves that are due, then the clock of the step."""
        entered_ns = steps.now_ns()
        mailbox = self.mailbox
        mailbox.current = step
        division = self.division
        if division.total:
            self.guard("shares", lambda: division.boundary(step))
        checkpoint_ns = 0
        if mailbox.save_at is not None or (self._every and step % self._every == 0 and step > self.start_step):
            before = steps.now_ns()
            self.guard("save", lambda: self._save_if_due(step))
            checkpoint_ns = steps.now_ns() - before
        try:
            following = step + 1
            save_follows = mailbox.save_at == following or bool(self._every and following % self._every == 0)
            self.recorder.begin(step, checkpoint_ns, entered_ns, save_follows)
        except Exception:
            self.errors["begin"] += 1

    def leave_step(self) -> None:
        """End of the step: measure and send."""
        try:
            self.recorder.end()
            self.mailbox.step_ms = self.recorder.step_ns / 1e6
            if self.division.total:
                self.division.settle(*self.recorder.last_times())
        except Exception:
            self.errors["end"] += 1
            if self.errors["end"] == 1:
                log.exception("a step could not be reported; training goes on")

    # -- shares

    def shares(self, batch: Any, micro_batches: int) -> Iterator[Any]:
        """This rank's micro-batches of a step of ``micro_batches`` in all; go through it once a step and call `backward` for each.

        Even shares at first; the control plane gives a slow rank fewer, on the same step everywhere, and gives them
        back. The averaged gradient is always that of the whole global batch.

        Parameters
        ----------
        batch
            The global batch, the same on every rank (tensors, tuples or dicts of them, or a list of indices), of which
            each rank gets its slices; or an iterator (``iter(loader)``) of this rank's own micro-batches of equal size.
        micro_batches
            Of all ranks together; always the same, at least one a rank.

        Examples
        --------
        >>> import trainwarden_hook as tw
        >>> job = tw.Job()
        >>> [part for part in job.shares([1, 2, 3, 4], micro_batches=2)]
        [[1, 2], [3, 4]]
        """
        return self.division.take(batch, micro_batches, self._switch)

    def backward(self, loss: Any) -> Any:
        """``loss.backward()`` for the mean loss of the present micro-batch, weighted by its part of the global batch.

        Returns
        -------
        Tensor
            The loss times that part, detached: the sum of them over all ranks is the mean loss of the global batch.
        """
        weighted = loss * self.division.weight
        weighted.backward()
        return weighted.detach() / self.division.world

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Mark an evaluation between steps, so that its length is not taken for a stall; a model that switches to it is seen anyway."""
        pauses = self.recorder.pauses
        self.guard("evaluation", pauses.evaluation_begins)
        try:
            yield
        finally:
            self.guard("evaluation", pauses.evaluation_ends)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Mark a save that the script makes in a way of its own; ``torch.save`` and the usual libraries are seen anyway."""
        pauses = self.recorder.pauses
        self.guard("saving", pauses.save_begins)
        try:
            yield
        finally:
            self.guard("saving", pauses.save_ends)

    # -- saving

    def _why_not(self) -> str:
        """Reason why this rank could not save now; called by the mailbox thread."""
        if self._saver is None:
            return "this script has attached no model to save"
        return ""

    def _save_if_due(self, step: int) -> None:
        wanted = self.mailbox.save_at
        commanded = wanted is not None and step >= wanted
        if not commanded and not (self._every and step % self._every == 0):
            return
        if commanded:
            self.mailbox.save_at = None
        pauses = self.recorder.pauses
        self.guard("saving", pauses.save_begins)
        try:
            failure = self._save(step, wanted if commanded else None)
        finally:
            self.guard("saving", lambda: pauses.save_ends(counts=False))
        if failure is not None:
            self.on_save(failure)

    def _save(self, step: int, wanted: int | None) -> SaveReport | None:
        from trainwarden_hook.checkpoint import SaveReport

        self._commanded = wanted
        if wanted is not None and step != wanted:
            return SaveReport(wanted, "memory", False, f"step {wanted} was passed over; the script is at {step}")
        self.recorder.complete_norms()
        bad = self.recorder.last_is_bad()
        if bad:
            return SaveReport(step, "memory", False, bad)
        if self._saver is None or self._state is None:
            return SaveReport(step, "memory", False, self._why_not())
        return self._saver.save(step, self._state(), must=wanted is not None)

    def on_save(self, report: SaveReport) -> None:
        """Tell collector and launcher what became of a save."""
        self.recorder.outbox.send(
            "save",
            {
                **self.environment.identity(),
                "step": report.step,
                "bytes": report.size_bytes,
                "stall_ms": report.stall_ms,
                "persist_ms": report.persist_ms,
                "where": report.where,
                "ok": report.ok,
                "error": report.error,
            },
        )
        if not report.ok:
            log.warning("save of step %d to %s: %s", report.step, report.where, report.error)
        if report.where == "memory" and report.step == self._commanded:
            self.mailbox.tell_saved(
                {
                    "step": report.step,
                    "ok": report.ok,
                    "error": report.error,
                    "stall_ms": report.stall_ms,
                    "bytes": report.size_bytes,
                }
            )

    # -- the end

    def finish(self, reason: str = "finished") -> None:
        """Last call of a script: wait for all ranks (so that none is taken for lost), send what is left.

        The process group stays; destroy it afterwards.
        """
        self.guard("barrier", _barrier)
        if self._saver is not None:
            self.guard("saver", self._saver.close)
            self.guard("segments", self._give_memory_back)
        outbox = self.recorder.outbox
        outbox.send("bye", {**self.environment.identity(), "reason": reason, "errors": sum(self.errors.values())})
        self.guard("flush", outbox.flush)
        self.mailbox.close()

    def _give_memory_back(self) -> None:
        """Under our launcher the segments are its to remove; elsewhere nobody else would."""
        environment = self.environment
        if not environment.mailbox_path:
            segments.unlink_rank(environment.job, environment.node, environment.local_rank)


def _no_switch(on: bool) -> None:
    """A model on one process exchanges nothing."""


def sync_switch(model: Any) -> Callable[[bool], None]:
    """What turns the exchange of gradients on and off: as ``no_sync`` does for DDP, ``set_requires_gradient_sync`` of FSDP."""
    if hasattr(model, "set_requires_gradient_sync"):
        switch: Callable[[bool], None] = model.set_requires_gradient_sync
        return switch
    if hasattr(model, "require_backward_grad_sync"):
        return lambda on: setattr(model, "require_backward_grad_sync", on)
    return _no_switch


def _barrier() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def init_process_group(backend: str | None = None, timeout_s: float | None = None) -> None:
    """``torch.distributed.init_process_group`` with a time-out of seconds instead of half an hour.

    Parameters
    ----------
    backend
        ``gloo``, ``nccl``; default by whether CUDA is there.
    timeout_s
        Default: ``--pg-timeout`` of the launcher (60).
    """
    import torch
    import torch.distributed as dist

    limit_s = timeout_s if timeout_s is not None else Environment.read().pg_timeout_s
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, timeout=timedelta(seconds=limit_s))


def attach(
    model: Any,
    optimizer: Any,
    *,
    checkpoint_every: int = 0,
    stateful: Mapping[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    persist: str = "node",
) -> Job:
    """Connect a model and its optimizer: gradient hook, saves, and the restore of the newest good save.

    Parameters
    ----------
    model
        A ``DistributedDataParallel`` model (the step is split and averaged as before), or any module.
    optimizer
        Its optimizer.
    checkpoint_every
        Steps between saves to memory; 0 saves by command only.
    stateful
        More objects with ``state_dict`` / ``load_state_dict`` (scheduler, scaler), by name.
    extra
        The script's own values; restored ones replace those given here.
    persist
        Who writes to disk: ``node`` (local rank 0 of each node), ``all``, ``none``.

    Returns
    -------
    Job
        ``start_step`` says where to go on.

    Raises
    ------
    RuntimeError
        The agreed save could not be loaded: going on would let the ranks differ.
    """
    from trainwarden_hook.attaching import attach as connect_all

    return connect_all(model, optimizer, checkpoint_every, stateful or {}, extra or {}, persist)


_plain: list[Job] = []


def step(number: int | None = None) -> StepScope:
    """A step of a script that attaches nothing; numbers count up by themselves."""
    if not _plain:
        job = Job()
        job.guard("open", job.open)
        _plain.append(job)
    job = _plain[0]
    return job.step(job.recorder.step + 1 if number is None else number)
