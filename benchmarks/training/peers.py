"""The peers' interpreter: a private environment with torchft, DLRover and nvidia-resiliency-ext by pinned versions, borrowing this
one's torch.

python -m benchmarks.training.peers          # make it and say where
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONSTRAINTS = Path(__file__).with_name("constraints.txt")
INSTALL_LIMIT_S = 600
NEEDS = {
    "dlrover": ("grpcio", "protobuf", "psutil"),
    "torchft": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    "nvidia-resiliency-ext": ("pyyaml", "defusedxml", "psutil", "packaging", "pynvml"),
}
"""What each needs besides torch, which its own list would fetch anew by gigabytes."""


def folder() -> Path:
    """Where the environment lies; named by its pins."""
    base = Path(os.environ.get("TRAINWARDEN_BENCH_PEERS", REPOSITORY / ".venv-bench" / "peers"))
    return base / hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()[:12]


def interpreter(peer: str) -> tuple[str, str]:
    """Python with ``peer``, and why there is none."""
    home = folder()
    python, done = home / "bin" / "python", home / f".{peer}-installed"
    if done.exists():
        return str(python), ""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    try:
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(home)])
        _run([*pip, "--no-deps", peer])
        _run([*pip, *NEEDS[peer]])
        shelf = _run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        Path(shelf, "torch_of_the_bench.pth").write_text(sysconfig.get_path("purelib") + "\n")
        _run([str(python), "-c", f"import {peer.replace('-', '_')}"])
    except subprocess.CalledProcessError as error:
        last = (error.stderr or error.stdout or "").strip().splitlines()[-1:]
        return "", f"{peer} could not be installed here: {' '.join(last)[:200]}"
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"{peer} could not be installed here: {error}"
    done.touch()
    return str(python), ""


def environment() -> dict[str, str]:
    """For a script of the bench in the peers' interpreter: it finds this repository."""
    return {"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "hook")))}


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S).stdout


if __name__ == "__main__":
    for name in NEEDS:
        print(name, *interpreter(name))
