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


def replica_path(job: str, node: str, rank: int) -> str:
    """Path of the replica that this node keeps for a rank of another node."""
    return f"{prefix(job, node)}replica-{rank}"


def replicas(job: str, node: str) -> list[str]:
    """Paths of all whole replicas that this node keeps."""
    return sorted(path for path in glob.glob(glob.escape(prefix(job, node)) + "replica-*") if path[-1].isdecimal())


def rank_of_replica(path: str) -> int:
    """The rank whose replica lies at ``path``."""
    return int(path.rpartition("-")[2])


def unlink_all(job: str, node: str) -> int:
    """Remove all segments of this job on this node; returns how many there were."""
    own = glob.escape(prefix(job, node))
    found = glob.glob(own + "[0-9]*-[ab]") + glob.glob(own + "replica-[0-9]*")
    for name in found:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return len(found)
