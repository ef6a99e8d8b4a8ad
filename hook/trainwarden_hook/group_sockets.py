"""The connections of a gloo process group, so that a survivor can end them: gloo's own abort leaves them open, and a rank that is no
neighbour of the dead one would wait in its collective until the time-out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat


class GroupSockets:
    """TCP connections that were there when the group had just been made, without those to the store.

    A connection of the script's own from before `attach` is among them: it is ended too, in a step that broke because a peer died.
    """

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def take(self) -> int:
        """Note the present ones; returns how many."""
        store = os.environ.get("MASTER_PORT", "")
        self._known = {}
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            inode = _inode(number)
            if inode and _leads_elsewhere(number, store):
                self._known[number] = inode
        return len(self._known)

    def shut(self) -> int:
        """End those that are still the same; returns how many."""
        count = 0
        for number, inode in self._known.items():
            if _inode(number) == inode:
                with contextlib.suppress(OSError), _opened(number) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        self._known = {}
        return count


def _inode(number: int) -> int:
    """Of an open socket, else 0."""
    try:
        found = os.fstat(number)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0


def _opened(number: int) -> socket.socket:
    return socket.socket(fileno=os.dup(number))


def _leads_elsewhere(number: int, store_port: str) -> bool:
    try:
        with _opened(number) as connection:
            if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.type != socket.SOCK_STREAM:
                return False
            return store_port not in {str(connection.getpeername()[1]), str(connection.getsockname()[1])}
    except OSError:
        return False
