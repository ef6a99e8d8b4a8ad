"""What is done to the job, for real: each fault draws its magnitude, begins, lasts, ends, and says so in a label."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.recorder.delay import QUEUE
from benchmarks.recorder.stage import NODES, SWITCH, Node, Stage, StageError, environment, run
from benchmarks.recorder.watch import process, trainers

Label = dict[str, Any]
MIB = 1 << 20
LASTS_S, APART_S, TOGETHER_S = (15, 40), (12, 25), (0, 6)
GONE_S, RESUMED_S = 30.0, 90.0


class Orders:
    """What the trainers read before each step, by node; two faults may order at the same time."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._told: dict[str, dict[str, object]] = {}

    def give(self, whom: str, orders: dict[str, object]) -> None:
        with self._lock:
            self._told[whom] = orders
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._told))
            part.replace(self._path)


@dataclass
class Scene:
    """What a fault works with."""

    stage: Stage
    out: Path
    run: str
    node: Node
    rng: random.Random
    orders: Orders
    wait: Callable[[float], None] = time.sleep
    labels: list[Label] = field(default_factory=list)

    @property
    def trainer(self) -> int:
        """Process of the node's newest trainer."""
        return trainers(self.out / f"{self.run}.events.jsonl")[self.node.number]

    def begin(self, kind: str, nodes: list[int] | None = None, **more: object) -> Label:
        """Note a fault from now on; it lasts to the end of the recording unless it is given an end."""
        label: Label = {
            "kind": kind,
            "nodes": [self.node.number] if nodes is None else nodes,
            "start": round(time.time(), 3),
        } | more
        self.labels.append(label)
        return label

    @contextmanager
    def label(self, kind: str, nodes: list[int] | None = None, **more: object) -> Iterator[Label]:
        """Note a fault from here to the end of the block."""
        label = self.begin(kind, nodes, **more)
        yield label
        label["end"] = round(time.time(), 3)

    def close(self) -> list[Label]:
        """All labels by their starts, at the end of the recording."""
        now = round(time.time(), 3)
        ended = [label | {"end": label.get("end", now)} for label in self.labels]
        return sorted(ended, key=lambda label: float(label["start"]))

    def last(self) -> None:
        """As long as a fault lasts."""
        self.wait(self.rng.uniform(*LASTS_S))

    def between(self, low: float, high: float) -> float:
        """A magnitude; as likely in the lower half as in the upper one, of its logarithm."""
        return math.exp(self.rng.uniform(math.log(low), math.log(high)))

    def order(self, **orders: object) -> None:
        """What the trainer of the node is to do from its next step on; nothing: as always."""
        self.orders.give(str(self.node.number), orders)

    def order_all(self, **orders: object) -> None:
        """The same for every node."""
        self.orders.give("all", orders)


@dataclass(frozen=True)
class Plan:
    """Faults of one run: at the same time, each on a node of its own, or one of them several times on the same node."""

    spec: str
    faults: tuple[str, ...]
    times: int = 1

    @classmethod
    def read(cls, spec: str) -> Plan:
        """`a`, `a+b` (at the same time, on two nodes) or `a:2` (twice, on the same node); `ValueError` for what is none of these."""
        body, colon, times = spec.partition(":")
        faults = tuple(body.split("+"))
        if unknown := [name for name in faults if name not in FAULTS]:
            raise ValueError(f"no fault is called {unknown[0]!r}: known are {', '.join(FAULTS)}")
        if (colon and not (times.isdecimal() and int(times))) or len(faults) > NODES:
            raise ValueError(f"{spec!r}: expected a fault, up to {NODES} with + between, or fault:TIMES")
        return cls(spec, faults, int(times or 1))

    @property
    def name(self) -> str:
        """For files."""
        return "_and_".join(self.faults) + (f"_{self.times}times" if self.times > 1 else "")


def perform(plan: Plan, scene: Scene) -> None:
    """Do all of a plan, to its end."""
    nodes = scene.rng.sample(scene.stage.nodes, len(plan.faults))
    over = threading.Event()

    def wait(seconds: float) -> None:
        if over.wait(seconds):
            raise StageError("the recording ended before the fault did")

    scenes = [replace(scene, node=node, rng=random.Random(scene.rng.random()), wait=wait) for node in nodes]
    with ThreadPoolExecutor(len(nodes)) as pool:
        try:
            done, _ = wait_for(
                [pool.submit(_several, plan, *pair) for pair in enumerate(scenes)], return_when=FIRST_EXCEPTION
            )
        finally:
            over.set()
        for one in done:
            one.result()


