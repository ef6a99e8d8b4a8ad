"""One launcher per job and node: two would write the same shared memory, and whichever ends first would remove the other's.

The claim is a name of the kernel that is gone with the process that holds it, however that ends; nothing is left to be removed. It is
per network namespace and per mount of ``/dev/shm``.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import struct
import time

from trainwarden_hook.addresses import UsageError
from trainwarden_hook.segments import SHARED_MEMORY_DIR

log = logging.getLogger("trainwarden.launcher")
EARLIER_END_S = 10.0
AGAIN_S = 0.02
CREDENTIALS = struct.Struct("=iII")


class Occupied(UsageError):
    """Another launcher of this job runs on this node."""


def claim(job: str, node: str, wait_s: float = EARLIER_END_S) -> socket.socket:
    """Be the launcher of a job on a node until what is given back is closed, or this process ends.

    Parameters
    ----------
    wait_s
        An earlier launcher that is about to end is waited for so long.

    Raises
    ------
    Occupied
        Another one does not end.
    """
    until, name = time.monotonic() + wait_s, _name(job, node)
    while (own := _bound(name)) is None:
        holder = _wait_for_end(name, max(0.0, until - time.monotonic()))
        if holder is None and time.monotonic() < until + AGAIN_S:
            time.sleep(AGAIN_S)
            continue
        raise Occupied(
            f"{f'process {holder}' if holder else 'another process'} already runs job {job!r} on node {node}; stop it, or give this"
            " one a --job (or a --node, for several nodes on one machine) of its own"
        )
    return own


def _bound(name: str) -> socket.socket | None:
    """The name, ours; None while somebody else has it."""
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        own.bind(name)
        own.listen()
    except OSError as error:
        own.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return own


def _name(job: str, node: str) -> str:
    where = f"{os.stat(SHARED_MEMORY_DIR).st_dev}/{job}/{node}"
    return f"\0trainwarden-launcher-{hashlib.sha256(where.encode()).hexdigest()[:32]}"


def _wait_for_end(name: str, wait_s: float) -> int | None:
    """Process that holds the name still after so long; None when it has let go, or cannot be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(max(0.001, wait_s))
        try:
            asking.connect(name)  # at once, or not at all where too many ask
            holder, _, _ = CREDENTIALS.unpack(
                asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            )
        except OSError:
            # between its end and our question
            return None
        log.info("waiting up to %.0f s for launcher %d of this job to end", wait_s, holder)
        try:
            asking.recv(1)
        except TimeoutError:
            return int(holder)
        except OSError:
            return None
    return None
