"""Multipath TCP: every connection of the job has a standby on each further rail, and goes on with it at once when a rail dies.

Sockets become MPTCP by a preloaded library (the program is not changed). The standby is announced with a port of its own, on which the
kernel itself listens: libraries bind their listeners to one address only. What is set here is an endpoint of the kernel's path manager;
those of other addresses than the rails' are never touched.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import struct
import threading

from trainwarden_hook.addresses import UsageError
from trainwarden_hook.native import NotBuilt, build
from trainwarden_hook.netlink import NLM_F_DUMP, Channel, NetlinkError, attribute, attributes, nested
from trainwarden_hook.rails import Peer
from trainwarden_hook.subflows import Subflows, to_cut

log = logging.getLogger("trainwarden.links")
NETLINK_GENERIC, GENL_ID_CTRL, CTRL_CMD_GETFAMILY = 16, 16, 3
CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME = 1, 2
GENL = struct.Struct("=BBH")
CMD_ADD, CMD_DEL, CMD_GET, CMD_SET_LIMITS = 1, 2, 3, 5
ATTR_ADDR, ATTR_RCV_ADD_ADDRS, ATTR_SUBFLOWS = 1, 2, 3
ADDR_FAMILY, ADDR_ID, ADDR_ADDR4, ADDR_PORT, ADDR_FLAGS, ADDR_IF_IDX = 1, 2, 3, 5, 6, 7
SIGNAL, SUBFLOW, BACKUP = 1, 2, 4
MAX_SUBFLOWS = 8
PORTS = 16
"""The listener of an endpoint just removed may still hold its port: the next one takes the next."""
PRELOAD_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif
int socket(int family, int kind, int protocol) {
  static int (*plain)(int, int, int);
  if (!plain) plain = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
  int stream = (kind & ~(SOCK_CLOEXEC | SOCK_NONBLOCK)) == SOCK_STREAM;
  int tcp = protocol == 0 || protocol == IPPROTO_TCP;
  if (stream && tcp && (family == AF_INET || family == AF_INET6)) {
    int made = plain(family, kind, IPPROTO_MPTCP);
    if (made >= 0) return made;
  }
  return plain(family, kind, protocol);
}
/* gloo sets SO_REUSEADDR on connections as well: without effect on TCP, an error on MPTCP */
int setsockopt(int file, int level, int name, const void *value, socklen_t size) {
  static int (*plain)(int, int, int, const void *, socklen_t);
  if (!plain) plain = (int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
  int done = plain(file, level, name, value, size);
  if (done == 0 || errno != EINVAL || level != SOL_SOCKET || (name != SO_REUSEADDR && name != SO_REUSEPORT)) return done;
  int protocol = 0;
  socklen_t length = sizeof protocol;
  if (getsockopt(file, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) == 0 && protocol == IPPROTO_MPTCP) return 0;
  errno = EINVAL;
  return done;
}
"""


class PathManager:
    """The kernel's path manager of this network namespace."""

    def __init__(self) -> None:
        self._channel = Channel(NETLINK_GENERIC)
        self._family = self._find()

    def _find(self) -> int:
        name = attribute(CTRL_ATTR_FAMILY_NAME, b"mptcp_pm\0")
        try:
            answers = self._channel.ask(GENL_ID_CTRL, 0, GENL.pack(CTRL_CMD_GETFAMILY, 1, 0) + name)
        except NetlinkError as error:
            raise UsageError(f"links: this kernel has no MPTCP ({error.strerror}); set mptcp = false") from error
        return int(struct.unpack("=H", attributes(answers[0][1][GENL.size :])[CTRL_ATTR_FAMILY_ID])[0])

    def close(self) -> None:
        """Give the socket back; endpoints stay."""
        self._channel.close()

    def set_limits(self) -> None:
        """Allow standbys, both announced and accepted."""
        self._ask(CMD_SET_LIMITS, *(_whole(kind, MAX_SUBFLOWS) for kind in (ATTR_RCV_ADD_ADDRS, ATTR_SUBFLOWS)))

    def add(self, address: str, interface: int, flags: int, port: int = 0) -> None:
        """An endpoint; raises `NetlinkError`."""
        parts = [_family(), _address(address), _whole(ADDR_FLAGS, flags), _whole(ADDR_IF_IDX, interface)]
        if port:
            parts.append(attribute(ADDR_PORT, struct.pack("=H", port)))
        self._ask(CMD_ADD, nested(ATTR_ADDR, *parts))

    def remove(self, number: int, address: str) -> None:
        """The endpoint of that number, and every part of a connection that uses it."""
        self._ask(CMD_DEL, nested(ATTR_ADDR, _family(), attribute(ADDR_ID, bytes([number])), _address(address)))

    def all(self) -> list[tuple[int, str, int, int]]:
        """(number, address, port, flags) of every endpoint."""
        answers = self._channel.ask(self._family, NLM_F_DUMP, GENL.pack(CMD_GET, 1, 0))
        return [_endpoint(payload) for _, payload in answers]

    def _ask(self, command: int, *parts: bytes) -> None:
        self._channel.ask(self._family, 0, GENL.pack(command, 1, 0) + b"".join(parts))


