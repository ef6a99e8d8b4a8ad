"""What is done to the job, for real: each fault draws its magnitude, begins, lasts, ends, and says so in a label."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.recorder.stage import SWITCH, Node, Stage, run
from benchmarks.recorder.watch import trainers

Label = dict[str, Any]


@dataclass
class Scene:
    """What a fault works with."""

    stage: Stage
    out: Path
    run: str
    node: Node
    rng: random.Random
    wait: Callable[[float], None] = time.sleep
    labels: list[Label] = field(default_factory=list)

    @property
    def trainer(self) -> int:
        """Process of the node's newest trainer."""
        return trainers(self.out / f"{self.run}.events.jsonl")[self.node.number]

    @contextmanager
    def label(self, kind: str, nodes: list[int] | None = None, **more: object) -> Iterator[Label]:
        """Note a fault from here to the end of the block."""
        label: Label = {
            "kind": kind,
            "nodes": [self.node.number] if nodes is None else nodes,
            "start": round(time.time(), 3),
        } | more
        self.labels.append(label)
        yield label
        label["end"] = round(time.time(), 3)

    def order(self, **orders: object) -> None:
        """What the trainer of the node is to do from its next step on; nothing: as always."""
        self.order_for(str(self.node.number), **orders)

    def order_for(self, whom: str, **orders: object) -> None:
        """The same for a node by number, or "all"."""
        path = self.out / "orders.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({whom: orders}))
        part.replace(path)


def quota(scene: Scene, kind: str, share: float, period_ms: int) -> None:
    """A bound on the node's processor time."""
    scene.node.set("cpu", "cpu.cfs_period_us", str(1000 * period_ms))
    with scene.label(kind, quota=f"{100 * share:.0f}% of one core, {period_ms} ms period"):
        scene.node.set("cpu", "cpu.cfs_quota_us", str(round(1000 * period_ms * share)))
        scene.wait(scene.rng.uniform(20, 35))
        scene.node.set("cpu", "cpu.cfs_quota_us", "-1")


def cpu_throttle(scene: Scene) -> None:
    quota(scene, "cpu_throttle", scene.rng.uniform(0.07, 0.16), 100)


def cpu_throttle_mild(scene: Scene) -> None:
    quota(scene, "cpu_throttle_mild", scene.rng.uniform(0.40, 0.50), 20)


def sigstop(scene: Scene) -> None:
    with scene.label("sigstop"):
        pid = scene.trainer
        os.kill(pid, signal.SIGSTOP)
        scene.wait(scene.rng.uniform(4, 10))
        os.kill(pid, signal.SIGCONT)


def kill9(scene: Scene) -> None:
    with scene.label("kill9"):
        before = len(_events(scene, "resumed"))
        os.kill(scene.trainer, signal.SIGKILL)
        _until(lambda: len(_events(scene, "resumed")) > before, 60)


def exits(scene: Scene) -> None:
    with scene.label("kill9", note="the trainer ended by itself with code 1"):
        before = len(_events(scene, "resumed"))
        scene.order(exit=1)
        scene.wait(1.0)
        scene.order()
        _until(lambda: len(_events(scene, "resumed")) > before, 60)


def cpu_hog(scene: Scene) -> None:
    with scene.label("cpu_hog", note="busy loops in the node's group; all nodes share the machine's cores"):
        hogs = [scene.node.start(["sh", "-c", "while :; do :; done"]) for _ in range(scene.rng.choice((3, 4)))]
        scene.wait(scene.rng.uniform(25, 35))
        _end(hogs)


def net_rate(scene: Scene) -> None:
    mbit = scene.rng.randrange(25, 60)
    with scene.label("net_rate_limit", rate=f"{mbit} Mbit/s egress"):
        _tbf(scene.node.space, "eth0", mbit)
        scene.wait(scene.rng.uniform(20, 35))
        _no_tbf(scene.node.space, "eth0")


def fabric_slow(scene: Scene) -> None:
    mbit = scene.rng.randrange(45, 75)
    with scene.label("fabric_slow", [], note=f"every switch port limited to {mbit} Mbit/s"):
        for node in scene.stage.nodes:
            _tbf(SWITCH, node.port, mbit)
        scene.wait(scene.rng.uniform(20, 35))
        for node in scene.stage.nodes:
            _no_tbf(SWITCH, node.port)


def net_loss(scene: Scene) -> None:
    ratio = scene.rng.uniform(0.02, 0.05)
    with scene.label("net_loss", loss=f"{100 * ratio:.1f}% each way"), _loss(scene.node, ratio):
        scene.wait(scene.rng.uniform(20, 35))


def fabric_loss(scene: Scene) -> None:
    ratio = scene.rng.uniform(0.01, 0.02)
    with (
        scene.label("fabric_slow", [], note=f"every node loses {100 * ratio:.1f}% each way"),
        contextlib.ExitStack() as stack,
    ):
        for node in scene.stage.nodes:
            stack.enter_context(_loss(node, ratio))
        scene.wait(scene.rng.uniform(20, 35))


