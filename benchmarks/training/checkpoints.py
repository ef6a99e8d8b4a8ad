"""The checkpoint part: everything measured by turns in one run, ratios against the bars."""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.training import others, ours, peers
from benchmarks.training.bars import Bar
from benchmarks.training.state import Training

STALL_OVER_TORCH_SAVE = 0.1
OVERLAP_MS_PER_GB = 20.0
LOCAL_S_PER_GB = 1.0
PULL_OVER_RAW = 0.8
STEP_RATIO = 1.05
MEMORY_RATIO = 2.1
REPLICA_RATIO = 1.05


def measure(state_mb: int, rounds: int, folder: str, dlrover_python: str) -> dict[str, Any]:
    """All figures, in seconds where the name ends in ``_s``."""
    training = Training(state_mb)
    training.step()
    size = training.size_bytes()
    found: dict[str, Any] = {"state_bytes": size, "rounds": rounds}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found["torch_save_s"] = others.torch_save_s(training, Path(place), rounds, fsync=False)
        found["torch_save_fsync_s"] = others.torch_save_s(training, Path(place), rounds, fsync=True)
        found["dcp_async_s"] = others.dcp_async_s(training, Path(place), rounds)
        found["dlrover"] = _dlrover(dlrover_python, Path(place), state_mb, rounds)
    bench = ours.Bench(training)
    try:
        found["floor_s"] = bench.floor_s(rounds)
        found["at_once_s"] = bench.stall_at_once_s(rounds)
        found["overlapped"] = bench.stall_overlapped(2 * rounds + 1, spare=1)
        found["overlapped_full"] = bench.stall_overlapped(rounds, spare=0)
        found["overlapped_equal"] = bench.overlapped_is_equal()
        found["memory_ratio"] = bench.memory_ratio()
        found["restore_local_s"] = bench.restore_local_s(rounds, state_mb)
        found["replica"] = bench.replica()
        found["pull"] = bench.pull(rounds)
    finally:
        bench.close()
    return found


def _dlrover(python: str, place: Path, state_mb: int, rounds: int) -> dict[str, Any]:
    if python == "none":
        return {"why_not": "it was left out (--dlrover-python none)"}
    why_not = ""
    if not python:
        python, why_not = peers.interpreter("dlrover")
    return {"why_not": why_not} if why_not else others.dlrover(python, place, state_mb, rounds)


def bars(found: dict[str, Any]) -> list[Bar]:
    """The promises of the checkpoint part."""
    gigabytes = found["state_bytes"] / 1e9
    middle = statistics.median
    at_once, exposed = middle(found["at_once_s"]), middle(found["overlapped"]["stall_s"])
    torch_save, dcp = middle(found["torch_save_s"]), middle(found["dcp_async_s"])
    made = [
        Bar("stall at once / torch.save", at_once / torch_save, STALL_OVER_TORCH_SAVE),
        Bar("stall overlapped / torch.save", exposed / torch_save, STALL_OVER_TORCH_SAVE),
        Bar("stall at once / DCP async", at_once / dcp, 1.0),
        Bar("stall overlapped / DCP async", exposed / dcp, 1.0),
        Bar("stall overlapped, ms per GB", exposed * 1e3 / gigabytes, OVERLAP_MS_PER_GB),
        Bar("step beside an overlapped copy / alone, a core idle", _step_ratio(found["overlapped"]), STEP_RATIO),
        Bar("overlapped equals at once, bit for bit", float(found["overlapped_equal"]), 1.0, at_least=True),
        Bar("memory / state", found["memory_ratio"], MEMORY_RATIO),
        Bar("replica held / state", found["replica"]["held_ratio"], REPLICA_RATIO),
        Bar("restore from local memory, s per GB", middle(found["restore_local_s"]) / gigabytes, LOCAL_S_PER_GB),
        Bar("pull from a peer / bare socket (speed)", found["pull"]["ratio"], PULL_OVER_RAW, at_least=True),
    ]
    if "memory_s" in found["dlrover"]:
        flash = middle(found["dlrover"]["memory_s"])
        made.insert(4, Bar("stall at once / DLRover", at_once / flash, 1.0))
        made.insert(5, Bar("stall overlapped / DLRover", exposed / flash, 1.0))
    return made


