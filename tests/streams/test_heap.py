"""What was freed goes back to the system, also from between what is still needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streams.heap import trimmer

# holes of a page and more between small pieces that stay: nothing of it is at the end of the heap
_HOLES = """
from pathlib import Path
from streams.heap import give_back
def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
large, small = [], []
for number in range(4000):
    large.append(bytearray(60_000))
    small.append(bytearray(600))
large.clear()
before = resident_mb()
give_back()
print(before - resident_mb())
"""


@pytest.mark.skipif(trimmer() is None, reason="this C library gives back by itself")
def test_holes_between_what_stays_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) > 150, "of 229 MB"
