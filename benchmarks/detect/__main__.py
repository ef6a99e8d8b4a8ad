"""Run the benchmark of detectors: `python -m benchmarks.detect --split tune|test|all`."""

from __future__ import annotations

import os
import sys

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def main() -> int:
    """Keep every numeric library to one thread (they read this when they are imported), then run."""
    for variable in ONE_THREAD:
        os.environ.setdefault(variable, "1")
    from benchmarks.detect.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
