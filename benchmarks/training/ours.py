"""Our saves and restores: stall at once and overlapped, memory, local restore, pull from a peer, replica."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from trainwarden_hook import segments
from trainwarden_hook.carriers import SaveReport
from trainwarden_hook.checkpoint import Saver
from trainwarden_hook.copying import address_of
from trainwarden_hook.crew import load
from trainwarden_hook.depot import Depot, Replica
from trainwarden_hook.layout import Layout, stable_paths
from trainwarden_hook.memory import Buffers, Stamp
from trainwarden_hook.offers import look
from trainwarden_hook.packing import HEADER_BYTES, Header, room
from trainwarden_hook.pull import PIECE_BYTES, Reader, Server, receive
from trainwarden_hook.restore import agree

from benchmarks.training.state import Training

WAIT_S = 300.0
NODE = "bench"


class Bench:
    """One rank with buffers of its own; `close` gives the memory back."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.job = f"bench{uuid.uuid4().hex[:6]}"
        self.buffers = Buffers(self.job, NODE, 0)
        self.reports: list[SaveReport] = []
        self.saver = Saver(
            self.buffers,
            None,
            Stamp(1, 0, 0, 0),
            self.reports.append,
            stable=stable_paths(training.model, training.optimizer),
            overlap_from_bytes=0,
        )
        training.optimizer.register_step_pre_hook(lambda *_: self.saver.before_change())

    def close(self) -> None:
        """End threads, remove segments."""
        self.saver.close()
        segments.unlink_all(self.job, NODE)

    def save(self, step: int, at_once: bool) -> float:
        """Seconds that the call takes; the caller waits for the rest."""
        started = time.perf_counter()
        failure = self.saver.save(step, self.training.state(), must=at_once)
        took_s = time.perf_counter() - started
        if failure is not None:
            raise RuntimeError(failure.error)
        return took_s

    def wait(self) -> None:
        """Until all is sealed."""
        if not self.saver.wait_idle(WAIT_S):
            raise RuntimeError(f"a save was not sealed in {WAIT_S:.0f} s")

    def newest(self) -> tuple[Header, memoryview]:
        """Header and payload of the newest save."""
        buffer = max(self.buffers.pair, key=lambda each: each.step)
        header = Header.decode(buffer.open(HEADER_BYTES)[:HEADER_BYTES], buffer.path)
        return header, buffer.payload(header)

    # -- what is measured

    def floor_s(self, rounds: int) -> dict[str, list[float]]:
        """The state's bytes from one place in memory to a prepared segment, by the C library and by `crew`, on one and two threads."""
        size = self.training.size_bytes()
        source, target = room(size), self._floor_segment(size)
        crew = load()
        from_, to = address_of(source), address_of(target)
        ctypes.memset(from_, 1, size)
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(to, from_, size),
            "memcpy by two threads": lambda: _memmove_by_two(to, from_, size),
        }
        if crew is not None:
            ways["ours by one"] = lambda: crew.copy([(to, from_, size)], 1)
            ways["ours by two"] = lambda: crew.copy([(to, from_, size)], 2)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, copy in ways.items():
                started = time.perf_counter()
                copy()
                times[name].append(time.perf_counter() - started)
        return times

    def _floor_segment(self, size: int) -> memoryview:
        buffer = Buffers(f"{self.job}floor", NODE, 0).pair[0]
        buffer.prepare(size)
        view = buffer.open(size)[:size]
        segments.unlink_all(f"{self.job}floor", NODE)
        return view

    def stall_at_once_s(self, rounds: int) -> list[float]:
        """Blocking saves with buffers warm."""
        for step in (1, 2):
            self.save(step, at_once=True)
            self.wait()
        times = []
        for step in range(3, 3 + rounds):
            times.append(self.save(step, at_once=True))
            self.wait()
        return times

    def stall_overlapped(self, rounds: int, spare: int) -> dict[str, list[float]]:
        """Saves beside a step, ``spare`` cores idle: stall seen by the training thread, time and processor time (of all threads, to the
        end of the save) of that step, and of the steps without a save before, between and after them.
        """
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - spare))
        found: dict[str, list[float]] = {name: [] for name in ("stall_s", "step_s", "processor_s")}
        plain, plain_processor = [], []
        for number in range(rounds + 1):
            before_s = time.process_time()
            plain.append(self.training.step())
            plain_processor.append(time.process_time() - before_s)
            if number == rounds:
                break
            before_s = time.process_time()
            self.save(100 + number, at_once=False)
            found["step_s"].append(self.training.step())
            self.wait()
            found["processor_s"].append(time.process_time() - before_s)
            report = self.reports[-1]
            if not report.ok:
                raise RuntimeError(report.error)
            found["stall_s"].append(report.stall_ms / 1e3)
        torch.set_num_threads(os.cpu_count() or 1)
        return {**found, "plain_step_s": plain, "plain_processor_s": plain_processor}

    def overlapped_is_equal(self) -> bool:
        """Whether an overlapped save has every byte of one at once of the same state."""
        self.save(1001, at_once=True)
        self.wait()
        _, payload = self.newest()
        first = bytes(payload)
        self.save(1002, at_once=False)
        self.training.step()
        self.wait()
        return bytes(self.newest()[1]) == first

    def memory_ratio(self) -> float:
        """Bytes of the segments over bytes of the state."""
        held = sum(os.stat(buffer.path).st_blocks * 512 for buffer in self.buffers.pair)
        return held / self.training.size_bytes()

    def restore_local_s(self, rounds: int, state_mb: int) -> list[float]:
        """Find, verify, load into a fresh model and optimizer."""
        times = []
        for _ in range(rounds):
            fresh = Training(state_mb, seed=1)
            started = time.perf_counter()
            held = look(Buffers(self.job, NODE, 0), None, 0, None)
            restored = agree(held, Layout(fresh.model.state_dict(), fresh.optimizer).place)
            if restored is None:
                raise RuntimeError("nothing was restored")
            fresh.model.load_state_dict(restored.state["model"])
            fresh.optimizer.load_state_dict(restored.state["optimizer"])
            times.append(time.perf_counter() - started)
            _check_equal(fresh)
        return times

    def replica(self) -> dict[str, float]:
        """Push to a depot on loopback: seconds, memory held and at most, over the state."""
        depot = Depot("127.0.0.1", f"{self.job}peer", NODE)
        header, payload = self.newest()
        goal = Replica(depot.address, 0)
        watch = _Watch(f"{self.job}peer")
        goal.write(header, payload, lambda: True)
        started = time.perf_counter()
        goal.write(header, payload, lambda: True)
        took_s = time.perf_counter() - started
        most = watch.stop()
        held = sum(os.stat(path).st_blocks * 512 for path in segments.replicas(f"{self.job}peer", NODE))
        depot.close()
        segments.unlink_all(f"{self.job}peer", NODE)
        size = self.training.size_bytes()
        return {"push_s": took_s, "held_ratio": held / size, "most_ratio": most / size}

    def pull(self, rounds: int) -> dict[str, Any]:
        """A peer's save through `pull`, verified, beside the same bytes through a bare socket; seconds, by turns."""
        header, payload = self.newest()
        ours, raw = [], []
        for _ in range(rounds):
            raw.append(_in_child(_raw_server, payload, _raw_pull))
            ours.append(_in_child(_our_server, payload, lambda told, size: _our_pull(told, header)))
        ratios = [bare / pulled for bare, pulled in zip(raw, ours, strict=True)]
        return {"pull_s": ours, "raw_s": raw, "ratio": statistics.median(ratios)}