def _several(plan: Plan, number: int, scene: Scene) -> None:
    if number:
        scene.wait(scene.rng.uniform(*TOGETHER_S))
    for turn in range(plan.times):
        if turn:
            scene.wait(scene.rng.uniform(*APART_S))
        FAULTS[plan.faults[number]](scene)


def quota(scene: Scene, kind: str, share: float, period_ms: int) -> None:
    """A bound on the node's processor time."""
    scene.node.set("cpu", "cpu.cfs_period_us", str(1000 * period_ms))
    with scene.label(kind, quota=f"{100 * share:.0f}% of one core, {period_ms} ms period"):
        scene.node.set("cpu", "cpu.cfs_quota_us", str(round(1000 * period_ms * share)))
        scene.last()
        scene.node.set("cpu", "cpu.cfs_quota_us", "-1")


def cpu_throttle(scene: Scene) -> None:
    quota(scene, "cpu_throttle", scene.between(0.05, 0.17), 100)


def cpu_throttle_mild(scene: Scene) -> None:
    quota(scene, "cpu_throttle_mild", scene.rng.uniform(0.40, 0.60), 20)


def sigstop(scene: Scene) -> None:
    with scene.label("sigstop"):
        pid = scene.trainer
        os.kill(pid, signal.SIGSTOP)
        scene.wait(scene.between(4, 20))
        os.kill(pid, signal.SIGCONT)


def kill9(scene: Scene) -> None:
    with scene.label("kill9"), _resumes(scene):
        os.kill(scene.trainer, signal.SIGKILL)


def exits(scene: Scene) -> None:
    """The label begins when the process is gone: an interpreter with torch in it takes seconds to end where others need the processor."""
    pid, began_s = scene.trainer, time.monotonic()
    scene.order(exit=1)
    _until(scene, lambda: process(pid)[0] in "-Z", GONE_S, "the end of the trainer that was told to exit")
    took_s = time.monotonic() - began_s
    note = f"the trainer ended by itself with code 1, {took_s:.1f} s after it was told to"
    with scene.label("kill9", note=note), _resumes(scene):
        scene.order()


def oom_kill(scene: Scene) -> None:
    """A trainer that grows beyond what its node's group may have."""
    pid = scene.trainer
    # the trainer and not its launcher, which is of about its size
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    scene.node.set("memory", "memory.limit_in_bytes", str(_used_bytes(scene.node) + 64 * MIB))
    scene.order(leak_mib=32)
    _until(scene, lambda: process(pid)[0] in "-Z", GONE_S, "the kernel's end of the trainer")
    with (
        scene.label("kill9", note="the trainer grew until the kernel took it: its group was out of memory"),
        _resumes(scene),
    ):
        scene.order()
        scene.node.set("memory", "memory.limit_in_bytes", "-1")


def memory_pressure(scene: Scene) -> None:
    """Whoever needs a page on the node has to reclaim one first: something beside the job reads more files than its group has room for."""
    room, readers = scene.rng.randrange(24, 48), scene.rng.choice((1, 2))
    cold = scene.node.folder / "cold.bin"
    with cold.open("wb") as file:
        file.truncate(2048 * MIB)
    note = f"{readers} readers of a cold file at the limit of the group's memory ({room} MiB above what it uses)"
    with scene.label("memory_pressure", note=note):
        scene.node.set("memory", "memory.limit_in_bytes", str(_used_bytes(scene.node) + room * MIB))
        started = [scene.node.start(["sh", "-c", f"while :; do cat {cold} > /dev/null; done"]) for _ in range(readers)]
        scene.last()
        _end(started)
        scene.node.set("memory", "memory.limit_in_bytes", "-1")


def cpu_hog(scene: Scene) -> None:
    with scene.label("cpu_hog", note="busy loops in the node's group; all nodes share the machine's cores"):
        hogs = [scene.node.start(["sh", "-c", "while :; do :; done"]) for _ in range(scene.rng.choice((3, 4, 5, 6)))]
        scene.last()
        _end(hogs)


def net_rate(scene: Scene) -> None:
    mbit = round(scene.between(15, 150))
    with scene.label("net_rate_limit", rate=f"{mbit} Mbit/s egress"):
        _tbf(scene.node.space, "eth0", mbit)
        scene.last()
        _no_tbf(scene.node.space, "eth0")


def fabric_slow(scene: Scene) -> None:
    mbit = round(scene.between(20, 120))
    with scene.label("fabric_slow", [], note=f"every switch port limited to {mbit} Mbit/s"):
        for node in scene.stage.nodes:
            _tbf(SWITCH, node.port, mbit)
        scene.last()
        for node in scene.stage.nodes:
            _no_tbf(SWITCH, node.port)


