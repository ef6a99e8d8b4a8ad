"""Run every benchmark in turn: `make bench`, or `python -m benchmarks NAME...`.

`detect` has an environment of its own (`make bench-detect`), and what takes hours is run by name only.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import benchmarks

BY_NAME_ONLY = frozenset({"detect", "endurance"})


def main() -> int:
    """Run the benchmarks named, or all; non-zero when one failed."""
    known = sorted(info.name for info in pkgutil.iter_modules(benchmarks.__path__) if not info.name.startswith("_"))
    chosen = sys.argv[1:] or [name for name in known if name not in BY_NAME_ONLY]
    if unknown := sorted(set(chosen) - set(known)):
        print(f"no benchmark is called {unknown[0]!r}: known are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
