"""How a model is connected: state to save, restore, gradient hook, in this order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainwarden_hook import randomness, segments
from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.depot import Replica
from trainwarden_hook.disk import Folder, discard_file_above
from trainwarden_hook.environment import Environment
from trainwarden_hook.job import Job
from trainwarden_hook.last_state import LastState
from trainwarden_hook.layout import Layout, parameter_names, stable_paths
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.offers import Holdings, look
from trainwarden_hook.packing import fingerprint
from trainwarden_hook.regroup import rebuild
from trainwarden_hook.restore import Ranks, Restored, agree
from trainwarden_hook.ring import partners
from trainwarden_hook.saving_options import SavingOptions

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
    options = SavingOptions.read()
    print_of_model = fingerprint(bare.state_dict(), type(optimizer).__name__)
    environment = job.environment
    buffers = Buffers(environment.job, environment.node, environment.local_rank)
    folder = _folder(environment, options)
    _restore(job, find_candidate(job, buffers, folder, print_of_model), bare, optimizer, stateful)
    stamp = Stamp(environment.world, environment.rank, environment.generation, print_of_model)
    writes = persist == "all" or (persist == "node" and environment.local_rank == 0) or is_sharded(bare)
    goal = folder if writes and persist != "none" else None
    peer = job.guard("peer", lambda: _peer(environment, options))
    stable = stable_paths(bare, optimizer)
    saver = Saver(buffers, goal, stamp, job.on_save, peer, stable, options.overlap_from_bytes)
    state = _state_of(job, bare, optimizer, stateful)
    last = LastState(job, saver, state)
    if not last.watch(optimizer):
        saver.copy_at_once()
    job.use_saver(saver, state, every)
    job.on_failed_step = last.save
    job.guard("hook", lambda: job.tap_gradients(model))

    def rejoin() -> None:
        """The collectives of a fresh process, in its order: DDP, the agreement, the partners."""
        rebuild(model)
        _restore(job, find_candidate(job, buffers, folder, print_of_model), bare, optimizer, stateful)
        present = job.environment
        saver.stamp = Stamp(present.world, present.rank, present.generation, print_of_model)
        _peer(present, options)
        job.tap_gradients(model)

    job.use_rejoin(rejoin)
    return job


def is_sharded(model: Any) -> bool:
    """Whether each rank holds a part of the model: then the files of all ranks are one save."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def _folder(environment: Environment, options: SavingOptions) -> Folder | None:
    if not environment.checkpoint_dir:
        return None
    return Folder(
        environment.checkpoint_dir,
        environment.job,
        environment.node,
        environment.local_rank,
        options.keep,
        options.keep_every,
        options.disk_bytes_per_s,
    )


def _peer(environment: Environment, options: SavingOptions) -> Replica | None:
    """The depot of the partner node (a collective: every rank says where it is)."""
    nodes = Ranks().gather((environment.node, options.rack, options.depot))
    depots = {node: depot for node, _, depot in nodes if depot}
    partner = partners({node: rack for node, rack, _ in nodes}).get(environment.node)
    if partner is None or partner not in depots or not options.replicate:
        return None
    log.info("replicas of rank %d go to node %s", environment.rank, partner)
    return Replica(depots[partner], environment.rank, options.peer_bytes_per_s, options.peer_timeout_s)


def find_candidate(job: Job, buffers: Buffers, folder: Folder | None, print_of_model: int) -> Holdings:
    """The saves that this rank can offer; a rank that cannot even look offers none."""
    environment = job.environment
    limit = environment.max_step
    # The replicas are the node's: one of its ranks speaks for them.
    replicas = segments.replicas(environment.job, environment.node) if environment.local_rank == 0 else []
    found = job.guard("find", lambda: look(buffers, folder, print_of_model, limit, replicas)) or Holdings()
    if limit is not None:
        job.guard("roll back", lambda: _forget_newer(buffers, folder, limit, replicas))
    return found


def _forget_newer(buffers: Buffers, folder: Folder | None, limit: int, replicas: list[str]) -> None:
    for buffer in buffers.pair:
        buffer.discard_above(limit)
    for path in replicas:
        discard_file_above(path, limit)
    if folder is not None:
        folder.discard_above(limit)


def _restore(job: Job, mine: Holdings, model: Any, optimizer: Any, stateful: Mapping[str, Any]) -> None:
    layout = Layout(model.state_dict(), optimizer)
    restored = agree(mine, layout.place)
    job.refused = list(mine.refused)
    job.errors["refused"] += len(mine.refused)
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
    names = parameter_names(model, optimizer)

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "stateful": {name: part.state_dict() for name, part in stateful.items()},
            "names": names,
            "random": randomness.capture(),
            "extra": dict(job.extra),
        }

    return state