def net_loss(scene: Scene) -> None:
    ratio = scene.between(0.015, 0.08)
    with scene.label("net_loss", loss=f"{100 * ratio:.1f}% each way"), _loss(scene.node, ratio):
        scene.last()


def fabric_loss(scene: Scene) -> None:
    ratio = scene.between(0.008, 0.04)
    with (
        scene.label("fabric_slow", [], note=f"every node loses {100 * ratio:.1f}% each way"),
        contextlib.ExitStack() as stack,
    ):
        for node in scene.stage.nodes:
            stack.enter_context(_loss(node, ratio))
        scene.last()


def net_delay(scene: Scene) -> None:
    ms = scene.between(5, 40)
    delay = f"{ms:.0f}+-{0.2 * ms:.0f} ms egress"
    with ready_to_hold([scene.node], ms, scene.rng), scene.label("net_delay", delay=delay), held([scene.node]):
        scene.last()


def fabric_delay(scene: Scene) -> None:
    ms = scene.between(3, 20)
    nodes, note = scene.stage.nodes, f"what any node sends comes {ms:.0f}+-{0.2 * ms:.0f} ms later"
    with ready_to_hold(nodes, ms, scene.rng), scene.label("fabric_slow", [], note=note), held(nodes):
        scene.last()


def link_down(scene: Scene) -> None:
    with scene.label("link_down"):
        run("ip", "-n", scene.node.space, "link", "set", "eth0", "down")
        scene.wait(scene.between(4, 14))
        run("ip", "-n", scene.node.space, "link", "set", "eth0", "up")


def link_flap(scene: Scene) -> None:
    for _ in range(scene.rng.randrange(3, 8)):
        with scene.label("link_flap", side="switch port"):
            run("ip", "-n", SWITCH, "link", "set", scene.node.port, "down")
            scene.wait(scene.between(0.4, 1.5))
            run("ip", "-n", SWITCH, "link", "set", scene.node.port, "up")
        scene.wait(scene.rng.uniform(3.0, 8.0))


def slow_loader(scene: Scene) -> None:
    kib = round(scene.between(120, 450))
    device = os.stat(scene.node.data).st_dev
    where = f"{os.major(device)}:{os.minor(device)}"
    with scene.label("slow_loader", rate=f"{kib} KiB/s"):
        scene.node.set("blkio", "blkio.throttle.read_bps_device", f"{where} {1024 * kib}")
        scene.last()
        scene.node.set("blkio", "blkio.throttle.read_bps_device", f"{where} 0")


def slow_loader_intermittent(scene: Scene) -> None:
    bursts, sleep_s = scene.rng.randrange(5, 10), scene.between(0.09, 0.3)
    with scene.label(
        "slow_loader_intermittent", note=f"{bursts} bursts of 1 s every 4 s, {1000 * sleep_s:.0f} ms in the loader"
    ):
        for _ in range(bursts):
            scene.order(loader_s=sleep_s)
            scene.wait(1.0)
            scene.order()
            scene.wait(3.0)


def slow_compute(scene: Scene) -> None:
    times = scene.between(1.4, 4.0)
    with scene.label("slow_compute", note=f"device time {times:.2f} times"):
        scene.order(compute_times=times)
        scene.last()
        scene.order()


def bigger_batch(scene: Scene) -> None:
    times = scene.between(1.3, 2.5)
    with scene.label("all_slow", [], note=f"every rank's device time is {times:.2f} times as long: nobody is bad"):
        scene.order_all(compute_times=times)
        scene.last()
        scene.order_all()


def slow_save(scene: Scene) -> None:
    save_s = scene.between(1.0, 5.0)
    with scene.label("slow_save", note=f"each save of the node takes {save_s:.1f} s longer"):
        scene.order(save_s=save_s)
        scene.wait(scene.rng.uniform(25, 40))
        scene.order()


def disk_full(scene: Scene) -> None:
    with scene.label("disk_full"):
        filler = scene.node.start(
            ["sh", "-c", f"while :; do cat /dev/zero >> {scene.node.saves}/filler 2>/dev/null; sleep 0.05; done"]
        )
        scene.wait(scene.rng.uniform(20, 40))
        _end([filler])
        (scene.node.saves / "filler").unlink(missing_ok=True)


def nan_grad(scene: Scene) -> None:
    with scene.label("nan_grad"):
        scene.order(nan=True)
        scene.wait(scene.between(1, 10))
        scene.order()