def _family() -> bytes:
    return attribute(ADDR_FAMILY, struct.pack("=H", socket.AF_INET))


def _address(address: str) -> bytes:
    return attribute(ADDR_ADDR4, socket.inet_aton(address))


def _whole(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _endpoint(payload: bytes) -> tuple[int, str, int, int]:
    found = attributes(attributes(payload[GENL.size :]).get(ATTR_ADDR, b""))
    address = socket.inet_ntoa(found[ADDR_ADDR4]) if ADDR_ADDR4 in found else ""
    port = struct.unpack("=H", found[ADDR_PORT])[0] if ADDR_PORT in found else 0
    flags = struct.unpack("=I", found[ADDR_FLAGS])[0] if ADDR_FLAGS in found else 0
    return found[ADDR_ID][0], address, port, flags


class Standbys:
    """Our endpoints: a standby on each further rail from the start, and one on the first after it was out.

    Parameters
    ----------
    own
        The own node: what training binds, and its address per rail.
    port
        First of the ports that the kernel listens on.
    """

    def __init__(self, own: Peer, port: int) -> None:
        self._manager = PathManager()
        self._subflows = Subflows()
        self._own = own
        self._ports = range(port, port + PORTS)
        self._turn = 0
        self._busy = threading.Lock()

    def begin(self, indexes: list[int]) -> None:
        """Remove what an earlier warden left and set the standbys anew."""
        self._manager.set_limits()
        for rail, interface in enumerate(indexes):
            self._withdraw(rail)
            if rail:
                self._announce(rail, interface)

    def cut(self, peer: Peer, rail: int) -> int:
        """Number of parts to the peer on a rail that were ended. The connections go on with their standby; those without keep theirs."""
        ours, theirs = self._own.on[rail], peer.on[rail]
        pairs = {(ours, theirs), (ours, peer.address), (self._own.address, theirs)}
        if rail == 0:
            pairs.add((self._own.address, peer.address))
        ended = 0
        try:
            for part in to_cut(self._subflows.all(), pairs):
                ended += self._subflows.end(part)
        except NetlinkError as error:
            log.warning("connections to %s stay on rail %d until TCP gives it up: %s", peer.name, rail, error.strerror)
        return ended

    def put_in(self, rail: int, interface: int) -> None:
        """Connections use the rail again. In the background: the kernel waits some 20 ms over each endpoint removed."""
        threading.Thread(target=self._put_in, args=(rail, interface), name="trainwarden-standby", daemon=True).start()

    def _put_in(self, rail: int, interface: int) -> None:
        with self._busy:
            self._withdraw(rail)
            self._announce(rail, interface)

    def _announce(self, rail: int, interface: int) -> None:
        """Those that we opened get a part by our own doing, those opened to us because it is announced."""
        address, backup = self._own.on[rail], BACKUP if rail else 0
        if not interface:
            return
        if rail == 0:
            self._add(address, interface, SUBFLOW, 0)
        for _ in self._ports:
            self._turn += 1
            if self._add(address, interface, SIGNAL | backup, self._ports[self._turn % len(self._ports)]):
                return
        log.warning("no port from %d on is free to announce %s", self._ports[0], address)

    def clear(self) -> None:
        """Take all of ours away."""
        with self._busy:
            for rail in range(len(self._own.on)):
                self._withdraw(rail)

    def close(self) -> None:
        """Give the sockets back; endpoints stay."""
        self._manager.close()
        self._subflows.close()

    def _withdraw(self, rail: int) -> None:
        """Endpoints of a rail's address that we may have set; those that the kernel made by itself (implicit) stay."""
        address = self._own.on[rail]
        for number, found, port, flags in self._manager.all():
            if found == address and (port in self._ports or (not port and flags & SUBFLOW and rail == 0)):
                self._remove(number, address)

    def _add(self, address: str, interface: int, flags: int, port: int) -> bool:
        try:
            self._manager.add(address, interface, flags, port)
        except NetlinkError as error:
            if error.errno == errno.EPERM:
                raise UsageError(
                    "links: MPTCP endpoints may not be set; run the warden as root or with CAP_NET_ADMIN"
                ) from error
            if error.errno != errno.EADDRINUSE:
                log.warning("no endpoint %s: %s", address, error.strerror)
            return False
        return True

    def _remove(self, number: int, address: str) -> None:
        try:
            self._manager.remove(number, address)
        except NetlinkError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                log.warning("endpoint %d of %s stays: %s", number, address, error.strerror)


def is_enabled(path: str = "/proc/sys/net/mptcp/enabled") -> bool:
    """Whether sockets of this network namespace may be MPTCP."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False


def preload_library(folder: str) -> str:
    """A library that makes TCP sockets MPTCP ones, compiled into ``folder`` (mptcpize's does not do for gloo, see in the source).

    Raises
    ------
    UsageError
        There is no C compiler that takes it.
    """
    library = os.path.join(os.path.abspath(folder), "trainwarden-mptcp.so")
    try:
        build(PRELOAD_SOURCE, library, ("-ldl",))
    except NotBuilt as error:
        raise UsageError(
            f"links: mptcp = true needs a C compiler: {error}; install gcc or set mptcp = false"
        ) from error
    return library
