"""Child processes that do not outlive who started them, not even when that is killed with SIGKILL."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

ENDED_WITH_PARENT = 143
_PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


def tethered(command: Sequence[str]) -> list[str]:
    """Command line that runs `command` under its own process id and sends it SIGTERM when the caller ends in whatever way.

    SIGTERM, not SIGKILL: each part then closes in an orderly way and takes along what it has started itself. The kernel watches the
    *thread* that starts the process, so start it from a thread that lives as long as the process should.

    Raises
    ------
    FileNotFoundError
        The program is not there.
    """
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(2, "no such program", command[0])
    return [sys.executable, "-ISc", _PROGRAM, str(os.getpid()), program, *command[1:]]