def _memmove_by_two(to: int, source: int, size: int) -> None:
    half = size // 2
    second = threading.Thread(target=ctypes.memmove, args=(to + half, source + half, size - half))
    second.start()
    ctypes.memmove(to, source, half)
    second.join()


def _check_equal(fresh: Training) -> None:
    if not all(torch.isfinite(value).all() for value in fresh.model.state_dict().values()):
        raise RuntimeError("what was restored is not finite")


class _Watch:
    """The most that a job's replicas take in shared memory."""

    def __init__(self, job: str) -> None:
        self._prefix = segments.prefix(job, NODE)
        self._most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        folder, name = os.path.split(self._prefix)
        while not self._end.wait(0.005):
            here = [os.path.join(folder, each) for each in os.listdir(folder) if each.startswith(name)]
            held = 0
            for path in here:
                try:
                    held += os.stat(path).st_blocks * 512
                except FileNotFoundError:
                    continue
            self._most = max(self._most, held)

    def stop(self) -> int:
        """Bytes."""
        self._end.set()
        self._thread.join()
        return self._most


def _in_child(
    serve: Callable[[Connection, memoryview], None], payload: memoryview, pull: Callable[..., float]
) -> float:
    mine, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, payload))
    child.start()
    try:
        return pull(mine.recv(), len(payload))
    finally:
        mine.send("end")
        child.join(30)


def _our_server(told: Connection, payload: memoryview) -> None:
    with Server([payload], "127.0.0.1") as server:
        told.send(server.address)
        told.recv()


def _our_pull(address: tuple[str, int, str], header: Header) -> float:
    started = time.perf_counter()
    reader = Reader(address)
    target = room(header.payload_bytes)
    if reader.read_summed(0, target) != header.payload_crc:
        raise RuntimeError("what was pulled is corrupt")
    took_s = time.perf_counter() - started
    reader.close()
    return took_s


def _raw_server(told: Connection, payload: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told.send(listening.getsockname())
        connection, _ = listening.accept()
        for start in range(0, len(payload), PIECE_BYTES):
            connection.sendall(payload[start : start + PIECE_BYTES])
        told.recv()
        connection.close()


def _raw_pull(address: tuple[str, int], size: int) -> float:
    started = time.perf_counter()
    with socket.create_connection(address) as connection:
        receive(connection, room(size))
    return time.perf_counter() - started
