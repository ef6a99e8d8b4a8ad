"""Names of the shared-memory segments that hold checkpoints, and their removal."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import zlib

SHARED_MEMORY_DIR = "/dev/shm"
MAX_PART = 60


def file_part(text: str) -> str:
    """A piece of a file name; what had to be changed keeps names apart by a checksum."""
    plain = re.sub(r"[^A-Za-z0-9_.]", "_", text)[:MAX_PART]
    return plain if plain == text else f"{plain}_{zlib.crc32(text.encode()):08x}"


def prefix(job: str, node: str) -> str:
    """Path that all segments of this job on this node begin with."""
    return f"{SHARED_MEMORY_DIR}/trainwarden-{file_part(job)}-{file_part(node)}-"


def path(job: str, node: str, local_rank: int, buffer: str) -> str:
    """Path of one buffer (``a`` or ``b``) of one local rank."""
    return f"{prefix(job, node)}{local_rank}-{buffer}"


def unlink_rank(job: str, node: str, local_rank: int) -> None:
    """Remove the buffers of one rank."""
    for buffer in ("a", "b"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path(job, node, local_rank, buffer))


def unlink_all(job: str, node: str) -> int:
    """Remove all segments of this job on this node; returns how many there were."""
    found = glob.glob(glob.escape(prefix(job, node)) + "[0-9]*-[ab]")
    for name in found:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return len(found)