def sdc_bitflip(scene: Scene) -> None:
    """It has no end: nothing makes the replicas the same again."""
    bit = scene.rng.randrange(20, 30)
    scene.begin("sdc_bitflip", note=f"weight bit {bit} flipped once: the replicas differ from then on")
    scene.order(flip_bit=bit)
    scene.last()
    scene.order()


def pauses(scene: Scene) -> None:
    """A rank that stands for a moment now and then, as in a full collection of garbage: too little to isolate anybody for."""
    pause_s, every = scene.rng.uniform(0.03, 0.08), scene.rng.randrange(40, 80)
    with scene.label("pauses", note=f"{1000 * pause_s:.0f} ms every {every} steps"):
        scene.order(pause_s=pause_s, pause_every=every)
        scene.last()
        scene.order()


def clean(scene: Scene) -> None:
    scene.wait(40.0)


FAULTS: dict[str, Callable[[Scene], None]] = {
    made.__name__: made
    for made in (
        sigstop, cpu_throttle, cpu_throttle_mild, cpu_hog, net_rate, net_loss, net_delay, link_down, link_flap, kill9, exits, oom_kill,
        memory_pressure, slow_loader, slow_loader_intermittent, slow_compute, bigger_batch, slow_save, disk_full, nan_grad, sdc_bitflip,
        fabric_slow, fabric_loss, fabric_delay, pauses, clean,
    )
}  # fmt: skip
SEVERAL = ("cpu_throttle+slow_loader", "net_delay+disk_full", "slow_compute:2", "net_rate:2")
"""Of more than one fault: what `all` records beside each alone."""


def _tbf(space: str, device: str, mbit: int) -> None:
    run(
        "tc",
        "-n",
        space,
        "qdisc",
        "add",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        "32kbit",
        "latency",
        "400ms",
    )


def _no_tbf(space: str, device: str) -> None:
    run("tc", "-n", space, "qdisc", "del", "dev", device, "root")


@contextmanager
def _loss(node: Node, ratio: float) -> Iterator[None]:
    rule = ["-m", "statistic", "--mode", "random", "--probability", f"{ratio:.4f}", "-j", "DROP"]
    chains = [("INPUT", "-i"), ("OUTPUT", "-o")]
    for chain, way in chains:
        run(*node.command("iptables", "-A", chain, way, "eth0", *rule))
    try:
        yield
    finally:
        for chain, way in chains:
            run(*node.command("iptables", "-D", chain, way, "eth0", *rule))


@contextmanager
def ready_to_hold(nodes: Sequence[Node], ms: float, rng: random.Random) -> Iterator[None]:
    """A process for each node that holds back what reaches the queue; nothing does yet."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.enter_context(_delayer(node, ms, 0.2 * ms, rng.randrange(1 << 30)))
        yield


@contextmanager
def _delayer(node: Node, ms: float, jitter_ms: float, seed: int) -> Iterator[None]:
    words = ["--ms", f"{ms:.3f}", "--jitter-ms", f"{jitter_ms:.3f}", "--seed", str(seed)]
    command = node.command(sys.executable, "-m", "benchmarks.recorder.delay", *words)
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        if child.stdout is not None and child.stdout.readline().strip() == "ready":
            yield
        said = child.communicate()[1].strip().splitlines()[-1:]
    if child.returncode or said:
        raise StageError(
            f"what holds back packets of node {node.number} ended with {child.returncode}: {''.join(said)}"
        )


@contextmanager
def held(nodes: Sequence[Node]) -> Iterator[None]:
    """All that nodes send goes through the queue."""
    rule = ["OUTPUT", "-o", "eth0", "-j", "NFQUEUE", "--queue-num", str(QUEUE)]
    with contextlib.ExitStack() as stack:
        for node in nodes:
            run(*node.command("iptables", "-A", *rule))
            stack.callback(run, *node.command("iptables", "-D", *rule))
        yield


@contextmanager
def _resumes(scene: Scene) -> Iterator[None]:
    """At the end, until every rank of the next attempt has begun a step."""
    before, ranks = _count(scene, "first_step"), len(scene.stage.nodes)
    yield
    _until(
        scene,
        lambda: _count(scene, "first_step") >= before + ranks,
        RESUMED_S,
        "the first step of every rank after a restart",
    )


def _used_bytes(node: Node) -> int:
    return int(node.read("memory", "memory.usage_in_bytes"))


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _count(scene: Scene, kind: str) -> int:
    lines = (scene.out / f"{scene.run}.events.jsonl").read_text().splitlines()
    return sum(event["kind"] == kind for event in map(json.loads, lines))


def _until(scene: Scene, holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline_s:
            raise StageError(f"{what} did not come within {seconds:g} s")
        scene.wait(0.05)
