"""No broker at the address given: whoever cannot work without one says so after a while. Nearly all of that is waiting."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.processes import MARK
from tests.faults.test_misuse import Files, ours, sentence_of


@pytest.mark.timeout(240)
def test_nobody_listens_at_the_kafka_address(tmp_path: Path) -> None:
    """The worker and the collectors wait for a broker; whoever cannot work without one says so. All at once: they wait a while."""
    files = Files(tmp_path, "kafka://127.0.0.1:9")
    config, mark = files.write(), f"misuse-{os.urandom(8).hex()}"
    parts = ("topics", "actions", "store", "up")
    with ExitStack() as stack:
        running = {}
        for part in parts:
            arguments = ["--without-broker"] if part == "up" else []
            own = files.directory / part
            own.mkdir()
            command = ours(part, "--config", config, *arguments)
            process = subprocess.Popen(
                command, cwd=own, env={**os.environ, MARK: f"{mark}-{part}"}, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.kill)
            running[part] = (command, process)
        for part, (command, process) in running.items():
            _, stderr = process.communicate(timeout=200)
            assert "127.0.0.1:9" in sentence_of(command, process.returncode, stderr, f"{mark}-{part}")
