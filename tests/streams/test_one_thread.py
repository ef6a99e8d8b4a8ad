"""The worker multiplies matrices with one thread, wherever it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

THREADS = "import os, streams.app, numpy; a = numpy.ones((400, 400)); a @ a; print(len(os.listdir('/proc/self/task')))"


def told(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**kept, **environment}, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one processor: nobody would take two threads")
def test_the_worker_loads_numpy_without_threads_of_its_own() -> None:
    assert told(THREADS, OPENBLAS_NUM_THREADS="2").strip() == "2", "else the count below says nothing"
    assert told(THREADS).strip() == "1"


@pytest.mark.parametrize("command", ["worker", "replay", "evaluate"])
def test_whoever_detects_sets_it_before_numpy_is_loaded(command: str) -> None:
    code = f"import sys, trainwarden.commands.{command}; print('numpy' in sys.modules)"
    assert told(code).strip() == "False"
