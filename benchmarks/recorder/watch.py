"""What a node agent and a central prober would see: `<run>.nodes.csv` four times a second, `<run>.host.csv` once."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import json
import os
import select
import socket
import struct
import threading
import time
from pathlib import Path

from benchmarks.recorder.stage import CLOSED_PORT, SWITCH, Node, Stage
from benchmarks.recorder.trainer import counters
from benchmarks.training.rail_stage import inside

NODE_COLUMNS = (
    "wall", "node", "proc_state", "cpu_s", "nr_throttled", "thr_ms", "link_up", "link_running", "rx_bytes", "tx_bytes",
    "rx_pkts", "tx_pkts", "tcp_retrans", "probe_ms", "ckpt_free_kb",
)  # fmt: skip
HOST_COLUMNS = ("wall", "host_busy", "load1", "cpu_n0", "cpu_n1", "cpu_n2", "cpu_n3")
PERIOD_S, PROBE_S = 0.25, 0.2
SIOCGIFFLAGS, IFF_UP, IFF_RUNNING = 0x8913, 0x1, 0x40
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Two threads until `close`."""

    def __init__(self, stage: Stage, out: Path, run: str) -> None:
        self._stage, self._out, self._run = stage, out, run
        self._stop = threading.Event()
        self._sockets = [
            inside(node.space, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for node in stage.nodes
        ]
        self._threads = [
            threading.Thread(target=self._watch_nodes, daemon=True),
            threading.Thread(target=self._watch_host, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End, with the files whole."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _watch_nodes(self) -> None:
        with (self._out / f"{self._run}.nodes.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(NODE_COLUMNS)
            while not self._stop.wait(PERIOD_S - time.time() % PERIOD_S):
                pids = trainers(self._out / f"{self._run}.events.jsonl")
                probes = inside(SWITCH, lambda: [probe_ms(node.address) for node in self._stage.nodes])
                for node, link, probed in zip(self._stage.nodes, self._sockets, probes, strict=True):
                    table.writerow(node_row(node, link, pids.get(node.number, 0), probed))
                file.flush()

    def _watch_host(self) -> None:
        before, used = busy_s(), [cpu_s(node) for node in self._stage.nodes]
        at_s = time.time()
        with (self._out / f"{self._run}.host.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(HOST_COLUMNS)
            while not self._stop.wait(1.0):
                now_s, now, spent = time.time(), busy_s(), [cpu_s(node) for node in self._stage.nodes]
                share = (now[0] - before[0]) / max(now[1] - before[1], 1e-9)
                cores = [f"{(b - a) / (now_s - at_s):.3f}" for a, b in zip(used, spent, strict=True)]
                table.writerow([f"{now_s:.3f}", f"{share:.3f}", f"{os.getloadavg()[0]:.2f}", *cores])
                file.flush()
                before, used, at_s = now, spent, now_s


def node_row(node: Node, inside_it: socket.socket, pid: int, probed: float) -> list[object]:
    """One node now."""
    state, spent_s = process(pid)
    stat = dict(line.split() for line in node.read("cpu", "cpu.stat").splitlines())
    flags = struct.unpack("16sh", fcntl.ioctl(inside_it, SIOCGIFFLAGS, struct.pack("16sh", b"eth0", 0))[:18])[1]
    holder = str(node.holder.pid) if node.holder is not None else "self"
    received, sent, again = counters(holder)
    packets = packets_of(holder)
    room = os.statvfs(node.saves)
    spent = f"{spent_s:.2f}" if state != "-" else -1
    throttled = (stat["nr_throttled"], int(stat["throttled_time"]) // 1_000_000)
    link = (int(bool(flags & IFF_UP)), int(bool(flags & IFF_RUNNING)))
    free_kb = room.f_bavail * room.f_frsize // 1024
    now = f"{time.time():.3f}"
    return [
        now,
        node.number,
        state,
        spent,
        *throttled,
        *link,
        received,
        sent,
        *packets,
        again,
        f"{probed:.2f}",
        free_kb,
    ]


def trainers(events: Path) -> dict[int, int]:
    """Process of each node's newest trainer."""
    found: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in events.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "proc_start":
                found[int(event["node"])] = int(event["pid"])
    return found


def process(pid: int) -> tuple[str, float]:
    """State and processor seconds; "-" when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "-", -1.0
    return fields[0], (int(fields[11]) + int(fields[12])) / TICKS


def packets_of(pid: str) -> tuple[int, int]:
    """Packets in and out of eth0 in a process's namespace."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "eth0":
            return int(rest.split()[1]), int(rest.split()[9])
    return 0, 0


def probe_ms(address: str) -> float:
    """A TCP connection to a closed port: the time to the refusal, -1 when there is no answer in time."""
    with socket.socket() as one:
        one.setblocking(False)
        began_s = time.perf_counter()
        code = one.connect_ex((address, CLOSED_PORT))
        if code == errno.EINPROGRESS:
            if not select.select([], [one], [], PROBE_S)[1]:
                return -1.0
            code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return 1000 * (time.perf_counter() - began_s) if code in (0, errno.ECONNREFUSED) else -1.0


def busy_s() -> tuple[float, float]:
    """Busy and all processor time of the machine."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS, sum(fields) / TICKS


def cpu_s(node: Node) -> float:
    """Processor time that a node's group has used."""
    return int(node.read("cpuacct", "cpuacct.usage")) / 1e9
