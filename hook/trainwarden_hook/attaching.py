"""How a model is connected: state to save, restore, gradient hook, in this order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainwarden_hook import randomness
from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.disk import Folder
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.packing import fingerprint
from trainwarden_hook.restore import Candidate, Restored, agree, find

log = logging.getLogger("trainwarden.hook")


def attach(
    model: Any, optimizer: Any, every: int, stateful: Mapping[str, Any], extra: dict[str, Any], persist: str
) -> Job:
    """See `trainwarden_hook.attach`."""
    if persist not in {"node", "all", "none"}:
        raise ValueError(f"persist is {persist!r}, expected node, all or none")
    job = Job()
    job.extra = extra
    job.guard("open", job.open)
    bare = getattr(model, "module", model)
    print_of_model = fingerprint(bare.state_dict(), type(optimizer).__name__)
    environment = job.environment
    buffers = Buffers(environment.job, environment.node, environment.local_rank)
    folder = _folder(environment)
    _restore(job, find_candidate(job, buffers, folder, print_of_model), bare, optimizer, stateful)
    stamp = Stamp(environment.world, environment.rank, environment.generation, print_of_model)
    writes = persist == "all" or (persist == "node" and environment.local_rank == 0)
    saver = Saver(buffers, folder if writes else None, stamp, job.on_save)
    job.use_saver(saver, _state_of(job, bare, optimizer, stateful), every)
    job.guard("hook", lambda: job.tap_gradients(model))
    return job


def _folder(environment: Environment) -> Folder | None:
    root = environment.checkpoint_dir
    return Folder(root, environment.job, environment.node, environment.local_rank) if root else None


def find_candidate(job: Job, buffers: Buffers, folder: Folder | None, print_of_model: int) -> Candidate:
    """The newest good save of this rank; a rank that cannot even look offers none."""
    limit = job.environment.max_step
    found = job.guard("find", lambda: find(buffers, folder, print_of_model, limit)) or Candidate()
    job.refused = list(found.refused)
    job.errors["refused"] += len(found.refused)
    if limit is not None:
        job.guard("roll back", lambda: _forget_newer(buffers, folder, limit))
    return found


def _forget_newer(buffers: Buffers, folder: Folder | None, limit: int) -> None:
    for buffer in buffers.pair:
        if buffer.step > limit:
            buffer.discard()
    if folder is not None:
        folder.discard_above(limit)


def _restore(job: Job, mine: Candidate, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> None:
    restored = agree(mine)
    if restored is not None:
        problem = _load(job, restored, model, optimizer, stateful)
        _all_or_nobody(problem)
        job.start_step, job.restored_from = restored.step, restored.source
        log.info("restored step %d from %s", restored.step, restored.source)
    job.recorder.outbox.send(
        "restore",
        {
            **job.environment.identity(),
            "step": job.start_step,
            "from": job.restored_from,
            "ok": True,
            "refused": len(job.refused) or None,
        },
    )


def _load(job: Job, restored: Restored, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> str:
    state = restored.state
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, part in stateful.items():
            if name in state["stateful"]:
                part.load_state_dict(state["stateful"][name])
    except Exception as error:
        log.exception("the save of step %d could not be loaded", restored.step)
        return f"{type(error).__name__}: {error}"
    job.extra.update(state["extra"])
    _restore_randomness(job, restored)
    return ""


def _restore_randomness(job: Job, restored: Restored) -> None:
    environment, header = job.environment, restored.header
    if (header.rank, header.world) == (environment.rank, environment.world):
        job.guard("randomness", lambda: randomness.bring_back(restored.state["random"]))
    else:
        job.guard("randomness", lambda: randomness.derive(restored.step, environment.rank))


def _all_or_nobody(problem: str) -> None:
    """Ranks with different states would train nonsense: if one could not load, all stop here."""
    import torch.distributed as dist

    problems = [problem]
    if dist.is_available() and dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    bad = {rank: text for rank, text in enumerate(problems) if text}
    if bad:
        rank, text = next(iter(bad.items()))
        raise RuntimeError(f"rank {rank} could not load the agreed save: {text}")


def _state_of(job: Job, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "stateful": {name: part.state_dict() for name, part in stateful.items()},
            "random": randomness.capture(),
            "extra": dict(job.extra),
        }

    return state
