"""Saves as a checkpoint of ``torch.distributed.checkpoint``: for other tools, and for leaving.

The model is under ``model`` and the optimizer under ``optim``, both by parameter names, as
``torch.distributed.checkpoint.state_dict.get_state_dict`` gives them; the script's own numbers are under ``extra``.
"""

from __future__ import annotations

import argparse
import glob
import os
import sys
from collections.abc import Sequence
from typing import Any

from trainwarden_hook.disk import SUFFIX, map_file
from trainwarden_hook.offers import Holdings, Offer
from trainwarden_hook.packing import Part, Refused, aligned, read_index, unpack
from trainwarden_hook.restore import Told, choose
from trainwarden_hook.sharding import Parts, rebuild, whole


def newest_state(paths: Sequence[str], step: int | None = None) -> tuple[int, dict[str, Any], list[str]]:
    """The newest whole state in some files (and segments), sharded tensors put together.

    Parameters
    ----------
    step
        Only this one; ``None`` for the newest.

    Returns
    -------
    tuple
        Step, state, and why other saves were refused.

    Raises
    ------
    Refused
        There is no whole good save.
    """
    held = Holdings()
    for path in paths:
        try:
            header, payload = map_file(path)
            if step is None or header.step == step:
                held.offers.append(Offer(header, payload[: header.payload_bytes], "disk", path))
        except Refused as error:
            held.refuse(str(error))
    spoilt: set[tuple[int, int]] = set()
    while True:
        told = [Told(0, number, offer.header, offer.key, offer.source) for number, offer in enumerate(held.offers)]
        choice, incomplete = choose(told, spoilt, set())
        if choice is None:
            wanted = "no whole save" if step is None else f"no whole save of step {step}"
            raise Refused(f"{wanted} in {len(paths)} files: {'; '.join([*held.refused, *incomplete]) or 'none there'}")
        offers = {part: held.offers[choice.first(part).number] for part in choice.holders}
        bad = _verify(held, offers)
        if not bad:
            held.refused.extend(incomplete)
            return choice.key[0], _assemble(offers), held.refused
        spoilt |= {(0, held.offers.index(offer)) for offer in bad}


def _verify(held: Holdings, offers: dict[int, Offer]) -> list[Offer]:
    bad = []
    for offer in offers.values():
        try:
            offer.verify()
        except Refused as error:
            held.refuse(str(error))
            bad.append(offer)
    return bad


def _assemble(offers: dict[int, Offer]) -> dict[str, Any]:
    def read(saved_rank: int, offset: int, size: int) -> memoryview:
        offer = offers[saved_rank]
        start = aligned(offer.header.index_bytes) + offset
        return offer.payload[start : start + size]

    indexes = {saved_rank: read_index(offer.header, offer.payload) for saved_rank, offer in offers.items()}
    parts = Parts(indexes, read)
    first = offers[min(offers)]
    state = unpack(first.header, first.payload, {"model", "optimizer"})
    made = rebuild(state, lambda at, leaf: parts.cut(at, whole(leaf.shape)) if isinstance(leaf, Part) else leaf)
    return dict(made)


def by_name(optimizer: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state by parameter names instead of numbers; a parameter without a name keeps its number."""

    def name(number: int) -> str:
        return names[number] if number < len(names) and names[number] else str(number)

    return {
        "state": {name(number): dict(entries) for number, entries in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [name(number) for number in group["params"]]} for group in optimizer["param_groups"]
        ],
    }


def export(paths: Sequence[str], target: str, step: int | None = None) -> int:
    """Write the newest whole state in ``paths`` as a checkpoint of ``torch.distributed.checkpoint``.

    Returns
    -------
    int
        The step it is of.

    Raises
    ------
    Refused
        There is no whole good save.
    OSError
        ``target`` cannot be written.
    """
    import torch.distributed.checkpoint as dcp

    at, state, _ = newest_state(paths, step)
    made = {
        "model": state["model"],
        "optim": by_name(state["optimizer"], state.get("names", [])),
        "extra": state.get("extra", {}),
        "step": at,
    }
    dcp.save(made, storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    return at


def files_under(folder: str) -> list[str]:
    """Every checkpoint file in a folder and those below it."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), "**", f"*{SUFFIX}"), recursive=True))


def main(argv: Sequence[str] | None = None) -> int:
    """``trainwarden-checkpoint``: list and export."""
    parser = argparse.ArgumentParser(
        prog="trainwarden-checkpoint", description="Look at saves, and take them elsewhere."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    shown = verbs.add_parser("list", help="what is in a checkpoint directory, and whether its bytes are good")
    shown.add_argument("folder", help="a job's checkpoint directory (--checkpoint-dir)")
    leaving = verbs.add_parser("export", help="write the newest whole save for torch.distributed.checkpoint.load")
    leaving.add_argument("folder", help="a job's checkpoint directory (--checkpoint-dir), of all its nodes")
    leaving.add_argument("target", help="new directory")
    leaving.add_argument("--step", type=int, default=None, help="this step instead of the newest")
    given = parser.parse_args(argv)
    paths = files_under(given.folder)
    if not paths:
        print(f"trainwarden-checkpoint: no {SUFFIX} file is under {given.folder!r}", file=sys.stderr)
        return 2
    try:
        if given.verb == "list":
            return _list(paths)
        print(f"step {export(paths, given.target, given.step)} is in {given.target}")
    except (Refused, OSError) as error:
        print(f"trainwarden-checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def _list(paths: Sequence[str]) -> int:
    bad = 0
    for path in paths:
        try:
            header, payload = map_file(path)
            Offer(header, payload, "disk", path).verify()
        except Refused as error:
            bad += 1
            print(f"refused: {error}")
        else:
            kind = "part" if header.sharded else "whole"
            print(
                f"{path}: step {header.step}, {kind} of rank {header.rank} of {header.world}, {header.payload_bytes} bytes"
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