def _step_ratio(overlapped: dict[str, list[float]]) -> float:
    """Each step beside the mean of the plain ones before and after it: a machine's pace drifts by more than the copy costs."""
    plain = [(before + after) / 2 for before, after in pairwise(overlapped["plain_step_s"])]
    return statistics.median(step / alone for step, alone in zip(overlapped["step_s"], plain, strict=True))


def _processor_s(overlapped: dict[str, list[float]]) -> float:
    """What a save beside a step costs in processor time, all threads together."""
    plain = [(before + after) / 2 for before, after in pairwise(overlapped["plain_processor_s"])]
    return statistics.median(took - alone for took, alone in zip(overlapped["processor_s"], plain, strict=True))


def notes(found: dict[str, Any]) -> list[str]:
    """What stands beside the bars."""
    floor, at_once = found["floor_s"], statistics.median(found["at_once_s"])
    middle = {name: statistics.median(times) * 1e3 for name, times in floor.items()}
    least = statistics.median(found["torch_save_s"]) * STALL_OVER_TORCH_SAVE * 1e3
    full = found["overlapped_full"]
    lines = [
        "the same bytes from memory to prepared shared memory, nothing else, ms: " + _cells(middle),
        f"a save at once takes {at_once * 1e3:.0f} ms; a tenth of torch.save is {least:.0f} ms",
        f"no core idle: the step beside the copy takes {_step_ratio(full):.2f} of one alone, exposed stall"
        f" {statistics.median(full['stall_s']) * 1e3:.0f} ms",
        f"processor time of a save beside a step, copy, look for NaN and checksum, all threads:"
        f" {_processor_s(found['overlapped']) * 1e12 / found['state_bytes']:.0f} ms per GB",
    ]
    if "why_not" in found["dlrover"]:
        lines.append(f"DLRover Flash Checkpoint: not measured, {found['dlrover']['why_not']}")
    return lines


def _cells(middle: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in middle.items())


def table(found: dict[str, Any]) -> list[str]:
    """Lines for people: medians."""
    middle = statistics.median
    gigabytes = found["state_bytes"] / 1e9
    overlapped = found["overlapped"]
    rows = [
        ("Trainwarden, beside the step", overlapped["stall_s"]),
        ("Trainwarden, at once", found["at_once_s"]),
        ("DCP async_save", found["dcp_async_s"]),
        ("torch.save to disk", found["torch_save_s"]),
        ("torch.save to disk, fsync", found["torch_save_fsync_s"]),
    ]
    flash = found["dlrover"]
    if "memory_s" in flash:
        rows.insert(2, ("DLRover Flash Checkpoint", flash["memory_s"]))
    lines = [f"stall of a save of {gigabytes:.3f} GB, median (min to max) of {found['rounds']} rounds, ms"]
    lines += [f"  {name:32} {middle(t) * 1e3:9.1f}   ({min(t) * 1e3:.1f} to {max(t) * 1e3:.1f})" for name, t in rows]
    lines += [f"  {note}" for note in notes(found)]
    lines.append(
        f"  a step beside which a save is copied, one core left idle: {middle(overlapped['step_s']) * 1e3:.0f} ms,"
        f" without: {middle(overlapped['plain_step_s']) * 1e3:.0f} ms"
    )
    lines.append(
        f"replica pushed in {found['replica']['push_s']:.2f} s, held {found['replica']['held_ratio']:.2f} x,"
        f" at most while one arrives {found['replica']['most_ratio']:.2f} x the state"
    )
    return lines
