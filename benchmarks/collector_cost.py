"""What one collector costs: share of a core and memory (summed PSS) of the real agent with all sources against a real broker.

    python benchmarks/collector_cost.py [--seconds 60] [--command trainwarden]

A broker, three probed peers, a log file that grows, and a fake trainer of four ranks that sends 16 step datagrams a second surround
the agent; only the agent is measured. Prints JSON; exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from collectors import echo
from trainwarden.embedded.ports import free_port
from trainwarden.embedded.tansu import TansuBroker

CPU_BAR_RATIO = 0.01
PSS_BAR_BYTES = 60e6
RANKS = 4
WARM_UP_S = 8.0
PEERS = 3

DIRECT = "import sys, pathlib; from collectors.agent import run; from trainwarden.config import load; run(load(pathlib.Path(sys.argv[1])))"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--command", choices=("direct", "trainwarden"), default="direct", help="how the agent is started"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-cost-") as folder:
        figures = measure(Path(folder), given.seconds, given.command)
    print(json.dumps(figures, indent=2))
    return 0 if figures["cpu_ok"] and figures["pss_ok"] else 1


def measure(directory: Path, seconds: float, command: str) -> dict[str, object]:
    """Figures of one run."""
    broker = TansuBroker(directory / "broker.log")
    broker.start()
    stop = threading.Event()
    peers = {f"n{i + 1}": free_port() for i in range(PEERS)}
    config = write_config(directory, f"kafka://{broker.bootstrap}", peers)
    agent = subprocess.Popen(agent_command(command, config), stdout=subprocess.DEVNULL)
    threads = [threading.Thread(target=surround, args=(directory, stop, peers))]
    try:
        for thread in threads:
            thread.start()
        time.sleep(WARM_UP_S)
        before = cpu_s(agent.pid)
        started = time.monotonic()
        time.sleep(seconds)
        elapsed_s = time.monotonic() - started
        used_s = cpu_s(agent.pid) - before
        pss_bytes = summed_pss_bytes(agent.pid)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        agent.terminate()
        agent.wait(10)
        broker.stop()
    share = used_s / elapsed_s
    return {
        "seconds": round(elapsed_s, 1),
        "started_by": command,
        "cpu_core_ratio": round(share, 5),
        "cpu_bar_ratio": CPU_BAR_RATIO,
        "cpu_ok": share < CPU_BAR_RATIO,
        "pss_bytes": pss_bytes,
        "pss_bar_bytes": int(PSS_BAR_BYTES),
        "pss_ok": pss_bytes < PSS_BAR_BYTES,
    }


def agent_command(command: str, config: Path) -> list[str]:
    """Command line of the agent."""
    if command == "trainwarden":
        return [str(Path(sys.executable).with_name("trainwarden")), "collect", "--config", str(config)]
    return [sys.executable, "-c", DIRECT, str(config)]


def write_config(directory: Path, url: str, peers: dict[str, int]) -> Path:
    """The agent's configuration; every source is on."""
    (directory / "kernel.log").touch()
    (directory / "train.log").touch()
    addresses = ", ".join(f'{name} = "127.0.0.1:{port}"' for name, port in peers.items())
    path = directory / "collector.toml"
    path.write_text(
        f'run_dir = "{directory}"\n[kafka]\nurl = "{url}"\n[collector]\nnode = "n0"\nrail_address = "127.0.0.1"\n'
        f"probe_port = {free_port()}\npeers = {{ {addresses} }}\n"
        f'log_files = {{ kernel = "{directory}/kernel.log", train = "{directory}/train.log" }}\n',
        encoding="utf-8",
    )
    return path


def surround(directory: Path, stop: threading.Event, peers: dict[str, int]) -> None:
    """Peers that answer, a trainer that reports, a log that grows: 4 ranks, 4 steps a second each."""
    responder = echo.Responder(1000.0)
    sockets = [echo.stamped_socket(("127.0.0.1", port)) for port in peers.values()]
    hook = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    log = (directory / "train.log").open("a", encoding="utf-8")
    step, next_step = 0, time.monotonic()
    while not stop.wait(0.005):
        for sock in sockets:
            responder.serve(sock, time.monotonic())
        if time.monotonic() < next_step:
            continue
        next_step += 0.25
        step += 1
        log.write(f"step {step} loss 2.31\n")
        log.flush()
        for rank in range(RANKS):
            say(hook, str(directory / "n0" / "hook.sock"), step_datagram(rank, step, RANKS))
    for sock in (*sockets, hook):
        sock.close()
    log.close()


def say(hook: socket.socket, path: str, payload: bytes) -> None:
    """Send as the hook does: never wait."""
    try:
        hook.sendto(payload, path)
    except OSError:
        return  # the agent is not up yet


def step_datagram(rank: int, step: int, world: int) -> bytes:
    """A step as the hook reports it."""
    now_ns = time.time_ns()
    return json.dumps({
        "v": 1, "t": "step", "job": "bench", "generation": 1, "node": "n0", "rank": rank, "world": world, "pid": os.getpid(),
        "step": step, "phase": "train", "start_ns": now_ns - 60_000_000, "duration_ms": 60.123, "data_ms": 1.5, "forward_ms": 20.25,
        "backward_ms": 30.75, "wait_ms": 5.5, "optimizer_ms": 2.5, "checkpoint_ms": 0.0, "arrived_ns": now_ns, "cpu_ms": 58.0,
        "loss": 2.314159, "grad_norm_local": 0.43, "grad_norm": 0.41, "samples": 64, "hook_us": 55.0,
    }, separators=(",", ":")).encode()  # fmt: skip


def cpu_s(pid: int) -> float:
    """Processor seconds of a process, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (float(fields[11]) + float(fields[12])) / os.sysconf("SC_CLK_TCK")


def summed_pss_bytes(pid: int) -> int:
    """Proportional memory of a process and its children."""
    total = 0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    for member in [str(pid), *children]:
        rollup = Path(f"/proc/{member}/smaps_rollup").read_text(encoding="ascii")
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


if __name__ == "__main__":
    raise SystemExit(main())
