"""Small C sources of ours, compiled by the node's own compiler where it has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

COMPILE_LIMIT_S = 60.0


class NotBuilt(Exception):
    """There is no library; the text says why."""


def build(source: str, library: str, flags: Sequence[str] = ()) -> None:
    """Compile ``source`` into the shared library at ``library``; whoever opens that path never sees half of one.

    Raises
    ------
    NotBuilt
        There is no C compiler, it refuses the source, or the folder cannot be written to.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotBuilt("there is no C compiler on this node")
    try:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(library)) as place:
            made = os.path.join(place, "made.so")
            command = [compiler, "-shared", "-fPIC", "-O2", "-x", "c", "-o", made, "-", *flags]
            done = subprocess.run(
                command, input=source.encode(), capture_output=True, check=False, timeout=COMPILE_LIMIT_S
            )
            if done.returncode:
                raise NotBuilt(f"{compiler} refuses the source: {done.stderr.decode(errors='replace')[:200]}")
            os.rename(made, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"{compiler} could not be run: {error}") from error
