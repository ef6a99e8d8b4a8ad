"""Runs one method on one series in a process of its own, so that its processor time and memory are its own.

A method's packages are imported (and compiled) once in a process of the method; every series then runs in a fork of that one.
"""

from __future__ import annotations

import multiprocessing as mp
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import numpy as np

from benchmarks.detect.data import Series
from benchmarks.detect.methods.base import F64, Method

FORK = mp.get_context("fork")
CALIBRATION_RATIO = {"nab": 0.5}
CALIBRATION_ELSE = 0.3
CPU_LIMIT_S = 900


@dataclass(frozen=True)
class Task:
    """One series and seed for a method."""

    series: Series
    seed: int


@dataclass(frozen=True)
class Outcome:
    """Scores of the test rows and of the held-back end of the training rows, and what they cost; `error` says why there are none."""

    scores: F64
    calibration: F64
    cpu_s: float = 0.0
    peak_bytes: int = 0
    thinned: int = 1
    error: str = ""


def failed(error: str) -> Outcome:
    """The outcome of a run that gave no scores."""
    return Outcome(np.empty(0), np.empty(0), error=error)


def outcomes(method: type[Method], tasks: list[Task], cpu_limit_s: int = CPU_LIMIT_S) -> Iterator[tuple[Task, Outcome]]:
    """Run the tasks one after the other; yields each as it ends."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=serve, args=(method, tasks, cpu_limit_s, send))
    process.start()
    send.close()
    try:
        yield from received(tasks, receive, process)
    finally:
        process.terminate()
        process.join()


def received(tasks: list[Task], receive: Connection, process: ForkProcess) -> Iterator[tuple[Task, Outcome]]:
    """Outcomes as the method's process sends them; when it dies, the rest has failed."""
    for number, task in enumerate(tasks):
        try:
            yield task, receive.recv()
        except EOFError:
            process.join()
            for left in tasks[number:]:
                yield left, failed(f"the method's process ended with code {process.exitcode} while preparing")
            return


def serve(method: type[Method], tasks: list[Task], cpu_limit_s: int, send: Connection) -> None:
    """In the method's process: prepare once, then fork for each task."""
    before = memory_bytes("VmRSS")
    method.prepare()
    for task in tasks:
        send.send(forked(method, task, cpu_limit_s, before))


def forked(method: type[Method], task: Task, cpu_limit_s: int, before: int) -> Outcome:
    """Run one task in a fork of this process."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=measured, args=(method, task, cpu_limit_s, before, send))
    process.start()
    send.close()
    try:
        outcome: Outcome = receive.recv()
    except EOFError:
        process.join()
        limit = process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        outcome = failed(
            f"used more than {cpu_limit_s} s of processor time" if limit else f"ended with code {process.exitcode}"
        )
    process.join()
    return outcome


def measured(method: type[Method], task: Task, cpu_limit_s: int, before: int, send: Connection) -> None:
    """In the fork: fit and score twice, once for the line and once for the result; only the second is measured."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 5))
    try:
        send.send(both(method, task, before))
    except Exception:  # noqa: BLE001 - whatever a method raises is its result; it is printed and fails the run
        send.send(failed(traceback.format_exc(limit=-4)))


def both(method: type[Method], task: Task, before: int) -> Outcome:
    """Scores for the line (fitted on the first part of the training rows), then the scores that count."""
    train, test = task.series.train, task.series.test
    cut = len(train) - int(len(train) * CALIBRATION_RATIO.get(task.series.set, CALIBRATION_ELSE))
    calibration, _ = fit_and_score(method, task, train[:cut], train[cut:])
    reset_peak()
    started = cpu_seconds()
    scores, thinned = fit_and_score(method, task, train, test)
    cpu_s = cpu_seconds() - started
    peak = memory_bytes("VmHWM") - before + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Outcome(scores, calibration, cpu_s, peak, thinned)


def fit_and_score(method: type[Method], task: Task, train: F64, test: F64) -> tuple[F64, int]:
    """A new object, fitted and asked once; every n-th training row only where the method could not take them all."""
    thin = -(-len(train) // method.most_rows) if method.most_rows else 1
    one = method()
    one.step_s = task.series.step_s
    one.fit(train[::-1][::thin][::-1].copy(), task.seed)
    scores = np.asarray(one.score(test.copy()), np.float64)
    if scores.shape != (len(test),) or not np.isfinite(scores).all():
        raise ValueError(
            f"{method.name} gave scores of shape {scores.shape}, {int((~np.isfinite(scores)).sum())} not finite"
        )
    return scores, thin


def cpu_seconds() -> float:
    """Processor time of this process, its threads and its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def memory_bytes(field: str) -> int:
    """A field of this process's memory, such as VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def reset_peak() -> None:
    """Let VmHWM start again from what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
