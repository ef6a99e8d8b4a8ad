"""Nodes in network namespaces on two real rails, and what can go wrong with these.

A namespace of its own is the switch: one bridge per rail, one port per node. Names begin with `PREFIX`: what a killed run left is
removed at the next start, and at once by a guard that notices our end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")
PREFIX = "twl-"
SWITCH = f"{PREFIX}switch"
LOCK = Path("/tmp/trainwarden-rail-stage.lock")
RAILS = ("a", "b")
CLONE_NEWNET = 0x40000000
BPF_RANDOM = 0xFFFFF038
GUARD = """
import os, subprocess, sys
sys.stdin.buffer.read()
from benchmarks.training.rail_stage import remove_all
remove_all()
"""


def run_ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def remove_all() -> None:
    """End the processes in our namespaces and remove these; nothing else is looked at."""
    spaces = [path.name for path in Path("/run/netns").glob(f"{PREFIX}*")]
    for space in spaces:
        listed = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True).stdout
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for space in spaces:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


class Hand:
    """A running `ip -batch`: a fault begins when the line is written, not after a process start or when a busy machine has time."""

    def __init__(self, space: str) -> None:
        self._process = subprocess.Popen(
            ["chrt", "--rr", "20", "ip", "-n", space, "-force", "-batch", "-"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def do(self, line: str) -> int:
        """Wall clock, nanoseconds, just before."""
        pipe: IO[bytes] | None = self._process.stdin
        if pipe is None:
            raise RuntimeError("ip has no standard input")
        at_ns = time.time_ns()
        pipe.write(line.encode() + b"\n")
        pipe.flush()
        return at_ns

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


class Stage:
    """`count` nodes n0, n1, ... with addresses 10.78.0.1x on `lb0`, 10.77.1.1x on rail a (eth0) and 10.77.2.1x on rail b (eth1)."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self._lock = LOCK.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        remove_all()
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True, cwd=Path(__file__).parents[2]
        )
        self._hands: dict[str, Hand] = {}
        try:
            self._build()
            for space in (SWITCH, *map(self.space, range(count))):
                self.hand(space)
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        run_ip("netns", "add", SWITCH)
        for rail in RAILS:
            run_ip("-n", SWITCH, "link", "add", f"sw{rail}", "type", "bridge")
            run_ip("-n", SWITCH, "link", "set", f"sw{rail}", "up")
        run_ip("-n", SWITCH, "link", "add", "sink", "type", "veth", "peer", "name", "drain")
        for end in ("sink", "drain"):
            run_ip("-n", SWITCH, "link", "set", end, "up")
        for number in range(len(self.names)):
            self._build_node(number)

    def _build_node(self, number: int) -> None:
        space = self.space(number)
        run_ip("netns", "add", space)
        run_ip("-n", space, "link", "set", "lo", "up")
        run_ip("-n", space, "link", "add", "lb0", "type", "bridge")
        run_ip("-n", space, "addr", "add", f"{self.address(number)}/32", "dev", "lb0")
        run_ip("-n", space, "link", "set", "lb0", "up")
        for place, rail in enumerate(RAILS):
            port, inner = self.port(number, rail), f"eth{place}"
            run_ip("link", "add", port, "netns", SWITCH, "type", "veth", "peer", "name", inner, "netns", space)
            run_ip("-n", SWITCH, "link", "set", port, "master", f"sw{rail}", "up")
            run_ip("-n", space, "addr", "add", f"{self.on(number, rail)}/24", "dev", inner)
            run_ip("-n", space, "link", "set", inner, "up")

    def space(self, number: int) -> str:
        return f"{PREFIX}n{number}"

    def port(self, number: int, rail: str) -> str:
        return f"{rail}{number}"

    def address(self, number: int) -> str:
        return f"10.78.0.{10 + number}"

    def on(self, number: int, rail: str) -> str:
        return f"10.77.{1 + RAILS.index(rail)}.{10 + number}"

    def enter(self, number: int, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.space(number), *command]

    def links_file(self, path: Path, **settings: object) -> Path:
        """A links file for all nodes; settings as in it."""
        lines = [f"{key} = {str(value).lower()}" for key, value in settings.items()]
        lines += ["[rails]", 'a = "eth0"', 'b = "eth1"']
        for number, name in enumerate(self.names):
            lines += [f"[nodes.{name}]", f'address = "{self.address(number)}"']
            lines += [f'{rail} = "{self.on(number, rail)}"' for rail in RAILS]
        path.write_text("\n".join(lines) + "\n")
        return path

    # -- faults; each gives the wall clock at which it began

    def hand(self, space: str) -> Hand:
        if space not in self._hands:
            self._hands[space] = Hand(space)
        return self._hands[space]

    def set_link(self, number: int, rail: str, state: str) -> int:
        """`ip link set eth0 down` on the node itself: the kernel drops its routes."""
        return self.hand(self.space(number)).do(f"link set eth{RAILS.index(rail)} {state}")

    def set_port(self, number: int, rail: str, state: str) -> int:
        """The switch's end of the cable: the node loses its carrier and keeps its routes."""
        return self.hand(SWITCH).do(f"link set {self.port(number, rail)} {state}")

    def block(self, number: int, rail: str, on: bool) -> int:
        """The switch forwards nothing from or to the node, and its carrier stays."""
        at_ns = time.time_ns()
        port = self.port(number, rail)
        subprocess.run(["bridge", "-n", SWITCH, "link", "set", "dev", port, "state", "0" if on else "3"], check=True)
        return at_ns

    def lose(self, number: int, rail: str, ratio: float) -> int:
        """Share of the packets *from* the node that vanish; 1 = one direction dead, 0 = well again."""
        at_ns = time.time_ns()
        port = self.port(number, rail)
        tc = ["tc", "-n", SWITCH]
        subprocess.run([*tc, "qdisc", "del", "dev", port, "ingress"], check=False, capture_output=True)
        if ratio > 0:
            above = min(0xFFFFFFFF, int(ratio * 2**32))
            program = f"4,32 0 0 {BPF_RANDOM},53 1 0 {above},6 0 0 4294967295,6 0 0 0"
            subprocess.run([*tc, "qdisc", "add", "dev", port, "ingress"], check=True)
            subprocess.run(
                [*tc, "filter", "add", "dev", port, "ingress", "protocol", "all", "bpf", "bytecode", program,
                 "action", "mirred", "egress", "redirect", "dev", "sink"],
                check=True,
            )  # fmt: skip
        return at_ns

    def inside(self, number: int, work: Callable[[], T]) -> T:
        """Run `work` in a node's namespace, on a thread of its own."""
        return inside(self.space(number), work)

    def close(self) -> None:
        for hand in self._hands.values():
            hand.close()
        remove_all()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait(30)
        self._lock.close()


def inside(space: str, work: Callable[[], T]) -> T:
    """What `work` gives, run by a thread that has entered the namespace."""
    import ctypes

    found: list[T] = []
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{space}", "rb") as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"the namespace {space} cannot be entered")
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


@contextlib.contextmanager
def stage(count: int) -> Iterator[Stage]:
    """A stage, removed at the end."""
    made = Stage(count)
    try:
        yield made
    finally:
        made.close()