def link_down(scene: Scene) -> None:
    with scene.label("link_down"):
        run("ip", "-n", scene.node.space, "link", "set", "eth0", "down")
        scene.wait(scene.rng.uniform(6, 14))
        run("ip", "-n", scene.node.space, "link", "set", "eth0", "up")


def link_flap(scene: Scene) -> None:
    for _ in range(scene.rng.randrange(3, 7)):
        with scene.label("link_flap", side="switch port"):
            run("ip", "-n", SWITCH, "link", "set", scene.node.port, "down")
            scene.wait(scene.rng.uniform(0.4, 0.9))
            run("ip", "-n", SWITCH, "link", "set", scene.node.port, "up")
        scene.wait(scene.rng.uniform(3.5, 6.0))


def slow_loader(scene: Scene) -> None:
    kib = scene.rng.randrange(200, 420)
    device = os.stat(scene.node.data).st_dev
    where = f"{os.major(device)}:{os.minor(device)}"
    with scene.label("slow_loader", rate=f"{kib} KiB/s"):
        scene.node.set("blkio", "blkio.throttle.read_bps_device", f"{where} {1024 * kib}")
        scene.wait(scene.rng.uniform(20, 35))
        scene.node.set("blkio", "blkio.throttle.read_bps_device", f"{where} 0")


def slow_loader_intermittent(scene: Scene) -> None:
    bursts, sleep_s = scene.rng.randrange(6, 10), scene.rng.uniform(0.1, 0.2)
    with scene.label(
        "slow_loader_intermittent", note=f"{bursts} bursts of 1 s every 4 s, {1000 * sleep_s:.0f} ms in the loader"
    ):
        for _ in range(bursts):
            scene.order(loader_s=sleep_s)
            scene.wait(1.0)
            scene.order()
            scene.wait(3.0)


def slow_compute(scene: Scene) -> None:
    times = scene.rng.uniform(1.4, 2.0)
    with scene.label("slow_compute", note=f"device time {times:.2f} times"):
        scene.order(compute_times=times)
        scene.wait(scene.rng.uniform(20, 35))
        scene.order()


def bigger_batch(scene: Scene) -> None:
    with scene.label("all_slow", [], note="every rank's device time is 1.5 times as long: nobody is bad"):
        scene.order_for("all", compute_times=1.5)
        scene.wait(scene.rng.uniform(25, 35))
        scene.order_for("all")


def slow_save(scene: Scene) -> None:
    with scene.label("slow_save", note="each save of the node takes 2 s longer"):
        scene.order(save_s=2.0)
        scene.wait(scene.rng.uniform(25, 35))
        scene.order()


def disk_full(scene: Scene) -> None:
    with scene.label("disk_full"):
        filler = scene.node.start(
            ["sh", "-c", f"while :; do cat /dev/zero >> {scene.node.saves}/filler 2>/dev/null; sleep 0.05; done"]
        )
        scene.wait(scene.rng.uniform(20, 35))
        _end([filler])
        (scene.node.saves / "filler").unlink(missing_ok=True)


def nan_grad(scene: Scene) -> None:
    with scene.label("nan_grad"):
        scene.order(nan=True)
        scene.wait(scene.rng.uniform(4, 9))
        scene.order()


def sdc_bitflip(scene: Scene) -> None:
    bit = scene.rng.choice((26, 27, 28, 29))
    with scene.label("sdc_bitflip", note=f"weight bit {bit} flipped once: the replicas differ from then on"):
        scene.order(flip_bit=bit)
        scene.wait(35.0)


def pauses(scene: Scene) -> None:
    """A rank that stands for a moment now and then, as in a full collection of garbage: too little to isolate anybody for."""
    with scene.label("pauses", note="60 ms every 40 steps"):
        scene.order(pause_s=0.06, pause_every=40)
        scene.wait(scene.rng.uniform(25, 35))
        scene.order()


def clean(scene: Scene) -> None:
    scene.wait(40.0)


FAULTS: dict[str, Callable[[Scene], None]] = {
    made.__name__: made
    for made in (
        sigstop, cpu_throttle, cpu_throttle_mild, cpu_hog, net_rate, net_loss, link_down, link_flap, kill9, exits, slow_loader,
        slow_loader_intermittent, slow_compute, bigger_batch, slow_save, disk_full, nan_grad, sdc_bitflip,
        fabric_slow, fabric_loss, pauses, clean,
    )
}  # fmt: skip


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


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _events(scene: Scene, kind: str) -> list[Label]:
    lines = (scene.out / f"{scene.run}.events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def _until(holds: Callable[[], bool], seconds: float) -> None:
    deadline_s = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.1)
